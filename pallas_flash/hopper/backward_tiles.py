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
      dquery_width: columns of dQ per matrix product, 64 or 128; the wider reads dS once less.
      heads_together: key/value heads whose key tiles are launched together, longest first: more
        balance a causal mask, fewer keep Q and dO in L2. None: the fewest that balance it.
    """

    queries: int = 64
    by_head_dim: bool = False
    stages: int = 2
    dout_stages: int = 2
    dquery_width: int = 64
    heads_together: int | None = None

    def __post_init__(self) -> None:
        if self.queries not in (64, 128):
            raise ValueError(f"queries must be 64 or 128, got {self.queries}")
        if self.dquery_width not in (64, 128):
            raise ValueError(f"dquery_width must be 64 or 128, got {self.dquery_width}")
        for name in ("stages", "dout_stages", "heads_together"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def keys(self) -> int:
        """Keys of one CTA."""
        return HALF if self.by_head_dim else 2 * HALF

    def dquery_products(self, head_dim: int, warpgroup: Any) -> list[tuple[Any, Any]]:
        """(first query, first column) of each product of 64 x `width` that a warpgroup computes.

        The warpgroups divide dQ by columns, or by queries where there are only 64 columns.

        >>> BackwardTiles().dquery_products(128, 1)
        [(0, 64)]
        >>> BackwardTiles(queries=128).dquery_products(64, 1)
        [(64, 0)]
        >>> BackwardTiles(by_head_dim=True).dquery_products(256, 1)
        [(0, 128), (0, 192)]
        """
        if head_dim == HALF:
            return [(warpgroup * HALF, 0)]
        rows, columns = range(0, self.queries, HALF), head_dim // 2
        parts = range(0, columns, self.width(head_dim))
        return [(row, warpgroup * columns + part) for row in rows for part in parts]

    def width(self, head_dim: int) -> int:
        """Columns of one product with dS, at most `dquery_width`."""
        return min(self.dquery_width, max(HALF, head_dim // 2))

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
    256: BackwardTiles(queries=64, by_head_dim=True, dout_stages=1, dquery_width=128),
}


def default_backward_tiles(head_dim: int) -> BackwardTiles:
    """The tuned tiles of a head dim.

    >>> default_backward_tiles(64).queries
    128
    """
    if head_dim not in TUNED:
        raise ValueError(f"no Hopper backward tiles for head dim {head_dim}; there are {[*TUNED]}")
    return TUNED[head_dim]
