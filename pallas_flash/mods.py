"""User functions that are traced into the tile: `score_mod` and `mask_mod`.

A user function may close over arrays (a per-head table of biases, say). Kernels cannot capture
arrays, and a captured array should get a gradient, so `Mod` lifts them out: the traced function is
static, the arrays it captured are leaves of a pytree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jaxtyping import Array

INDICES = (jnp.int32,) * 4  # b, n, q_index, k_index


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mod:
    """A traced scalar function with its captured arrays as leaves.

    Attributes:
      jaxpr: the traced function of (*captured, *scalars), static; it holds no arrays.
      captured: the arrays that the user function closed over; differentiable leaves.
    """

    jaxpr: Any = dataclasses.field(metadata={"static": True})
    captured: tuple[Array, ...] = ()

    @classmethod
    def trace(cls, name: str, function: Callable[..., Array], *dtypes: Any) -> Mod:
        """Trace `function` at scalars of these dtypes; the result must be one scalar.

        Args:
          name: "score_mod" (returns a float) or "mask_mod" (returns a bool), for messages too.
          function: what the user passed.
          dtypes: of its arguments.
        """
        scalars = [jax.ShapeDtypeStruct((), dtype) for dtype in dtypes]
        closed = jax.make_jaxpr(function)(*scalars)
        accepted = jnp.bool_ if name == "mask_mod" else jnp.floating
        results: list[Any] = list(closed.out_avals)
        if len(results) != 1 or results[0].shape or not jnp.issubdtype(results[0].dtype, accepted):
            kind = "boolean" if name == "mask_mod" else "floating"
            raise TypeError(f"{name} must return one {kind} scalar, got {results}")
        jaxpr, captured = _hoist(closed)
        return cls(jaxpr, tuple(jnp.asarray(const) for const in captured))

    def __call__(self, *scalars: Array) -> Array:
        """Apply to scalars; vmap over it for tiles."""
        (result,) = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, ()))(*self.captured, *scalars)
        return result

    @property
    def floating(self) -> tuple[Array, ...]:
        """The captured arrays that can have gradients."""
        return tuple(x for x in self.captured if jnp.issubdtype(x.dtype, jnp.inexact))

    def with_floating(self, arrays: tuple[Array, ...]) -> Mod:
        """The same function with `arrays` in place of `floating`."""
        return Mod(self.jaxpr, self._merged(arrays, self.captured))

    def cotangents(self, arrays: tuple[Array, ...]) -> tuple[Array | None, ...]:
        """Gradients of `floating`, with None where a captured array has none."""
        return self._merged(arrays, (None,) * len(self.captured))

    def _merged(self, arrays: tuple[Any, ...], others: tuple[Any, ...]) -> tuple[Any, ...]:
        rest = iter(arrays)
        return tuple(
            next(rest) if jnp.issubdtype(x.dtype, jnp.inexact) else other
            for x, other in zip(self.captured, others, strict=True)
        )

    def on_tile(self, *arrays: Array) -> Array:
        """Apply to arrays of one broadcast shape, element by element.

        Each argument is mapped over the axes where it is longer than 1, so that a gather by head
        stays a gather by head and is not repeated for every query and key.
        """
        rank = max(jnp.ndim(array) for array in arrays)
        # Traced for these dtypes; with 64-bit types on, indices arrive as int64.
        scalars = self.jaxpr.invars[len(self.captured) :]
        dtypes = [variable.aval.dtype for variable in scalars]
        arrays = tuple(jnp.asarray(a, dtype) for a, dtype in zip(arrays, dtypes, strict=True))
        arrays = tuple(jnp.reshape(a, (1,) * (rank - jnp.ndim(a)) + jnp.shape(a)) for a in arrays)
        return _map_axes(self, arrays)


def _hoist(closed: ClosedJaxpr) -> tuple[Jaxpr, list[Any]]:
    """Run what depends on captured arrays alone now, once, instead of in every tile.

    Its results are captured in place of what they were computed from, and JAX differentiates that
    step: a kernel is left with arrays that are indexed.
    """
    jaxpr = closed.jaxpr
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    rest = []
    for eqn in jaxpr.eqns:
        variables = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        if variables and all(variable in known for variable in variables) and not eqn.effects:
            known.update(zip(eqn.outvars, run_equation(eqn, known, jaxpr), strict=True))
        else:
            rest.append(eqn)
    used = [*jaxpr.outvars, *(atom for eqn in rest for atom in eqn.invars)]
    used = dict.fromkeys(atom for atom in used if not isinstance(atom, Literal))
    captured = [variable for variable in used if variable in known]
    inputs = [*captured, *jaxpr.invars]
    left = Jaxpr((), inputs, jaxpr.outvars, rest, debug_info=jaxpr.debug_info)
    return left, [known[variable] for variable in captured]


def run_equation(eqn: Any, values: Mapping[Any, Any], jaxpr: Any) -> list[Any]:
    """Run one equation of a jaxpr, with derivatives of its own where it has them."""
    variables = list(dict.fromkeys(a for a in eqn.invars if not isinstance(a, Literal)))
    step = Jaxpr((), variables, eqn.outvars, [eqn], debug_info=jaxpr.debug_info)
    return jaxpr_as_fun(ClosedJaxpr(step, ()))(*(values[variable] for variable in variables))


def _map_axes(function: Callable[..., Array], arrays: tuple[Array, ...]) -> Array:
    if arrays[0].ndim == 0:
        return function(*arrays)
    wide = any(array.shape[0] != 1 for array in arrays)
    axes = tuple(0 if array.shape[0] != 1 else None for array in arrays)
    arrays = tuple(a if axis == 0 else a[0] for a, axis in zip(arrays, axes, strict=True))

    def inner(*mapped: Array) -> Array:
        return _map_axes(function, mapped)

    return jax.vmap(inner, axes)(*arrays) if wide else inner(*arrays)[None]
