"""A clear error where a function that has a reverse-mode derivative only meets forward mode.

`reverse_only` is the identity. Its tangents pass through a linear operation that transposes to the
identity, so reverse mode never runs it; running it, eagerly or while a `jit` is lowered, is forward
mode, and raises.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

_tangent_p = Primitive("reverse_only_tangent")


def reverse_only[Tree](tree: Tree, implementation: str) -> Tree:
    """The same tree; its forward-mode derivative raises a `TypeError` that says what to do.

    >>> jax.grad(lambda x: reverse_only(x, "xla"))(3.0)
    Array(1., dtype=float32, weak_type=True)
    """

    def mark(leaf: Array) -> Array:
        return _identity(implementation, leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf

    return jax.tree.map(mark, jax.tree.map(jnp.asarray, tree))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _identity(implementation: str, x: Array) -> Array:
    del implementation
    return x


@_identity.defjvp
def _identity_jvp(implementation: str, primals: Any, tangents: Any) -> tuple[Array, Array]:
    return primals[0], _tangent_p.bind(tangents[0], implementation=implementation)


def _raise(*_: Any, implementation: str, **__: Any) -> Any:
    raise TypeError(
        f"implementation={implementation!r} has no forward-mode derivative (jvp, jacfwd, "
        "hessian): use reverse mode (grad, vjp, jacrev, also nested), or "
        "implementation='reference', which has both"
    )


def _batched(args: Any, axes: Any, **params: Any) -> tuple[Array, int]:
    return _tangent_p.bind(*args, **params), axes[0]


_tangent_p.def_impl(_raise)
_tangent_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear(_tangent_p, lambda cotangent, **_: [cotangent])
batching.primitive_batchers[_tangent_p] = _batched
mlir.register_lowering(
    _tangent_p, lambda _, *__, implementation: _raise(implementation=implementation)
)
