"""What the forward and the backward both make of lengths and segment ids before the launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_flash.call import Sizes
from pallas_flash.mask import Bounds, Mask, row_lengths

if TYPE_CHECKING:  # a type checker takes a one-letter shape string for a variable
    Flat = Array
else:
    Flat = Int[Array, "n"]


def flat_lengths(mask: Mask, sizes: Sizes) -> Flat | None:
    """Query lengths of all batch rows, then key lengths; None when the mask has neither."""
    if not mask.has_lengths:
        return None
    lengths = (
        row_lengths(mask.query_lengths, sizes.B, sizes.T),
        row_lengths(mask.key_value_lengths, sizes.B, sizes.S),
    )
    return jnp.concatenate(lengths)


def padded_ids(ids: Int[Array, "B L"], length: int, nobody: int) -> Int[Array, "B length"]:
    """Ids with padding, theirs and ours, replaced by one that the other side never has."""
    ids = jnp.where(ids >= 0, ids.astype(jnp.int32), nobody)
    return jnp.pad(ids, ((0, 0), (0, length - ids.shape[1])), constant_values=nobody)


def id_ranges(
    ids: Int[Array, "B n size"],
) -> tuple[Int[Array, "B n"], Int[Array, "B n"], Bool[Array, "B n"]]:
    """Smallest and largest id of each tile, padding aside, and whether it has no padding.

    The range of a tile that is all padding is empty.
    """
    limits = jnp.iinfo(jnp.int32)
    low = jnp.min(jnp.where(ids >= 0, ids, limits.max), axis=-1)
    high = jnp.max(jnp.where(ids >= 0, ids, limits.min), axis=-1)
    return low, high, jnp.all(ids >= 0, axis=-1)


def narrowed(bounds: Bounds, meets: Bool[Array, "B n m"], full: Bool[Array, "B n m"]) -> Bounds:
    """Bounds in tiles narrowed to the tiles of a map, int32 (B, n) each.

    All tiles from the first to the last that meets; unmasked are those of the first run of full
    ones, so that a row whose full tiles have gaps is masked more than it needs and stays right.
    """
    count = meets.shape[-1]
    tile = jnp.arange(count, dtype=jnp.int32)
    lo, full_lo, full_hi, hi = (jnp.broadcast_to(x, meets.shape[:2])[..., None] for x in bounds)
    meets &= (tile >= lo) & (tile < hi)
    full &= (tile >= full_lo) & (tile < full_hi)
    first = jnp.argmax(meets, axis=-1)
    last = jnp.where(meets.any(axis=-1), count - jnp.argmax(meets[..., ::-1], axis=-1), first)
    start = jnp.where(full.any(axis=-1), jnp.argmax(full, axis=-1), first)
    ended = ~full & (tile >= start[..., None])
    end = jnp.where(ended.any(axis=-1), jnp.argmax(ended, axis=-1), count)
    end = jnp.where(full.any(axis=-1), end, start)
    return Bounds(*(x.astype(jnp.int32) for x in (first, start, end, last)))
