"""What kernels do with one tile: masked loads and stores, products, the tile loop.

Loads past the last row, the last column, the end of a padded sequence or in a padding segment give
zeros: zeros add nothing to any product, and whatever lies there (NaN included) is never read. In
the interpreter the space past the end of an array is NaN, so a missing mask shows in every test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_flash.mask import Bounds
from pallas_flash.triton.problem import Index, Operands, Problem, Visits

Ref = Any


def load_rows(
    ref: Ref,
    start: Index,
    size: int,
    columns: int,
    *,
    keep: jax.Array | None = None,
    head: Index | None = None,
) -> jax.Array:
    """Rows [start, start + size) of a (rows, width) ref, or of one head of (rows, heads, width).

    Args:
      columns: columns that exist in memory; the rest of the width reads as zeros.
      keep: (size,), False for rows that read as zeros; None promises that all rows exist.
    """
    keep = _elements(ref.shape[-1], columns, keep)
    other = None if keep is None else jnp.zeros((), ref.dtype)
    rows = pl.ds(start, size)
    view = ref.at[rows, :] if head is None else ref.at[rows, head, :]
    return plgpu.load(view, mask=keep, other=other)


def store_rows(ref: Ref, block: jax.Array, columns: int, *, below: Index | None) -> None:
    """Store a block over a whole ref, but for what is past the last row or column."""
    keep = None if below is None else lax.iota(jnp.int32, block.shape[0]) < below
    keep = _elements(block.shape[1], columns, keep)
    plgpu.store(ref.at[:, :], block.astype(ref.dtype), mask=keep)


def _elements(width: int, columns: int, rows: jax.Array | None) -> jax.Array | None:
    """Which elements of a block exist, given which rows do; None when all do."""
    keep = None
    if columns < width:
        keep = lax.broadcasted_iota(jnp.int32, (1, width), 1) < columns
    if rows is not None:
        keep = rows[:, None] if keep is None else keep & rows[:, None]
    return keep


def load_vector(view: Ref, *, keep: jax.Array | None, other: float) -> jax.Array:
    """All of a vector view; `other` where `keep` is False."""
    if keep is None:
        return plgpu.load(view)
    return plgpu.load(view, mask=keep, other=jnp.asarray(other, view.dtype))


def load_scalar(ref: Ref, index: Index) -> jax.Array:
    """One element of a vector."""
    return plgpu.load(ref.at[jnp.int32(index)])


def store_vector(view: Ref, values: jax.Array, *, below: Index | None) -> None:
    """Store a vector over a whole view, but for elements with index >= below."""
    keep = None if below is None else lax.iota(jnp.int32, values.shape[0]) < below
    plgpu.store(view, values, mask=keep)


class Rows(NamedTuple):
    """What masks, positions and loads need to know of a tile's queries, or of its keys."""

    start: Index  # of the first row, in the sequence
    index: jax.Array  # (size,) int32, start + 0, 1, ...
    keep: jax.Array | None  # (size,), False for rows that must not be read; None: all are real
    segment: jax.Array | None = None  # (size,) int32, negative where there is no row
    position: jax.Array | None = None  # (size,) int32


def load_query_rows(refs: Operands, start: Index, place: Index, size: int, below: Any) -> Rows:
    """Rows of queries [start, start + size) that lie in the program's blocks from `place` on.

    Args:
      below: queries from here on do not exist; None promises that all of them do.
    """
    return _load_side(refs.query_segments, refs.query_positions, start, place, size, below)


def load_key_rows(refs: Operands, start: Index, place: Index, size: int, below: Any) -> Rows:
    """The same for keys."""
    return _load_side(refs.key_segments, refs.key_positions, start, place, size, below)


def _load_side(
    segments: Ref | None, positions: Ref | None, start: Index, place: Index, size: int, below: Any
) -> Rows:
    index = start + lax.iota(jnp.int32, size)
    keep = None if below is None else index < below
    segment = position = None
    if segments is not None:
        segment = load_vector(segments.at[pl.ds(place, size)], keep=keep, other=-1)
        # A padding row's memory may hold NaN.
        keep = segment >= 0 if keep is None else keep & (segment >= 0)
    if positions is not None:
        inside = None if below is None else index < below
        position = load_vector(positions.at[pl.ds(place, size)], keep=inside, other=0)
    return Rows(start, index, keep, segment, position)


def load_lengths(problem: Problem, refs: Operands, batch: Index) -> tuple[Index, Index]:
    """(T_b, S_b) of a batch row: scalars from memory, or the static sizes without lengths."""
    if refs.query_lengths is None:
        # As int32, not Python integers: a select between two of those does not lower.
        return jnp.int32(problem.sizes.T), jnp.int32(problem.sizes.S)
    return load_scalar(refs.query_lengths, batch), load_scalar(refs.key_value_lengths, batch)


def dot(a: jax.Array, b: jax.Array, *, transpose_b: bool = False) -> jax.Array:
    """a b or a b^T in float32: tensor cores for 16-bit inputs, true float32 for float32 inputs."""
    # Without HIGHEST Triton would round float32 inputs to the 10 bits of TF32.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contract = (((1,), (1 if transpose_b else 0,)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def exponential(problem: Problem) -> Callable[[jax.Array], jax.Array]:
    """2^x of float32 blocks: the GPU's own instruction (relative error 2^-22), or jnp's."""
    # jnp.exp2 would become libdevice's function, which spends three more instructions on results
    # below 2^-126; here those may be 0.
    return jnp.exp2 if problem.interpret else _hardware_exp2


def _hardware_exp2(x: jax.Array) -> jax.Array:
    [result] = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result


def loop_tiles[Carry](
    tiles: Bounds | TileList,
    body: Callable[[Index, Carry, bool], Carry],
    carry: Carry,
    *,
    before: bool,
    after: bool,
) -> Carry:
    """Visit tiles in order: partial, full, partial; or those of a list.

    Args:
      tiles: what lies outside [lo, hi), in tiles, is not visited; of a list all are partial.
      body: (tile, carry, masked) -> carry; `masked` is False for the full tiles.
      before, after: whether partial tiles can occur on that side at all. A loop that cannot run
        is not compiled.
    """

    def visit(
        start: Index, stop: Index, masked: bool, carry: Carry, number: Callable[[Index], Index]
    ) -> Carry:
        # 32-bit bounds keep every index in the kernel 32-bit under jax_enable_x64 too.
        start, stop = jnp.int32(start), jnp.int32(stop)
        return lax.fori_loop(start, stop, lambda t, carry: body(number(t), carry, masked), carry)

    def same(tile: Index) -> Index:
        return tile

    if isinstance(tiles, TileList):
        return visit(0, tiles.count, True, carry, tiles.number)
    if before:
        carry = visit(tiles.lo, tiles.full_lo, True, carry, same)
    carry = visit(tiles.full_lo, tiles.full_hi, False, carry, same)
    if after:
        carry = visit(tiles.full_hi, tiles.hi, True, carry, same)
    return carry


class TileList(NamedTuple):
    """The tiles that one program visits, read from memory."""

    order: Ref
    count: Index

    @classmethod
    def of(cls, visits: Visits, own_tile: Index) -> TileList:
        return cls(visits.order, load_scalar(visits.count, own_tile))

    def number(self, t: Index) -> Index:
        return load_scalar(self.order, t)
