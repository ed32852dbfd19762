"""Tile sizes of the Hopper forward: a tuned table, a rule for the rest, and the budget of both.

Shared memory holds the query tile, a ring of key and value tiles, one of bias tiles, and the output
tile on its way out. Registers (per thread of a consumer warpgroup, which owns 64 query rows) hold
the output accumulator (Hv / 2), the logits (keys / 2), the probabilities (keys / 4) and, where they
fit, the queries (H / 4). Warpgroups get 240 registers a thread when there are two, 160 when there
are three.
"""

from __future__ import annotations

import dataclasses
import itertools

from pallas_flash.hopper.bias import BiasForm

ROWS = 64
"""Query rows of one consumer warpgroup: the M of a wgmma."""
SMEM_LIMIT = 232_448
"""Bytes of shared memory that one CTA can have on sm_90."""
SMEM_OVERHEAD = 1024
"""Barriers and alignment."""


@dataclasses.dataclass(frozen=True)
class ForwardTiles:
    """How the forward kernel cuts one call.

    Attributes:
      keys: keys per tile; a multiple of 64 (the swizzle of a 16-bit operand), at most 256.
      stages: key and value tiles in flight.
      consumers: warpgroups that multiply, 64 query rows each; 2 or 3.
      query_in_registers: hold the query tile in registers: a quarter of the shared-memory reads
        of Q K^T less, H / 4 registers more.
      output_in_query: write the output through the query's shared memory; saves a tile, but the
        next query tile cannot be fetched early.
      cluster: CTAs that take neighbouring query tiles and share each key and value tile by
        multicast, so that each reads half of them from L2; 1 or 2.
      rescale_above: leave O unscaled until a row maximum has grown by more than this, in log2
        (see `pallas_flash.hopper.softmax`); 0 rescales with every key tile.
      early_key_wait: wait for the next key tile in front of the wait for O += P V, which keeps
        ptxas from moving the latter above the exponentials.
      bias_stages: bias tiles in flight, where the call has a bias.
    """

    keys: int = 128
    stages: int = 2
    consumers: int = 2
    query_in_registers: bool = True
    output_in_query: bool = False
    cluster: int = 1
    rescale_above: float = 0.0
    early_key_wait: bool = False
    bias_stages: int = 2

    def __post_init__(self) -> None:
        if self.keys % 64 or not 64 <= self.keys <= 256:
            raise ValueError(f"keys must be 64, 128, 192 or 256, got {self.keys}")
        if self.stages < 2:
            raise ValueError(f"stages must be at least 2, got {self.stages}")
        if self.bias_stages < 1:
            raise ValueError(f"bias_stages must be at least 1, got {self.bias_stages}")
        if self.consumers not in (2, 3):
            raise ValueError(f"consumers must be 2 or 3, got {self.consumers}")
        if not 0.0 <= self.rescale_above <= 8.0:
            raise ValueError(f"rescale_above must be from 0 to 8, got {self.rescale_above}")
        if self.cluster not in (1, 2):
            raise ValueError(f"cluster must be 1 or 2, got {self.cluster}")

    @property
    def queries(self) -> int:
        """Query rows of one CTA."""
        return ROWS * self.consumers

    @property
    def consumer_registers(self) -> int:
        return 240 if self.consumers == 2 else 160

    @property
    def producer_registers(self) -> int:
        return 24 if self.consumers == 2 else 32

    def shared_bytes(
        self, head_dim: int, value_dim: int, itemsize: int = 2, *, bias: BiasForm | None = None
    ) -> int:
        """Bytes of shared memory that a CTA needs."""
        query = self.queries * head_dim
        ring = self.stages * self.keys * (head_dim + value_dim)
        output = 0 if self.output_in_query else self.queries * value_dim
        tiles = (query + ring + output) * itemsize
        if bias is not None:
            tiles += self.bias_stages * self.keys * bias.bytes_per_key(self.queries)
        return tiles + SMEM_OVERHEAD

    def check(self, head_dim: int, value_dim: int, bias: BiasForm | None = None) -> None:
        """Raise before the launch when the tiles cannot fit.

        >>> ForwardTiles(keys=256).check(128, 128)
        Traceback (most recent call last):
        ...
        ValueError: ForwardTiles(keys=256, stages=2, consumers=2) with head dims 128 and 128 need \
328704 bytes of shared memory, a CTA has 232448: use fewer keys, stages or consumers
        """
        need = self.shared_bytes(head_dim, value_dim, bias=bias)
        if need > SMEM_LIMIT:
            raise ValueError(
                f"ForwardTiles(keys={self.keys}, stages={self.stages}, consumers={self.consumers}) "
                f"with head dims {head_dim} and {value_dim}{'' if bias is None else ' and a bias'} "
                f"need {need} bytes of shared memory, a CTA has {SMEM_LIMIT}: use fewer keys, "
                "stages or consumers"
            )
        if self.output_in_query and head_dim != value_dim:
            raise ValueError("output_in_query needs equal head dims of query and value")


# (head dim, value dim) -> tiles, timed on an H200; see experiments/LOG.md.
TUNED = {
    (64, 64): ForwardTiles(keys=128, consumers=3, query_in_registers=False, early_key_wait=True),
    (128, 128): ForwardTiles(keys=128, consumers=2, query_in_registers=True, cluster=2),
    (256, 256): ForwardTiles(
        keys=64, consumers=2, query_in_registers=False, output_in_query=True, cluster=2
    ),
}


def default_forward_tiles(
    head_dim: int, value_dim: int, *, masks_in_loop: bool = False, bias: BiasForm | None = None
) -> ForwardTiles:
    """The tuned tiles of these head dims, or by rule the most keys that fit both budgets.

    Args:
      masks_in_loop: whether the loop over key tiles holds masking code, which needs more registers
        than three warpgroups leave to each.
      bias: the form of the call's bias. Two tiles of it in flight come before many keys a tile.

    >>> default_forward_tiles(192, 128)
    ForwardTiles(keys=64, stages=2, consumers=2, query_in_registers=False, \
output_in_query=False, cluster=1, rescale_above=0.0, early_key_wait=False, bias_stages=2)
    """
    tiles = _plain_tiles(head_dim, value_dim)
    if masks_in_loop or bias is not None:
        tiles = dataclasses.replace(tiles, consumers=2)
    for stages, keys, output_in_query in itertools.product(
        (2, 1), (tiles.keys, 64), (tiles.output_in_query, head_dim == value_dim)
    ):
        tiles = dataclasses.replace(
            tiles, bias_stages=stages, keys=keys, output_in_query=output_in_query
        )
        if tiles.shared_bytes(head_dim, value_dim, bias=bias) <= SMEM_LIMIT:
            return tiles
    raise ValueError(
        f"no Hopper tiles for head dims {head_dim} and {value_dim} with a bias of {bias}"
    )


def _plain_tiles(head_dim: int, value_dim: int) -> ForwardTiles:
    tuned = TUNED.get((head_dim, value_dim))
    if tuned is not None:
        return tuned
    for keys in (128, 64):
        tiles = ForwardTiles(keys=keys, query_in_registers=False)
        registers = value_dim // 2 + keys // 2 + keys // 4
        if tiles.shared_bytes(head_dim, value_dim) <= SMEM_LIMIT and registers <= 190:
            return tiles
    raise ValueError(f"no Hopper tiles for head dims {head_dim} and {value_dim}; at most 256 fit")
