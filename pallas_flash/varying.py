"""Varying mesh axes: what `shard_map` with its checks on wants to know about every value."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jaxtyping import Array


def vary_like[Tree](tree: Tree, like: Any) -> Tree:
    """`tree` with every array varying over the mesh axes that any array of `like` varies over.

    Outside `shard_map` it does nothing. Inside, a value that is the same on all devices and meets
    one that is not becomes varying; the transpose of that step is the sum over the axes, so the
    gradient of a replicated bias beside sharded queries comes out right.
    """
    axes = frozenset().union(*(_axes(x) for x in jax.tree.leaves(like)))

    def cast(x: Array) -> Array:
        missing = tuple(axes - _axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree) if axes else tree


def _axes(x: Array) -> frozenset[Any]:
    return jax.typeof(x).mat.varying
