"""The small operands of the Hopper forward: what a call has beside queries, keys and values.

Each is a flat array in global memory, or absent, so that a plain call's kernel holds nothing of
them. Segment ids come with a table of the key tiles that each 64 query rows visit, made before the
launch from the smallest and largest id of every tile: the cost follows the visible area where ids
are in order (packed documents), and stays right where they are not.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_flash.call import AttentionCall
from pallas_flash.hopper.problem import Problem
from pallas_flash.hopper.tile_sizes import ROWS
from pallas_flash.mask import Bounds, row_lengths

if TYPE_CHECKING:  # a type checker takes a one-letter shape string for a variable
    Flat = Array
else:
    Flat = Int[Array, "n"]


class Operands(NamedTuple):
    """Flat arrays, or refs to them; None where the call does not have them.

    Attributes:
      lengths: int32 (2, B), query and key lengths.
      query_ids: int32 (B, padded T) segment ids; -1 where there is none.
      key_ids: int32 (B, padded S); -2 where there is none.
      rows: int32 (B, padded T / 64, 4), `Bounds` in key tiles of each 64 query rows.
      units: int32 (B, units, 2), first and one past the last key tile loaded for each unit.
      sinks: float32 (N,).
      slopes: float32 (N,), of ALiBi.
    """

    lengths: Any = None
    query_ids: Any = None
    key_ids: Any = None
    rows: Any = None
    units: Any = None
    sinks: Any = None
    slopes: Any = None


def operands(call: AttentionCall, problem: Problem) -> Operands:
    """The small operands of a call, each as one flat array."""
    sizes, mask = problem.sizes, call.mask
    found = Operands()
    if mask.has_lengths:
        lengths = (
            row_lengths(mask.query_lengths, sizes.B, sizes.T),
            row_lengths(mask.key_value_lengths, sizes.B, sizes.S),
        )
        found = found._replace(lengths=jnp.concatenate(lengths))
    if mask.segments is not None:
        q_ids = _padded(mask.segments[0], problem.padded_rows, -1)
        k_ids = _padded(
            mask.segments[1], -(-sizes.S // problem.tiles.keys) * problem.tiles.keys, -2
        )
        rows, units = tile_tables(call, problem, q_ids, k_ids)
        found = found._replace(
            query_ids=q_ids.reshape(-1),
            key_ids=k_ids.reshape(-1),
            rows=rows.reshape(-1),
            units=units.reshape(-1),
        )
    if call.sinks is not None:
        found = found._replace(sinks=call.sinks.astype(jnp.float32))
    if call.alibi_slopes is not None:
        found = found._replace(slopes=call.alibi_slopes.astype(jnp.float32))
    return found


def _padded(ids: Int[Array, "B L"], length: int, nobody: int) -> Int[Array, "B padded"]:
    """Ids with padding, theirs and ours, replaced by one that the other side never has."""
    ids = jnp.where(ids >= 0, ids.astype(jnp.int32), nobody)
    return jnp.pad(ids, ((0, 0), (0, length - ids.shape[1])), constant_values=nobody)


def tile_tables(
    call: AttentionCall, problem: Problem, q_ids: Int[Array, "B t"], k_ids: Int[Array, "B s"]
) -> tuple[Int[Array, "B rows 4"], Int[Array, "B units 2"]]:
    """Key tiles to visit for every 64 query rows, and to load for every unit of them."""
    sizes, tiles = problem.sizes, problem.tiles
    others = dataclasses.replace(call.mask, query_segment_ids=None, key_value_segment_ids=None)
    bounds = others.kv_bounds(
        jnp.arange(0, problem.padded_rows, ROWS),
        ROWS,
        q_length=row_lengths(others.query_lengths, sizes.B, sizes.T)[:, None],
        kv_length=row_lengths(others.key_value_lengths, sizes.B, sizes.S)[:, None],
    ).in_tiles(tiles.keys)
    q_low, q_high = _range(q_ids.reshape(sizes.B, -1, ROWS))
    k_low, k_high = _range(k_ids.reshape(sizes.B, -1, tiles.keys))
    q_low, q_high, k_low, k_high = (
        q_low[:, :, None],
        q_high[:, :, None],
        k_low[:, None],
        k_high[:, None],
    )
    meets = (q_low <= k_high) & (k_low <= q_high)
    one = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    # A tile with padding in it has rows or columns to mask.
    whole_q = jnp.all(q_ids.reshape(sizes.B, -1, ROWS) >= 0, axis=-1)[:, :, None]
    whole_k = jnp.all(k_ids.reshape(sizes.B, -1, tiles.keys) >= 0, axis=-1)[:, None]
    rows = _intersect(bounds, meets, one & whole_q & whole_k)
    lo, full_lo, full_hi, hi = rows
    seen = lo < hi
    many = jnp.iinfo(jnp.int32).max
    unit = tiles.queries * tiles.cluster // ROWS
    first = jnp.min(jnp.where(seen, lo, many).reshape(sizes.B, -1, unit), axis=-1)
    last = jnp.max(jnp.where(seen, hi, 0).reshape(sizes.B, -1, unit), axis=-1)
    # Where nothing is seen one tile is visited all the same, fully masked.
    first = jnp.minimum(first, k_low.shape[-1] - 1)
    units = jnp.stack([first, jnp.maximum(last, first + 1)], axis=-1)
    return jnp.stack([lo, full_lo, full_hi, hi], axis=-1), units


def _range(ids: Int[Array, "B n size"]) -> tuple[Int[Array, "B n"], Int[Array, "B n"]]:
    """Smallest and largest id of each tile, padding aside; an empty range where all is padding."""
    limits = jnp.iinfo(jnp.int32)
    low = jnp.min(jnp.where(ids >= 0, ids, limits.max), axis=-1)
    return low, jnp.max(jnp.where(ids >= 0, ids, limits.min), axis=-1)


def _intersect(bounds: Bounds, meets: Bool[Array, "B n m"], full: Bool[Array, "B n m"]) -> Bounds:
    """The bounds narrowed to the tiles of a map, as int32 arrays (B, n)."""
    count = meets.shape[-1]
    tiles = jnp.arange(count, dtype=jnp.int32)
    shape = meets.shape[:2]
    lo, full_lo, full_hi, hi = (
        jnp.broadcast_to(x, shape)[:, :, None].astype(jnp.int32) for x in bounds
    )
    meets &= (tiles >= lo) & (tiles < hi)
    full &= (tiles >= full_lo) & (tiles < full_hi)
    start = jnp.argmax(full, axis=-1).astype(jnp.int32)  # of the first run of full tiles
    after = ~full & (tiles >= start[:, :, None])
    end = jnp.where(jnp.any(after, axis=-1), jnp.argmax(after, axis=-1), count).astype(jnp.int32)
    some = jnp.any(full, axis=-1)
    return Bounds(
        lo=jnp.argmax(meets, axis=-1).astype(jnp.int32),
        full_lo=jnp.where(some, start, 0),
        full_hi=jnp.where(some, end, 0),
        hi=jnp.where(
            jnp.any(meets, axis=-1), count - jnp.argmax(meets[..., ::-1], axis=-1), 0
        ).astype(jnp.int32),
    )


def static_fields(call: AttentionCall) -> dict[str, Any]:
    """What of a call the kernel is compiled for, beside sizes and scale."""
    return {
        "mask": jax.tree.map(lambda _: 0, call.mask),
        "soft_cap": call.soft_cap,
        "has_sinks": call.sinks is not None,
        "has_alibi": call.alibi_slopes is not None,
    }
