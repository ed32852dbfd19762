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
    def trace(cls, function: Callable[..., Array], *example: Any) -> Mod:
        """Trace `function` at scalars of the given example dtypes."""
        closed = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct((), dtype) for dtype in example])
        return cls(closed.jaxpr, tuple(jnp.asarray(const) for const in closed.consts))

    def __call__(self, *scalars: Array) -> Array:
        """Apply to scalars; vmap over it for tiles."""
        (result,) = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, list(self.captured)))(*scalars)
        return result

    def on_tile(self, *arrays: Array) -> Array:
        """Apply to arrays of one broadcast shape, element by element.

        Each argument is mapped over the axes where it is longer than 1, so that a gather by head
        stays a gather by head and is not repeated for every query and key.
        """
        rank = max(jnp.ndim(array) for array in arrays)
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
