"""What the Hopper backward reads beside the matrices: row statistics, lengths, segments, slopes.

Segment ids come with a table of the query tiles that each key tile visits, made before the launch
from the smallest and largest id of every tile: the cost follows the visible area where ids are in
order (packed documents), and stays right where they are not.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_flash.call import AttentionCall
from pallas_flash.hopper.backward_problem import Inputs, Problem
from pallas_flash.hopper.tables import flat_lengths, id_ranges, narrowed, padded_ids
from pallas_flash.mask import Bounds, row_lengths


def small_operands(call: AttentionCall, problem: Problem) -> Inputs:
    """The inputs that only some calls have."""
    sizes, mask, tiles = problem.sizes, call.mask, problem.tiles
    found = Inputs(lengths=flat_lengths(mask, sizes))
    if mask.segments is not None:
        q_ids = padded_ids(mask.segments[0], pl.cdiv(sizes.T, tiles.queries) * tiles.queries, -1)
        k_ids = padded_ids(mask.segments[1], problem.key_tiles * tiles.keys, -2)
        bounds = tile_bounds(call, problem, q_ids, k_ids)
        found = found._replace(
            query_ids=q_ids,
            key_ids=k_ids.reshape(-1),
            bounds=jnp.stack(bounds, axis=-1).reshape(-1),
        )
    if call.alibi_slopes is not None:
        found = found._replace(slopes=call.alibi_slopes.astype(jnp.float32))
    return found


def tile_bounds(
    call: AttentionCall, problem: Problem, q_ids: Int[Array, "B t"], k_ids: Int[Array, "B s"]
) -> Bounds:
    """Query tiles to visit for every key tile, (B, key tiles) int32 each.

    All tiles between the first and the last whose range of ids meets the key tile's; unmasked are
    the first run of those where both hold one and the same id.
    """
    sizes, tiles = problem.sizes, problem.tiles
    others = dataclasses.replace(call.mask, query_segment_ids=None, key_value_segment_ids=None)
    bounds = others.q_bounds(
        jnp.arange(0, problem.key_tiles * tiles.keys, tiles.keys),
        tiles.keys,
        q_length=row_lengths(others.query_lengths, sizes.B, sizes.T)[:, None],
        kv_length=row_lengths(others.key_value_lengths, sizes.B, sizes.S)[:, None],
    ).in_tiles(tiles.queries)
    q_low, q_high, q_whole = id_ranges(q_ids.reshape(sizes.B, -1, tiles.queries))
    k_low, k_high, k_whole = id_ranges(k_ids.reshape(sizes.B, -1, tiles.keys))
    # (B, key tiles, query tiles)
    meets = (k_low[:, :, None] <= q_high[:, None]) & (q_low[:, None] <= k_high[:, :, None])
    one = (k_whole & (k_low == k_high))[:, :, None] & (q_whole & (q_low == q_high))[:, None]
    return narrowed(bounds, meets, one & meets)
