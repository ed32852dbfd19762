"""Masking and the online softmax of one tile of logits, 64 rows of one warpgroup.

The softmax is base 2: c = scale * log2(e) is folded into the exponent's one FMA, m counts in units
of log2, and P = exp2(c S - m).

The running maximum is allowed to be stale. With a threshold t (`ForwardTiles.rescale_above`, an
idea of FlashAttention-4), a warp keeps m, and with it O and l unscaled, while none of its rows
grew by more than t; m then is at most t below the true maximum, so that P, l and O are at most 2**t
times what they would be. All three are floating point: a power of two moves no relative error, and
the LSE = m ln 2 + ln l and O / l are the same numbers. What must hold is the range: with t = 8,
P <= 256 in float16 (largest 65504) and bfloat16, and l <= 256 S in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, vector

from pallas_flash.hopper.operands import Operands
from pallas_flash.hopper.problem import Index, Problem, Refs, Tile
from pallas_flash.hopper.tile_sizes import ROWS
from pallas_flash.mask import Bounds
from pallas_flash.row_statistics import LOG2_E

CHUNK = 8
"""Columns taken at a time: a thread holds two rows and two columns of them. Column indices of a
whole tile would spill."""


class Softmax(NamedTuple):
    """Running statistics of 64 rows, base 2, and the probabilities that still wait for their V."""

    p: Any  # (64, keys), input dtype
    m: Any  # (64,) maximum of c S, stale by at most `rescale_above`
    l: Any  # (64, CHUNK) denominators: each thread's own part of its rows, added up at the end


class Rows(NamedTuple):
    """64 query rows: where they are, and what of the small operands belongs to them."""

    tile: Tile
    row: Index  # the first
    bounds: Bounds  # key tiles that they visit
    ids: Any = None  # (64,) segment ids
    slope: Any = None  # ALiBi's, of this head
    bias: Any = None  # (64,), where it is the same for all keys


def rows_of(problem: Problem, small: Operands, tile: Tile, warpgroup: Index) -> Rows:
    """The rows of one warpgroup in a query tile, with everything that is read once."""
    row = tile.row + warpgroup * ROWS
    ids = slope = bias = None
    if problem.mask.has_segments:
        here = small.query_ids.at[pl.ds(tile.batch * problem.padded_rows + row, ROWS)]
        ids = plgpu.load(here, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    if problem.has_alibi:
        slope = small.slopes[tile.head]
    if problem.bias is not None and problem.bias.kind == "rows":
        plane = problem.bias.plane(tile.batch, tile.head, problem.sizes.N)
        here = small.bias.at[pl.ds(plane * problem.padded_rows + row, ROWS)]
        bias = plgpu.load(here, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    return Rows(tile, row, _bounds(problem, small, tile, row), ids, slope, bias)


def _bounds(problem: Problem, small: Operands, tile: Tile, row: Index) -> Bounds:
    """The key tiles that the 64 rows from `row` on visit, among those that are loaded.

    Rows that see nothing still visit one (masked) tile, so that every loop has a first.
    """
    if problem.mask.has_segments:
        first = 4 * (tile.batch * (problem.padded_rows // ROWS) + row // ROWS)
        found = Bounds(*(small.rows[first + k] for k in range(4)))
    else:
        lengths = {"q_length": tile.q_length, "kv_length": tile.kv_length}
        found = problem.mask.kv_bounds(row, ROWS, **lengths).in_tiles(problem.tiles.keys)
    lo = jnp.clip(found.lo, tile.lo, tile.hi - 1)
    hi = jnp.clip(found.hi, lo + 1, tile.hi)
    return Bounds(lo, found.full_lo, found.full_hi, hi)


def logits(problem: Problem, rows: Rows, index: Index, products: Any, bias: Refs = None) -> Any:
    """Logits of products q k^T of one key tile, in units of log2 / `problem.exponent_scale`.

    Args:
      products: (64, keys).
      bias: the tile's bias in shared memory, (64, keys) or (keys,), if it comes that way.
    """
    s = products if problem.product_scale == 1.0 else products * problem.product_scale
    if problem.bias is not None:
        s = _plus_bias(problem, rows, bias, s)
    if problem.has_alibi:
        s = _less_distance(problem, rows, index, s)
    if problem.soft_cap is None:
        return s
    # tanh.approx: absolute error of the logit below 2**-11 of it.
    capped = jnp.tanh(s)
    # A bias of -inf hides the key, and the cap must not bring it back.
    return capped if problem.bias is None else jnp.where(s == -jnp.inf, -jnp.inf, capped)


def _plus_bias(problem: Problem, rows: Rows, bias: Refs, s: Any) -> Any:
    """s + bias, as many columns at a time as keep few of the bias's registers alive."""
    form, keys, layout = problem.bias, problem.tiles.keys, plgpu.Layout.WGMMA
    assert form is not None
    if form.kind == "rows":
        return s + lax.broadcast_in_dim(rows.bias, s.shape, [0])
    parts = []
    width = form.width if form.kind == "tile" else CHUNK
    for column in range(0, keys, width):
        here = pl.ds(column, width)
        if form.kind == "tile":
            part = plgpu.load(bias.at[:, here], layout=layout).astype(jnp.float32)
            part = part if problem.logit_scale == 1.0 else part * problem.logit_scale
        else:
            part = plgpu.load(bias.at[here], layout=layout.reduce(0), optimized=False)
            part = lax.broadcast_in_dim(part, (ROWS, width), [1])
        parts.append(lax.slice(s, (0, column), (ROWS, column + width)) + part)
    return jnp.concatenate(parts, axis=1)


def _less_distance(problem: Problem, rows: Rows, index: Index, s: Any) -> Any:
    """ALiBi: s - slope |i' - j|, a few columns at a time."""
    mask, keys = problem.mask, problem.tiles.keys
    i, j = _chunk_indices(rows)
    place = i + mask.offset(rows.tile.q_length, rows.tile.kv_length)
    ahead = lax.broadcast_in_dim(place - index * keys, (ROWS, CHUNK), [0]) - j
    ahead = ahead.astype(jnp.float32)
    slope = rows.slope * problem.logit_scale
    only_past = mask.right is not None and mask.right <= 0  # then it needs no absolute value
    parts = []
    for column in range(0, keys, CHUNK):
        distance = ahead - float(column)
        distance = distance if only_past else jnp.abs(distance)
        parts.append(lax.slice(s, (0, column), (ROWS, column + CHUNK)) - slope * distance)
    return jnp.concatenate(parts, axis=1)


def _chunk_indices(rows: Rows) -> tuple[Any, Any]:
    """Query indices (64,), and the columns of a chunk (64, CHUNK)."""
    layout = plgpu.Layout.WGMMA
    i = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=layout.reduce(1)) + rows.row
    return i, plgpu.broadcasted_iota(jnp.int32, (ROWS, CHUNK), 1, layout=layout)


def probabilities(problem: Problem, s: Any, m: Any, *, may_be_empty: bool) -> tuple[Softmax, Any]:
    """P of one tile of logits, the new maximum, this tile's part of l; and whether m moved.

    Args:
      s: (64, keys) logits, -inf where masked.
      m: (64,) running maximum, None for the first tile.
      may_be_empty: a row may have seen nothing yet: m is -inf then, and -inf - -inf NaN.

    Returns: `Softmax` with l of this tile alone, and a scalar, uniform in a warp, that says that
      O and l must be rescaled (True when it is not known to be needless).
    """
    scale = problem.exponent_scale
    m_new = jnp.max(s, axis=1) * scale
    moved: Any = True
    if m is not None:
        m_new = jnp.maximum(m, m_new)
        if problem.tiles.rescale_above:
            moved = _any_in_warp(m_new - m > problem.tiles.rescale_above)
            m_new = lax.cond(moved, lambda new, _: new, lambda _, old: old, m_new, m)
    shift = finite(m_new) if may_be_empty else m_new
    p = jnp.exp2(s * scale - lax.broadcast_in_dim(shift, s.shape, [0]))
    return Softmax(p.astype(problem.dtype), m_new, _add_chunks(p)), moved


def rescale(acc: Refs, l: Any, m: Any, m_new: Any, moved: Any, *, may_be_empty: bool) -> Any:
    """Scale O, in place, and l to the new maximum; returns l."""

    def scaled(o: Any, l: Any) -> tuple[Any, Any]:
        alpha = jnp.exp2(m - (finite(m_new) if may_be_empty else m_new))
        o = o * lax.broadcast_in_dim(alpha, o.shape, [0])
        return o, l * lax.broadcast_in_dim(alpha, l.shape, [0])

    if moved is True:
        acc[...], l = scaled(acc[...], l)
        return l
    # Arrays in and out of the branch: a write to `acc` inside would put a fence of the whole
    # warpgroup where only some of its warps come by.
    acc[...], l = lax.cond(moved, scaled, lambda o, l: (o, l), acc[...], l)
    return l


def finite(m: Any) -> Any:
    return jnp.where(m == -jnp.inf, 0.0, m)


def _add_chunks(p: Any) -> Any:
    """Columns added up CHUNK apart, which needs no exchange between threads."""
    rows, keys = p.shape
    parts = [lax.slice(p, (0, k), (rows, k + CHUNK)) for k in range(0, keys, CHUNK)]
    while len(parts) > 1:  # pairwise: short chains of additions, and the smaller rounding error
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + (
            parts[-1:] if len(parts) % 2 else []
        )
    return parts[0]


def _any_in_warp(rows: Any) -> Any:
    """Whether any row (64,) that this warp holds is True: a scalar that may differ between warps.

    Only for branches without a barrier or an asynchronous instruction in them.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA.reduce(1),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.bool_, layout=plgpu.Layout.WG_SPLAT(())),
    )
    def vote(_ctx: Any, rows: Any) -> Any:
        any_mine = arith.constant(ir.IntegerType.get_signless(1), 0)
        for mine in rows.registers.flat:
            mine = vector.extract(mine, dynamic_position=[], static_position=[0])
            any_mine = arith.ori(any_mine, mine)
        everyone = arith.constant(ir.IntegerType.get_signless(32), -1)
        voted = nvvm.vote_sync(everyone, any_mine, "any")
        return mgpu.FragmentedArray.splat(voted, (), is_signed=False)

    return vote(rows)  # pyright: ignore[reportCallIssue]


def mask_logits(problem: Problem, small: Operands, rows: Rows, index: Index, s: Any) -> Any:
    """The logits with -inf where the mask hides the key, a few columns at a time."""
    tile, keys = rows.tile, problem.tiles.keys
    i, j = _chunk_indices(rows)
    mask = problem.interval_mask
    lo, hi = mask.row_bounds(i, q_length=tile.q_length, kv_length=tile.kv_length)

    def from_here(bound: Any, column: Index) -> Any:
        """A bound of each row, counted from the chunk's first column."""
        return lax.broadcast_in_dim(bound - (index * keys + column), (ROWS, CHUNK), [0])

    parts = []
    for column in range(0, keys, CHUNK):
        seen = j < from_here(hi, column)
        if lo is not None:
            seen &= j >= from_here(lo, column)
        if rows.ids is not None:
            padded = pl.cdiv(problem.sizes.S, keys) * keys
            here = pl.ds(tile.batch * padded + index * keys + column, CHUNK)
            ids = plgpu.load(
                small.key_ids.at[here], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
            )
            seen &= lax.broadcast_in_dim(rows.ids, (ROWS, CHUNK), [0]) == lax.broadcast_in_dim(
                ids, (ROWS, CHUNK), [1]
            )
        part = lax.slice(s, (0, column), (ROWS, column + CHUNK))
        parts.append(jnp.where(seen, part, -jnp.inf))
    return jnp.concatenate(parts, axis=1)


def finish(problem: Problem, small: Operands, rows: Rows, acc: Refs, m: Any, l: Any) -> tuple:
    """Output and LSE of rows that have visited all their keys.

    A sink is a logit without a value: it joins the denominator, and the maximum for safety.
    """
    l = jnp.sum(l, axis=1)
    factor: Any = 1.0
    if problem.has_sinks:
        sink = small.sinks[rows.tile.head] * LOG2_E
        m_new = jnp.maximum(m, sink)
        shift = finite(m_new)
        factor = jnp.exp2(m - shift)
        m, l = m_new, l * factor + jnp.exp2(sink - shift)
    inverse = factor / jnp.where(l == 0.0, 1.0, l)
    out = acc[...] * lax.broadcast_in_dim(inverse, acc.shape, [0])
    return out.astype(problem.dtype), m * (1 / LOG2_E) + jnp.log(l)
