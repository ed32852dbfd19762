"""A walk through a traced function of scalars, as arithmetic on blocks.

The Triton lowering has no gather and no vmap. So a user's function is run equation by equation:
arithmetic on scalars becomes arithmetic on blocks, a choice of branches becomes a select, and what
indexes a captured array becomes a `View` of one element, which the caller reads from memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from pallas_flash.mods import run_equation

Value = Any
"""One scalar of the user's function (for a tile: a block of its values), or a numpy object array
of those."""

# Arithmetic on scalars that the Triton lowering has for blocks.
_ARITHMETIC = """
    abs neg sign ceil floor exp exp2 expm1 log log2 log1p sqrt rsqrt cbrt square pow integer_pow
    one_minus_square sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh erf_inv
    logistic add add_any sub mul div rem max min clamp and or xor not shift_left
    shift_right_arithmetic shift_right_logical eq ne gt ge lt le is_finite select_n
    convert_element_type stop_gradient
"""
ELEMENTWISE = frozenset(_ARITHMETIC.split())
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
RESHAPES = ("broadcast_in_dim", "reshape", "squeeze", "concatenate", "slice", "split")


class Untraceable(Exception):
    """Why a user's function cannot run in the Triton kernels."""


@dataclasses.dataclass(frozen=True)
class View:
    """A part of a captured array that is not read yet.

    Attributes:
      table: which captured array.
      start: for each of its axes, the first index of the part.
      size: for each of its axes, how many elements the part has; None once squeezed to one.
      inside: False where the index was out of bounds and `fill` is meant, or None.
    """

    table: int
    start: tuple[Value, ...]
    size: tuple[int | None, ...]
    inside: Value = None
    fill: Any = None

    @property
    def axes(self) -> list[int]:
        """The captured array's axes that the part still has."""
        return [axis for axis, size in enumerate(self.size) if size is not None]

    def narrowed(self, offsets: Sequence[Value], sizes: Sequence[int]) -> View:
        """The part of this part that starts at `offsets`, each clamped to be inside."""
        start, size = list(self.start), list(self.size)
        for axis, offset, width in zip(self.axes, offsets, sizes, strict=True):
            room = (self.size[axis] or 0) - width
            start[axis] = start[axis] + (0 if room == 0 else jnp.clip(offset, 0, room))
            size[axis] = width
        return dataclasses.replace(self, start=tuple(start), size=tuple(size))

    def squeezed(self, dimensions: Sequence[int]) -> View:
        dropped = [self.axes[dimension] for dimension in dimensions]
        size = tuple(None if axis in dropped else n for axis, n in enumerate(self.size))
        return dataclasses.replace(self, size=size)


Reader = Callable[[View], Value]


def evaluate(
    jaxpr: Any, consts: Sequence[Value], args: Sequence[Value], read: Reader, *, native: bool
) -> list[Value]:
    """Run a jaxpr of scalars on blocks; elements of captured arrays come from `read`.

    Args:
      native: keep calls with derivatives of their own as they are (the arguments are scalars).
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)  # closed or not
    env: dict[Any, Value] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def value_of(atom: Any) -> Value:
        if isinstance(atom, Literal):
            aval: Any = atom.aval
            return np.asarray(atom.val, aval.dtype)
        return env[atom]

    for eqn in needed(jaxpr):
        inputs = [value_of(atom) for atom in eqn.invars]
        if native and _is_scalar(eqn, inputs):
            results = run_equation(eqn, env, jaxpr)
        else:
            results = _apply(eqn, inputs, read, native)
        for variable, result in zip(eqn.outvars, results, strict=True):
            whole = isinstance(result, View) and not result.axes
            env[variable] = read(result) if whole else result
    return [value_of(atom) for atom in jaxpr.outvars]


def needed(jaxpr: Any) -> list[Any]:
    """The equations that the results depend on, in order."""
    wanted = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if wanted.intersection(eqn.outvars):
            kept.append(eqn)
            wanted.update(atom for atom in eqn.invars if not isinstance(atom, Literal))
    return kept[::-1]


def _apply(eqn: Any, inputs: list[Value], read: Reader, native: bool) -> Sequence[Value]:
    name, params = eqn.primitive.name, eqn.params
    views = any(isinstance(x, View) for x in inputs)
    if name in CALLS:
        inner = params[CALLS[name]]
        return evaluate(inner, getattr(inner, "consts", ()), inputs, read, native=native)
    if name == "cond":
        return _select_branch(params["branches"], inputs, read, native)
    if views:
        return [_part(name, params, inputs)]
    if name in RESHAPES:
        return _reshape(name, params, inputs, eqn.outvars)
    if name == "reduce_sum" and not params["axes"]:
        return inputs  # the transpose of an addition, inside `shard_map`
    if name not in ELEMENTWISE:
        raise Untraceable(f"uses {name}, which the Triton kernels cannot apply to a tile")
    return [_elementwise(eqn.primitive, params, inputs, eqn.outvars[0].aval.shape)]


def _is_scalar(eqn: Any, inputs: list[Value]) -> bool:
    """An equation from scalars to scalars, which JAX can run and differentiate as it is."""
    boxed = any(isinstance(x, View) or _is_boxed(x) for x in inputs)
    return not boxed and all(variable.aval.shape == () for variable in eqn.outvars)


def _select_branch(
    branches: Sequence[Any], inputs: list[Value], read: Reader, native: bool
) -> list[Value]:
    """Every branch, and then a choice element by element."""
    which, *operands = inputs
    results = [
        evaluate(branch, branch.consts, operands, read, native=native) for branch in branches
    ]
    chosen = results[0]
    for number, result in enumerate(results[1:], 1):
        chosen = [
            jnp.where(which >= number, new, old) for new, old in zip(result, chosen, strict=True)
        ]
    return chosen


def _part(name: str, params: dict[str, Any], inputs: list[Value]) -> View:
    """What an equation does to a captured array: it takes a part."""
    view, *others = inputs
    if isinstance(view, View) and not any(isinstance(x, View) for x in others):
        if name == "dynamic_slice":
            return view.narrowed(others, params["slice_sizes"])
        if name == "slice" and params["strides"] is None:
            starts, limits = params["start_indices"], params["limit_indices"]
            return view.narrowed(starts, [b - a for a, b in zip(starts, limits, strict=True)])
        if name == "squeeze":
            return view.squeezed(params["dimensions"])
        if name == "gather":
            return _gathered(view, others[0], params)
    raise Untraceable(
        f"applies {name} to a captured array, which the Triton kernels can only index by element"
    )


def _gathered(view: View, indices: Value, params: dict[str, Any]) -> View:
    """One gather of a single part, as `table.at[n, j].get()` makes."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    if np.ndim(indices) != 1 or numbers.operand_batching_dims:
        raise Untraceable("gathers many elements of a captured array at once")
    offsets: list[Value] = [0] * len(sizes)
    inside = view.inside
    fills = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    lengths = [view.size[axis] or 0 for axis in view.axes]
    for axis, index in zip(numbers.start_index_map, indices, strict=True):
        offsets[axis] = index
        if fills:
            fits = (index >= 0) & (index <= lengths[axis] - sizes[axis])
            inside = fits if inside is None else inside & fits
    part = view.narrowed(offsets, sizes).squeezed(numbers.collapsed_slice_dims)
    fill = params["fill_value"] if fills else view.fill
    return dataclasses.replace(part, inside=inside, fill=fill)


def _reshape(
    name: str, params: dict[str, Any], inputs: list[Value], outputs: Sequence[Any]
) -> list[Value]:
    """Small vectors of scalars, such as the indices of a gather, live in object arrays."""
    boxes = [_box(x) for x in inputs]
    shape = outputs[0].aval.shape
    if name == "concatenate":
        results = [np.concatenate(boxes, params["dimension"])]
    elif name == "slice":
        cut = zip(
            params["start_indices"], params["limit_indices"],
            params["strides"] or (None,) * len(params["start_indices"]), strict=True,
        )  # fmt: skip
        results = [boxes[0][tuple(slice(*ends) for ends in cut)]]
    elif name == "split":
        ends = np.cumsum(params["sizes"])[:-1]
        results = np.split(boxes[0], ends, params["axis"])
    elif name == "broadcast_in_dim":
        aligned = [1] * len(shape)
        for axis, size in zip(params["broadcast_dimensions"], boxes[0].shape, strict=True):
            aligned[axis] = size
        results = [np.broadcast_to(boxes[0].reshape(aligned), shape)]
    else:
        results = [boxes[0].reshape(shape)]
    return [box.item() if box.shape == () else box for box in results]


def _is_boxed(x: Value) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.hasobject


def _box(x: Value) -> np.ndarray:
    if _is_boxed(x):
        return x
    box = np.empty((), object)
    box[()] = x
    return box


def _elementwise(
    primitive: Any, params: dict[str, Any], inputs: list[Value], shape: tuple[int, ...]
) -> Value:
    """Arithmetic on blocks, which broadcast against each other."""
    if shape == ():
        block = np.broadcast_shapes(*(jnp.shape(x) for x in inputs))
        inputs = [x if jnp.shape(x) == block else jnp.broadcast_to(x, block) for x in inputs]
        return primitive.bind(*inputs, **params)
    boxes = [np.broadcast_to(_box(x), shape) for x in inputs]
    result = np.empty(shape, object)
    for place in np.ndindex(shape):
        result[place] = _elementwise(primitive, params, [box[place] for box in boxes], ())
    return result
