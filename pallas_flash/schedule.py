"""Which tiles to visit: the tile map of a mask, and the lists that loops walk.

For masks that are intervals of indices, `Mask.kv_bounds` inside a kernel is enough. Segment ids,
positions and block masks need a look at the data first: here they are summarised per tile (smallest
and largest id or position), which costs O(T + S) and one small (tiles x tiles) map.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_flash.mask import Mask, row_lengths


class Schedule(NamedTuple):
    """For each query tile, the key tiles it visits.

    Attributes:
      order: key tile numbers, the visited ones first, ascending.
      count: how many of them to visit.

    The leading axis is the batch, or 1 where every row has the same schedule.
    """

    order: Int[Array, "rows q_tiles kv_tiles"]
    count: Int[Array, "rows q_tiles"]


def schedule(mask: Mask, batch: int, queries: int, keys: int, blocks: tuple[int, int]) -> Schedule:
    """The key tiles that each query tile visits.

    Args:
      mask: the call's mask.
      batch, queries, keys: B, T and S.
      blocks: queries and keys per tile.
    """
    visit = tile_map(mask, batch, queries, keys, blocks)
    order = jnp.argsort(~visit, axis=-1, stable=True).astype(jnp.int32)
    return Schedule(order, jnp.sum(visit, axis=-1, dtype=jnp.int32))


def tile_map(
    mask: Mask, batch: int, queries: int, keys: int, blocks: tuple[int, int]
) -> Bool[Array, "rows q_tiles kv_tiles"]:
    """False for tiles that are certainly empty; dense masks are not looked into.

    >>> causal = Mask(is_causal=True)
    >>> print(tile_map(causal, 1, 6, 6, (2, 2))[0].astype(int))
    [[1 0 0]
     [1 1 0]
     [1 1 1]]
    """
    block_q, block_k = blocks
    q_starts = jnp.arange(0, queries, block_q)
    k_starts = jnp.arange(0, keys, block_k)
    q_length = row_lengths(mask.query_lengths, batch, queries)
    kv_length = row_lengths(mask.key_value_lengths, batch, keys)
    if not mask.has_lengths:
        q_length, kv_length = q_length[:1], kv_length[:1]
    bounds = mask.kv_bounds(
        q_starts, block_q, q_length=q_length[:, None], kv_length=kv_length[:, None]
    )
    shape = (len(q_length), len(q_starts))
    lo, hi = (jnp.broadcast_to(x, shape)[:, :, None] for x in (bounds.lo, bounds.hi))
    visit = (k_starts + block_k > lo) & (k_starts < hi) & (lo < hi)

    if mask.blocks is not None:
        visit &= mask.blocks.visits(blocks)
    if mask.segments is not None:
        q_ids, k_ids = mask.segments
        visit &= _ranges_meet(
            _tile_range(q_ids, q_ids >= 0, block_q), _tile_range(k_ids, k_ids >= 0, block_k), 0, 0
        )
    if mask.has_positions and mask.has_diagonal:
        q_places = _places(mask.query_positions, batch, queries)
        k_places = _places(mask.key_value_positions, batch, keys)
        q_real = jnp.arange(queries) < row_lengths(mask.query_lengths, batch, queries)[:, None]
        k_real = jnp.arange(keys) < row_lengths(mask.key_value_lengths, batch, keys)[:, None]
        visit &= _ranges_meet(
            _tile_range(q_places, q_real, block_q),
            _tile_range(k_places, k_real, block_k),
            mask.left,
            mask.right,
        )
    return visit


def _places(positions: Array | None, batch: int, size: int) -> Array:
    if positions is not None:
        return positions
    return jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))


def _tile_range(values: Array, real: Array, block: int) -> tuple[Array, Array]:
    """Smallest and largest value of each tile, (B, tiles); crossed over where none is real."""
    batch, size = values.shape
    info = jnp.iinfo(values.dtype)
    padding = ((0, 0), (0, -size % block))

    def tiles(fill: int) -> Array:
        padded = jnp.pad(jnp.where(real, values, fill), padding, constant_values=fill)
        return padded.reshape(batch, -1, block)

    return tiles(info.max).min(axis=-1), tiles(info.min).max(axis=-1)


def _ranges_meet(
    q_range: tuple[Array, Array],
    k_range: tuple[Array, Array],
    left: int | None,
    right: int | None,
) -> Bool[Array, "B q_tiles kv_tiles"]:
    """Whether any q in the query tile and k in the key tile may satisfy q-left <= k <= q+right."""
    q_min, q_max = (x[:, :, None] for x in q_range)
    k_min, k_max = (x[:, None, :] for x in k_range)
    meet = (q_min <= q_max) & (k_min <= k_max)
    # An unreal q_min is the largest integer and q_max the smallest: these sums do not overflow.
    if left is not None:
        meet &= k_max >= q_min - left
    if right is not None:
        meet &= k_min <= q_max + right
    return meet


def visited_tiles(mask: Mask, batch: int, queries: int, keys: int, blocks: tuple[int, int]) -> int:
    """Number of tiles that the scan visits for one head, summed over the batch rows.

    >>> visited_tiles(Mask(is_causal=True), 1, 1024, 1024, (128, 128))  # of 64
    36
    """
    count = schedule(mask, batch, queries, keys, blocks).count
    return int(jax.device_get(count.sum())) * (batch if len(count) == 1 else 1)
