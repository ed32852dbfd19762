"""`score_mod` and `mask_mod` inside a kernel: a traced function of scalars, applied to a tile.

The function is run on blocks (see `pallas_flash.triton.walk`), and its captured arrays stay in
memory. It is split once, while tracing, into

    lookups     the elements of captured arrays that it reads, as functions of (b, n, i, j)
    value       its result, as a function of (score, b, n, i, j, *lookups)
    partials    d value / d score and d value / d lookup, from JAX's own derivative of `value`

so that user-defined derivatives hold, and the gradient of a captured array is the sum of the
lookups' gradients over the places where its elements were read. Lookups may depend on earlier
lookups, but not on the score.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plgpu
from jax.extend.core import ClosedJaxpr, Literal
from jaxtyping import Array

from pallas_flash.mods import INDICES, Mod
from pallas_flash.triton.walk import Untraceable, Value, View, evaluate, needed

# ---- splitting a function -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Lookup:
    """One element of a captured array that a function reads.

    Attributes:
      table: which captured array.
      where: (*args, *earlier lookups) -> (index along each axis, and whether it is in bounds).
      fill: the value out of bounds; None where indices are clamped.
      dtype: of the captured array.
    """

    table: int
    where: ClosedJaxpr
    fill: Any
    dtype: Any

    @property
    def floating(self) -> bool:
        """Has a gradient."""
        return bool(jnp.issubdtype(self.dtype, jnp.floating))


@dataclasses.dataclass(frozen=True)
class Split:
    """A user's function, split for kernels; static.

    Attributes:
      lookups: what it reads, in order.
      value: (*args, *lookups) -> result.
      partials: (*args, *lookups) -> derivatives by the score and by each floating lookup; None for
        a mask.
    """

    lookups: tuple[Lookup, ...]
    value: ClosedJaxpr
    partials: ClosedJaxpr | None

    @property
    def tables_with_gradients(self) -> tuple[int, ...]:
        """The captured arrays that are read and can have gradients, in order."""
        return tuple(sorted({lookup.table for lookup in self.lookups if lookup.floating}))


def split(mod: Mod) -> Split:
    """Split a traced function.

    Raises:
      Untraceable: it does what the kernels cannot do, and what that is.
    """
    return _split(mod.jaxpr, len(mod.captured))


@functools.lru_cache(maxsize=256)
def _split(jaxpr: Any, captured: int) -> Split:
    tables = [variable.aval for variable in jaxpr.invars[:captured]]
    consts = [View(t, (0,) * table.ndim, table.shape) for t, table in enumerate(tables)]
    args = [jax.ShapeDtypeStruct((), variable.aval.dtype) for variable in jaxpr.invars[captured:]]

    def walk(args: Sequence[Value], known: Sequence[Value]) -> tuple[Value, list[View]]:
        """The result, with `known` for the first lookups and zeros for the others."""
        reads: list[View] = []

        def read(view: View) -> Value:
            number = len(reads)
            reads.append(view)
            return known[number] if number < len(known) else jnp.zeros((), tables[view.table].dtype)

        # A captured scalar is read at once.
        ready = [read(view) if not view.axes else view for view in consts]
        (result,) = evaluate(jaxpr, (), (*ready, *args), read, native=True)
        return result, reads

    count = len(args)
    lookups: list[Lookup] = []
    found: list[View] = []
    jax.eval_shape(lambda *args: found.extend(walk(args, ())[1]), *args)
    values: list[Any] = []
    for number, view in enumerate(found):

        def where(*inputs: Value, number: int = number) -> list[Array]:
            view = walk(inputs[:count], inputs[count:])[1][number]
            inside = () if view.inside is None else (view.inside,)
            return [jnp.asarray(x) for x in (*view.start, *inside)]

        dtype = tables[view.table].dtype
        indices = jax.make_jaxpr(where)(*args, *values)
        if count > len(INDICES) and _uses_first(indices.jaxpr):
            raise Untraceable("indexes a captured array by the score")
        fill = None if view.inside is None else _fill(view.fill, dtype)
        lookups.append(Lookup(view.table, indices, fill, dtype))
        values.append(jax.ShapeDtypeStruct((), dtype))

    def value(*inputs: Value) -> Array:
        return jnp.asarray(walk(inputs[:count], inputs[count:])[0])

    whole = _checked(jax.make_jaxpr(value)(*args, *values))
    for lookup in lookups:
        _checked(lookup.where)
    partials = None
    if count > len(INDICES):
        by = (0, *(count + k for k, lookup in enumerate(lookups) if lookup.floating))
        partials = _checked(jax.make_jaxpr(jax.grad(value, by))(*args, *values))
    return Split(tuple(lookups), whole, partials)


def _checked(part: ClosedJaxpr) -> ClosedJaxpr:
    """The same, if it can run on blocks."""
    jax.eval_shape(functools.partial(on_blocks, part), *part.in_avals)
    return part


def _uses_first(jaxpr: Any) -> bool:
    """Whether any result depends on the first argument."""
    used = {atom for eqn in needed(jaxpr) for atom in eqn.invars if not isinstance(atom, Literal)}
    return jaxpr.invars[0] in used or jaxpr.invars[0] in jaxpr.outvars


def _fill(fill: Any, dtype: Any) -> Any:
    """What a gather returns out of bounds: NaN, or the smallest or largest integer."""
    if fill is not None:
        return fill
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    if dtype == jnp.bool_:
        return True
    info = jnp.iinfo(dtype)
    return info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max


def on_blocks(closed: ClosedJaxpr, *inputs: Value) -> list[Value]:
    """Evaluate a part of a split function on blocks."""
    if any(jnp.ndim(const) for const in closed.consts):
        raise Untraceable("holds an array that is not captured by the function itself")
    return evaluate(closed.jaxpr, closed.consts, inputs, _no_views, native=False)


def _no_views(view: View) -> Value:
    raise AssertionError(view)


# ---- on a tile ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TileMod:
    """A user's function at one tile, in place of a `Mod` in the mask or the terms of the logits.

    Attributes:
      parts: the split function.
      lookups: the tile's elements of the captured arrays; float32 where they have gradients.
    """

    parts: Split
    lookups: tuple[Array, ...]

    def on_tile(self, *args: Array) -> Array:
        """Apply to blocks (score, b, n, i, j) or (b, n, i, j) that broadcast to the tile."""
        if self.parts.partials is None:
            return on_blocks(self.parts.value, *args, *self._rounded(self.lookups))[0]
        score, *indices = args

        def run(part: Any, score: Array, floats: Sequence[Array]) -> list[Array]:
            lookups = self.with_floats(floats).lookups
            return on_blocks(part, score, *indices, *self._rounded(lookups))

        @jax.custom_jvp
        def apply(score: Array, *floats: Array) -> Array:
            return jnp.broadcast_to(run(self.parts.value, score, floats)[0], score.shape)

        def derivative(primals: Any, tangents: Any) -> tuple[Array, Array]:
            score, *floats = primals
            out = apply(score, *floats)
            total = jnp.zeros_like(out)
            partials = run(self.parts.partials, score, floats)
            for partial, tangent in zip(partials, tangents, strict=True):
                if not isinstance(tangent, jax.custom_derivatives.SymbolicZero):
                    total += partial.astype(out.dtype) * tangent
            return out, total

        apply.defjvp(derivative, symbolic_zeros=True)
        return apply(score, *self.floats)

    def _rounded(self, lookups: Sequence[Array]) -> list[Array]:
        """The lookups in the captured arrays' own dtypes."""
        pairs = zip(lookups, self.parts.lookups, strict=True)
        return [x.astype(lookup.dtype) for x, lookup in pairs]

    def with_floats(self, floats: Sequence[Array]) -> TileMod:
        """The same with other values of the floating lookups."""
        rest = iter(floats)
        lookups = tuple(
            next(rest) if lookup.floating else x
            for x, lookup in zip(self.lookups, self.parts.lookups, strict=True)
        )
        return dataclasses.replace(self, lookups=lookups)

    @property
    def floats(self) -> tuple[Array, ...]:
        """The lookups that have gradients."""
        pairs = zip(self.lookups, self.parts.lookups, strict=True)
        return tuple(x for x, lookup in pairs if lookup.floating)


class Places(NamedTuple):
    """Where a lookup read: one block of indices for each axis, and which of them are in bounds."""

    indices: tuple[Array, ...]
    inside: Array | None


def read_lookups(
    parts: Split, tables: Sequence[Any], *indices: Array
) -> tuple[TileMod, tuple[Places, ...]]:
    """Load what a function reads at one tile, from refs of its captured arrays.

    Args:
      indices: b, n, i, j as blocks that broadcast to the tile.
    """
    args: tuple[Any, ...] = indices
    if len(parts.value.in_avals) - len(parts.lookups) > len(INDICES):
        args = (jnp.float32(0), *indices)  # nothing that is looked up depends on the score
    raw: list[Array] = []
    places: list[Places] = []
    for lookup in parts.lookups:
        where = on_blocks(lookup.where, *args, *raw)
        inside = where.pop() if lookup.fill is not None else None
        where = where or [jnp.int32(0)]  # a captured scalar lies in memory as one element
        block = np.broadcast_shapes(*(x.shape for x in where))
        where = tuple(jnp.broadcast_to(x, block) for x in where)
        element = plgpu.load(tables[lookup.table].at[where])
        if inside is not None:
            element = jnp.where(inside, element, jnp.asarray(lookup.fill, element.dtype))
        raw.append(element)
        places.append(Places(where, inside))
    lookups = (
        x.astype(jnp.float32) if lookup.floating else x
        for x, lookup in zip(raw, parts.lookups, strict=True)
    )
    return TileMod(parts, tuple(lookups)), tuple(places)


def add_to_tables(
    parts: Split,
    refs: dict[int, Any],
    places: Sequence[Places],
    gradients: Sequence[Array],
    *,
    interpret: bool,
) -> None:
    """Add the gradients of the floating lookups to those of the arrays that they came from.

    Many programs add to one element: atomically, so the order of the sum is not fixed.

    Args:
      refs: float32, by captured array.
    """
    read = (
        (lookup, place)
        for lookup, place in zip(parts.lookups, places, strict=True)
        if lookup.floating
    )
    for (lookup, place), gradient in zip(read, gradients, strict=True):
        if place.inside is not None:
            gradient = jnp.where(place.inside, gradient, 0)
        ref, where = refs[lookup.table], place.indices
        if where[0].ndim == 0 and gradient.ndim:  # (queries, 1), see `tile_logits`
            gradient = jnp.sum(gradient[:, 0])
        if interpret:
            # The interpreter's atomic addition loses all but one of several to the same element.
            ref[...] = ref[...].at[where].add(gradient)
        else:
            plgpu.atomic_add(ref, where, gradient)
