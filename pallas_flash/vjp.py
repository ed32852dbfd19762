"""One `jax.custom_vjp` around every implementation's forward and backward.

Saved between the passes: the call's own arrays, the output and the LSE, both named for
`jax.checkpoint` policies ("attention_out", "attention_lse"). Tiles are recomputed.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from pallas_flash.call import AttentionCall, Gradients

OUT_NAME = "attention_out"
LSE_NAME = "attention_lse"


def named(out: Array, lse: Array) -> tuple[Array, Array]:
    """Names both for `jax.checkpoint` policies such as `save_only_these_names`."""
    return checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(implementation: ModuleType, call: AttentionCall) -> tuple[Array, Array]:
    """Output (B, T, N, Hv) and LSE (B, N, T) of a call, differentiable in both.

    Args:
      implementation: a module as described in `pallas_flash.call`.
      call: the checked arguments.
    """
    return implementation.forward(call)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Residuals:
    """What the backward pass needs; `wanted` is static, so that kernels can specialise on it."""

    call: AttentionCall
    out: Array
    lse: Array
    wanted: frozenset[str] = dataclasses.field(metadata={"static": True})


def _forward(implementation: ModuleType, marked: Any) -> tuple[tuple[Array, Array], _Residuals]:
    # With symbolic_zeros every leaf arrives as a CustomVJPPrimal(value, perturbed).
    call = jax.tree.map(lambda leaf: leaf.value, marked, is_leaf=_is_primal)
    wanted = frozenset(
        name
        for name in Gradients._fields
        if any(
            leaf.perturbed for leaf in jax.tree.leaves(getattr(marked, name), is_leaf=_is_primal)
        )
    )
    out, lse = named(*implementation.forward(call))
    return (out, lse), _Residuals(call, out, lse, wanted)


def _backward(implementation: ModuleType, residuals: _Residuals, cotangents: Any) -> tuple[Any]:
    call, wanted = residuals.call, residuals.wanted
    dout, dlse = cotangents
    if _is_zero(dlse):
        dlse = None
    if _is_zero(dout):
        if dlse is None:
            return (_cotangent(call, Gradients()),)
        dout = jnp.zeros(residuals.out.shape, residuals.out.dtype)
    gradients = implementation.backward(call, residuals.out, residuals.lse, dout, dlse, wanted)
    return (_cotangent(call, gradients),)


def _is_primal(node: Any) -> bool:
    return isinstance(node, jax.custom_derivatives.CustomVJPPrimal)


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


def _cotangent(call: AttentionCall, gradients: Gradients) -> AttentionCall:
    """Gradients as a cotangent of the whole call; None stands for zero."""
    leaves = gradients._asdict()
    captured = leaves.pop("score_mod")
    if call.score_mod is not None:
        captured = captured or (None,) * len(call.score_mod.captured)
        leaves["score_mod"] = dataclasses.replace(call.score_mod, captured=captured)
    for name, gradient in leaves.items():
        if isinstance(gradient, jax.Array):
            leaves[name] = gradient.astype(getattr(call, name).dtype)
    return dataclasses.replace(call, mask=None, dropout_seed=None, **leaves)


attention.defvjp(_forward, _backward, symbolic_zeros=True)
