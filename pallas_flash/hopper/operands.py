"""The small operands of the Hopper forward: what a call has beside queries, keys and values.

Each is a flat array in global memory (but for a bias in tiles), or absent, so that a plain call's
kernel holds nothing of them. Segment ids come with a table of the key tiles that each 64 query rows
visit, made before the launch from the smallest and largest id of every tile: the cost follows the
visible area where ids are in order (packed documents), and stays right where they are not.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_flash.call import AttentionCall
from pallas_flash.hopper.bias import bias_form, bias_operand
from pallas_flash.hopper.problem import Problem
from pallas_flash.hopper.tables import flat_lengths, id_ranges, narrowed, padded_ids
from pallas_flash.hopper.tile_sizes import ROWS
from pallas_flash.mask import row_lengths


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
      bias: see `pallas_flash.hopper.bias.bias_operand`.
    """

    lengths: Any = None
    query_ids: Any = None
    key_ids: Any = None
    rows: Any = None
    units: Any = None
    sinks: Any = None
    slopes: Any = None
    bias: Any = None


def operands(call: AttentionCall, problem: Problem) -> Operands:
    """The small operands of a call, each as one flat array."""
    sizes, mask = problem.sizes, call.mask
    found = Operands(lengths=flat_lengths(mask, sizes))
    if mask.segments is not None:
        q_ids = padded_ids(mask.segments[0], problem.padded_rows, -1)
        k_ids = padded_ids(
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
    if call.bias is not None and problem.bias is not None:
        bias = bias_operand(
            call.bias,
            problem.bias,
            sizes,
            padded_rows=problem.padded_rows,
            keys=problem.tiles.keys,
            factor=problem.logit_scale,
            lowest=problem.lowest_logit,
        )
        found = found._replace(bias=bias)
    return found


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
    q_low, q_high, q_whole = id_ranges(q_ids.reshape(sizes.B, -1, ROWS))
    k_low, k_high, k_whole = id_ranges(k_ids.reshape(sizes.B, -1, tiles.keys))
    # (B, 64 query rows, key tiles)
    meets = (q_low[:, :, None] <= k_high[:, None]) & (k_low[:, None] <= q_high[:, :, None])
    one = (q_whole & (q_low == q_high))[:, :, None] & (k_whole & (k_low == k_high))[:, None]
    rows = narrowed(bounds, meets, one & meets)
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


def static_fields(call: AttentionCall) -> dict[str, Any]:
    """What of a call the kernel is compiled for, beside sizes and scale."""
    return {
        "mask": jax.tree.map(lambda _: 0, call.mask),
        "soft_cap": call.soft_cap,
        "has_sinks": call.sinks is not None,
        "has_alibi": call.alibi_slopes is not None,
        "bias": bias_form(call),
    }
