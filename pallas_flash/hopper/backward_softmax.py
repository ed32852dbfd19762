"""P^T of one tile of transposed logits, 64 keys of one warpgroup, and what dS^T multiplies."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.hopper.backward_problem import Index, Inputs, Problem, Refs, Scratch, Unit
from pallas_flash.hopper.backward_tiles import HALF, BackwardTiles
from pallas_flash.row_statistics import LOG2_E

CHUNK = 8
"""Columns masked at a time: their indices take four registers, a whole tile's would spill."""


def own_rows(tiles: BackwardTiles, warpgroup: Index) -> Any:
    """The keys that a warpgroup computes logits for."""
    return pl.ds(0, HALF) if tiles.by_head_dim else pl.ds(warpgroup * HALF, HALF)


def over_columns(ref: Refs, queries: int) -> Any:
    """A number for each query, as a tile of transposed logits."""
    row = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0))
    return lax.broadcast_in_dim(row, (HALF, queries), [1])


class Keys(NamedTuple):
    """The 64 keys of one warpgroup, with everything about them that is read once."""

    unit: Unit
    first: Index
    ids: Any = None  # (64,) segment ids


def keys_of(problem: Problem, inputs: Inputs, unit: Unit, warpgroup: Index) -> Keys:
    first = unit.first_key + own_rows(problem.tiles, warpgroup).start
    if inputs.key_ids is None:
        return Keys(unit, first)
    here = unit.batch * (problem.key_tiles * problem.tiles.keys) + first
    here = inputs.key_ids.at[pl.ds(here, HALF)]
    layout = plgpu.Layout.WGMMA.reduce(1)
    return Keys(unit, first, plgpu.load(here, layout=layout, optimized=False))


def probabilities(
    problem: Problem, scratch: Scratch, keys: Keys, tile: Index, slot: Index, s: Any, slope: Any
) -> tuple[Any, Any]:
    """P^T of one tile in the input dtype, and the factor of dP - D in dS^T, float32.

    Both exactly 0 where the mask hides the key. They differ by the derivative of the soft cap.
    """
    lse2 = over_columns(scratch.lse2.at[slot], problem.tiles.queries)
    logits = s * problem.product_scale
    if slope is not None:
        logits = _less_distance(problem, keys, tile, slope * problem.logit_scale, logits)
    if problem.soft_cap is None:
        p = weight = _masked(problem, scratch, keys, tile, slot, jnp.exp2(logits - lse2))
        return p.astype(problem.dtype), weight
    t = jnp.tanh(logits)
    p = jnp.exp2(t * (problem.soft_cap * LOG2_E) - lse2)
    p = _masked(problem, scratch, keys, tile, slot, p)
    return p.astype(problem.dtype), p - p * t * t


def _less_distance(problem: Problem, keys: Keys, tile: Index, slope: Any, logits: Any) -> Any:
    """ALiBi: logits - slope |i' - j|, a few columns at a time."""
    rows, columns = _chunk_indices(keys)
    unit, mask, queries = keys.unit, problem.mask, problem.tiles.queries
    place = tile * queries + mask.offset(unit.q_length, unit.kv_length)
    ahead = columns - lax.broadcast_in_dim(rows - place, (HALF, CHUNK), [0])
    ahead = ahead.astype(jnp.float32)
    parts = []
    for column in range(0, queries, CHUNK):
        part = lax.slice(logits, (0, column), (HALF, column + CHUNK))
        parts.append(part - slope * jnp.abs(ahead + float(column)))
    return jnp.concatenate(parts, axis=1)


def _chunk_indices(keys: Keys) -> tuple[Any, Any]:
    """Key indices (64,), and the columns of a chunk (64, CHUNK)."""
    layout = plgpu.Layout.WGMMA
    rows = plgpu.broadcasted_iota(jnp.int32, (HALF,), 0, layout=layout.reduce(1)) + keys.first
    return rows, plgpu.broadcasted_iota(jnp.int32, (HALF, CHUNK), 1, layout=layout)


def _masked(
    problem: Problem, scratch: Scratch, keys: Keys, tile: Index, slot: Index, p: Any
) -> Any:
    """P^T with 0 where the mask hides the key."""
    if problem.never_masks:
        return p
    partial = (tile < keys.unit.full_lo) | (tile >= keys.unit.full_hi)
    mask = functools.partial(_mask, problem, scratch, keys, tile, slot)
    return lax.cond(partial, mask, lambda p: p, p)


def _mask(problem: Problem, scratch: Scratch, keys: Keys, tile: Index, slot: Index, p: Any) -> Any:
    """P^T of a partial tile, a few columns at a time."""
    rows, columns = _chunk_indices(keys)
    unit, queries = keys.unit, problem.tiles.queries
    lo, hi = problem.interval_mask.key_bounds(
        rows, q_length=unit.q_length, kv_length=unit.kv_length
    )

    def beyond(bound: Any) -> Any:
        """How far the first chunk's columns are past a bound; a chunk compares with a constant."""
        return columns - lax.broadcast_in_dim(bound - tile * queries, (HALF, CHUNK), [0])

    past_hi = None if problem.every_later_query_sees else beyond(hi)
    past_lo = None if lo is None else beyond(lo)
    parts = []
    for column in range(0, queries, CHUNK):
        seen = True if past_hi is None else past_hi < -column
        if past_lo is not None:
            seen &= past_lo >= -column
        if keys.ids is not None:
            chunk = scratch.query_ids.at[slot, pl.ds(column, CHUNK)]
            ids = plgpu.load(chunk, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            ids = lax.broadcast_in_dim(ids, (HALF, CHUNK), [1])
            seen &= ids == lax.broadcast_in_dim(keys.ids, (HALF, CHUNK), [0])
        part = lax.slice(p, (0, column), (HALF, column + CHUNK))
        parts.append(jnp.where(seen, part, 0.0))
    return jnp.concatenate(parts, axis=1)
