"""User functions that are traced into the tile: `score_mod` and `mask_mod`.

A user function may close over arrays (a per-head table of biases, say). Kernels cannot capture
arrays, and a captured array should get a gradient, so `Mod` lifts them out: the traced function is
static, the arrays it captured are leaves of a pytree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array

INDICES = (jnp.int32,) * 4  # b, n, q_index, k_index


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mod:
    """A traced scalar function with its captured arrays as leaves.

    Attributes:
      jaxpr: the traced function of scalars, static.
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
        return cls(closed.jaxpr, tuple(jnp.asarray(const) for const in closed.consts))

    def __call__(self, *scalars: Array) -> Array:
        """Apply to scalars; vmap over it for tiles."""
        (result,) = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, list(self.captured)))(*scalars)
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
        dtypes = [variable.aval.dtype for variable in self.jaxpr.invars]
        arrays = tuple(jnp.asarray(a, dtype) for a, dtype in zip(arrays, dtypes, strict=True))
        arrays = tuple(jnp.reshape(a, (1,) * (rank - jnp.ndim(a)) + jnp.shape(a)) for a in arrays)
        return _map_axes(self, arrays)


def _map_axes(function: Callable[..., Array], arrays: tuple[Array, ...]) -> Array:
    if arrays[0].ndim == 0:
        return function(*arrays)
    wide = any(array.shape[0] != 1 for array in arrays)
    axes = tuple(0 if array.shape[0] != 1 else None for array in arrays)
    arrays = tuple(a if axis == 0 else a[0] for a, axis in zip(arrays, axes, strict=True))

    def inner(*mapped: Array) -> Array:
        return _map_axes(function, mapped)

    return jax.vmap(inner, axes)(*arrays) if wide else inner(*arrays)[None]
