"""What kernels do with one tile: masked loads and stores, products, logits, the tile loop.

Loads past the last row, the last column or the end of a padded sequence give zeros: zeros add
nothing to any product, and whatever lies there (NaN included) is never read. In the interpreter
the space past the end of an array is NaN, so a missing mask shows in every test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_flash.mask import Bounds
from pallas_flash.triton.problem import Index, Operands, Problem
from pallas_flash.triton.tile_sizes import Tile

Ref = Any


def load_rows(
    ref: Ref,
    start: Index,
    size: int,
    columns: int,
    *,
    rows_below: Index | None = None,
    head: Index | None = None,
) -> jax.Array:
    """Rows [start, start + size) of a (rows, width) ref, or of one head of (rows, heads, width).

    Args:
      columns: columns that exist in memory; the rest of the width reads as zeros.
      rows_below: rows from here on read as zeros; None promises that all rows exist.
    """
    keep = _inside(start, size, ref.shape[-1], columns, rows_below)
    other = None if keep is None else jnp.zeros((), ref.dtype)
    rows = pl.ds(start, size)
    view = ref.at[rows, :] if head is None else ref.at[rows, head, :]
    return plgpu.load(view, mask=keep, other=other)


def store_rows(ref: Ref, block: jax.Array, columns: int, *, rows_below: Index | None) -> None:
    """Store a block over a whole ref, but for what is past the last row or column."""
    keep = _inside(0, block.shape[0], block.shape[1], columns, rows_below)
    plgpu.store(ref.at[:, :], block.astype(ref.dtype), mask=keep)


def _inside(
    start: Index, size: int, width: int, columns: int, rows_below: Index | None
) -> jax.Array | None:
    """Which elements of a (size, width) block exist; None when all do."""
    keep = None
    if columns < width:
        keep = lax.broadcasted_iota(jnp.int32, (1, width), 1) < columns
    if rows_below is not None:
        rows = start + lax.broadcasted_iota(jnp.int32, (size, 1), 0) < rows_below
        keep = rows if keep is None else keep & rows
    return keep


def load_vector(view: Ref, start: Index, *, below: Index | None, other: float) -> jax.Array:
    """All of a float32 vector view; `other` for elements with start + index >= below."""
    if below is None:
        return plgpu.load(view)
    keep = start + lax.iota(jnp.int32, view.shape[0]) < below
    return plgpu.load(view, mask=keep, other=jnp.float32(other))


def store_vector(view: Ref, values: jax.Array, *, below: Index | None) -> None:
    """Store a vector over a whole view, but for elements with index >= below."""
    keep = None if below is None else lax.iota(jnp.int32, values.shape[0]) < below
    plgpu.store(view, values, mask=keep)


def load_lengths(problem: Problem, refs: Operands, batch: Index) -> tuple[Index, Index]:
    """(T_b, S_b) of a batch row: scalars from memory, or the static sizes without lengths."""
    if refs.query_lengths is None:
        # As int32, not Python integers: a select between two of those does not lower.
        return jnp.int32(problem.sizes.T), jnp.int32(problem.sizes.S)
    return plgpu.load(refs.query_lengths.at[batch]), plgpu.load(refs.key_value_lengths.at[batch])


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


@dataclasses.dataclass(frozen=True)
class Logits:
    """Tiles of logits of one batch row, inside a kernel.

    Attributes:
      refs: the kernel's operands; here for the bias and the dense mask.
      q_length, kv_length: T_b and S_b.
      keys_first: tiles are (keys, queries) instead of (queries, keys).
    """

    problem: Problem
    tile: Tile
    refs: Operands
    q_length: Index
    kv_length: Index
    keys_first: bool = False

    def __call__(
        self,
        rows: jax.Array,
        columns: jax.Array,
        q_start: Index,
        k_start: Index,
        *,
        masked: bool,
        head: Index = 0,
    ) -> jax.Array:
        """Logits such that exp2(logits * problem.exponent_scale) is the softmax's numerator.

        Args:
          rows, columns: the tile's queries and keys, or its keys and queries if `keys_first`.
          q_start, k_start: their first indices in the sequence.
          masked: set what the mask hides to -inf; False promises that it hides nothing here.
          head: this query head's place in the block of the bias and the dense mask.
        """
        logits = dot(rows, columns, transpose_b=True)
        if not self.problem.defers_scale:
            logits *= self.problem.scale
        if self.refs.bias is not None:
            bias = self._dense(self.refs.bias, q_start, k_start, head, masked)
            logits += bias.astype(jnp.float32)
        if not masked:
            return logits
        dense = None
        if self.refs.dense is not None:
            dense = self._dense(self.refs.dense, q_start, k_start, head, masked)
        q_index, k_index = self._indices(q_start, k_start)
        visible = self.problem.mask.visible(
            q_index, k_index, q_length=self.q_length, kv_length=self.kv_length, dense=dense
        )
        return jnp.where(visible, logits, -jnp.inf)

    def _indices(self, q_start: Index, k_start: Index) -> tuple[jax.Array, jax.Array]:
        q_axis, k_axis = (1, 0) if self.keys_first else (0, 1)
        return q_start + _ruler(self.tile.query, q_axis), k_start + _ruler(self.tile.key, k_axis)

    def _dense(
        self, ref: Ref, q_start: Index, k_start: Index, head: Index, masked: bool
    ) -> jax.Array:
        """This tile's part of a (heads, T, S) bias or mask whose broadcast axes have size 1."""
        heads, rows, columns = ref.shape
        sizes, tile = self.problem.sizes, self.tile
        q_start, q_size = (0, 1) if rows == 1 else (q_start, tile.query)
        k_start, k_size = (0, 1) if columns == 1 else (k_start, tile.key)
        keep, other = None, None
        if masked:
            inside_q = q_start + _ruler(q_size, 0) < sizes.T
            keep = inside_q & (k_start + _ruler(k_size, 1) < sizes.S)
            other = jnp.zeros((), ref.dtype)
        head = jnp.int32(0 if heads == 1 else head)
        view = ref.at[head, pl.ds(q_start, q_size), pl.ds(k_start, k_size)]
        block = plgpu.load(view, mask=keep, other=other)
        return block.T if self.keys_first else block


def _ruler(size: int, axis: int) -> jax.Array:
    """0, 1, ... along one axis of a matrix, 1 wide along the other."""
    return lax.broadcasted_iota(jnp.int32, (size, 1) if axis == 0 else (1, size), axis)


def loop_tiles[Carry](
    bounds: Bounds,
    body: Callable[[Index, Carry, bool], Carry],
    carry: Carry,
    *,
    before: bool,
    after: bool,
) -> Carry:
    """Visit the tiles of `bounds` in order: partial, full, partial.

    Args:
      bounds: in tiles; what lies outside [lo, hi) is not visited.
      body: (tile, carry, masked) -> carry; `masked` is False for the full tiles.
      before, after: whether partial tiles can occur on that side at all. A loop that cannot run
        is not compiled.
    """

    def visit(start: Index, stop: Index, masked: bool, carry: Carry) -> Carry:
        # 32-bit bounds keep every index in the kernel 32-bit under jax_enable_x64 too.
        start, stop = jnp.int32(start), jnp.int32(stop)
        return lax.fori_loop(start, stop, lambda tile, carry: body(tile, carry, masked), carry)

    if before:
        carry = visit(bounds.lo, bounds.full_lo, True, carry)
    carry = visit(bounds.full_lo, bounds.full_hi, False, carry)
    if after:
        carry = visit(bounds.full_hi, bounds.hi, True, carry)
    return carry
