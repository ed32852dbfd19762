"""Tile sizes of the Hopper backward: a tuned table and the budget of shared memory.

Registers (per thread of a consumer warpgroup, 240 of them) hold dK and dV, (H + Hv) / 2 by keys and
half of that by head dim, and at the peak P and dP (queries / 2 each) with P's bf16 copy
(queries / 4) and the row statistics.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_flash.hopper.tile_sizes import SMEM_LIMIT, SMEM_OVERHEAD

HALF = 64
"""Keys of one consumer warpgroup, and the side of a piece of dQ: the M of a wgmma."""


@dataclasses.dataclass(frozen=True)
class BackwardTiles:
    """How the backward kernel cuts one call.

    Attributes:
      queries: query rows per step, 64 or 128.
      by_head_dim: divide dK, dV and dQ between the two warpgroups by columns, with 64 keys per
        CTA, instead of by keys, with 128.
      stages, dout_stages: query and dO tiles in flight.
      heads_together: key/value heads whose key tiles are launched together, longest first; a
        larger number balances a causal mask, a smaller one keeps Q and dO in L2.
    """

    queries: int = 64
    by_head_dim: bool = False
    stages: int = 2
    dout_stages: int = 2
    heads_together: int = 1

    def __post_init__(self) -> None:
        if self.queries not in (64, 128):
            raise ValueError(f"queries must be 64 or 128, got {self.queries}")
        for name in ("stages", "dout_stages", "heads_together"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def keys(self) -> int:
        """Keys of one CTA."""
        return HALF if self.by_head_dim else 2 * HALF

    def dquery_pieces(self, head_dim: int, warpgroup: Any) -> list[tuple[Any, Any]]:
        """(first query, first column) of the 64 x 64 pieces of dQ that a warpgroup computes.

        The pieces of one step are divided between two warpgroups, by columns where there are
        enough of them.

        >>> BackwardTiles().dquery_pieces(128, 1)
        [(0, 64)]
        >>> BackwardTiles(queries=128).dquery_pieces(64, 1)
        [(64, 0)]
        >>> BackwardTiles(by_head_dim=True).dquery_pieces(256, 1)
        [(0, 128), (0, 192)]
        """
        columns = head_dim // HALF
        if columns == 1:
            return [(warpgroup * HALF, 0)]
        each = columns // 2
        return [
            (row, (warpgroup * each + piece) * HALF)
            for row in range(0, self.queries, HALF)
            for piece in range(each)
        ]

    def shared_bytes(self, head_dim: int, itemsize: int = 2) -> int:
        """Bytes of shared memory that a CTA needs.

        >>> BackwardTiles().shared_bytes(128)
        198656
        """
        matrices = 2 * self.keys + (self.stages + self.dout_stages) * self.queries
        ds = 2 * self.keys * self.queries
        statistics = 4 * (self.stages + self.dout_stages) * self.queries
        dquery = 2 * 4 * HALF * HALF
        return (matrices * head_dim + ds) * itemsize + statistics + dquery + SMEM_OVERHEAD

    def check(self, head_dim: int) -> None:
        """Raise before the launch when the tiles cannot serve or cannot fit.

        >>> BackwardTiles(queries=128).check(128)
        Traceback (most recent call last):
        ...
        ValueError: BackwardTiles(queries=128, stages=2, dout_stages=2) with head dim 128 need \
297984 bytes of shared memory, a CTA has 232448: use fewer queries or stages
        """
        if head_dim % (2 * HALF) and (head_dim != HALF or self.queries == HALF):
            raise ValueError(
                f"head dim {head_dim} with {self.queries} queries cannot be divided between two "
                "warpgroups: head dim 64 needs 128 queries, others a multiple of 128"
            )
        need = self.shared_bytes(head_dim)
        if need > SMEM_LIMIT:
            raise ValueError(
                f"BackwardTiles(queries={self.queries}, stages={self.stages}, "
                f"dout_stages={self.dout_stages}) with head dim {head_dim} need {need} bytes of "
                f"shared memory, a CTA has {SMEM_LIMIT}: use fewer queries or stages"
            )


# head dim -> tiles, timed on an H200; see experiments/LOG.md.
TUNED = {
    64: BackwardTiles(queries=128),
    128: BackwardTiles(queries=64),
    256: BackwardTiles(queries=64, by_head_dim=True, dout_stages=1),
}


def default_backward_tiles(head_dim: int) -> BackwardTiles:
    """The tuned tiles of a head dim.

    >>> default_backward_tiles(64).queries
    128
    """
    if head_dim not in TUNED:
        raise ValueError(f"no Hopper backward tiles for head dim {head_dim}; there are {[*TUNED]}")
    return TUNED[head_dim]
