"""One `jax.custom_vjp` around every implementation's forward and backward.

Saved between the passes: the call's own arrays, the output and the LSE, both named for
`jax.checkpoint` policies ("attention_out", "attention_lse"). Tiles are recomputed. Derivatives of
the gradients are those of the reference: exact, but with the (T, S) matrix in memory.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from pallas_flash import reference
from pallas_flash.call import AttentionCall, Gradients
from pallas_flash.reverse import reverse_only

OUT_NAME = "attention_out"
LSE_NAME = "attention_lse"


def named(out: Array, lse: Array) -> tuple[Array, Array]:
    """Names both for `jax.checkpoint` policies such as `save_only_these_names`."""
    return checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)


def attention(implementation: Any, call: AttentionCall) -> tuple[Array, Array]:
    """Output (B, T, N, Hv) and LSE (B, N, T) of a call, differentiable in both, in reverse mode.

    Args:
      implementation: a module as described in `pallas_flash.call`, or a hashable object like one.
      call: the checked arguments.
    """
    return _attention(implementation, reverse_only(call, implementation.NAME))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(implementation: Any, call: AttentionCall) -> tuple[Array, Array]:
    return implementation.forward(call)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Residuals:
    """What the backward pass needs; `wanted` is static, so that kernels can specialise on it."""

    call: AttentionCall
    out: Array
    lse: Array
    wanted: frozenset[str] = dataclasses.field(metadata={"static": True})


def _forward(implementation: Any, marked: Any) -> tuple[tuple[Array, Array], _Residuals]:
    # With symbolic_zeros every leaf arrives as a CustomVJPPrimal(value, perturbed).
    call = jax.tree.map(lambda leaf: leaf.value, marked, is_leaf=_is_primal)
    wanted = frozenset(
        name
        for name in Gradients._fields
        if any(
            leaf.perturbed for leaf in jax.tree.leaves(getattr(marked, name), is_leaf=_is_primal)
        )
    )
    # Through the function itself, so that a derivative of this rule meets the rule again.
    result: Any = _attention(implementation, call)
    out, lse = named(*result)
    return (out, lse), _Residuals(call, out, lse, wanted)


def _backward(implementation: Any, residuals: _Residuals, cotangents: Any) -> tuple[Any]:
    call, wanted = residuals.call, residuals.wanted
    dout, dlse = cotangents
    if _is_zero(dlse):
        dlse = None
    if _is_zero(dout):
        if dlse is None:
            return (cotangent(call, Gradients()),)
        dout = jnp.zeros(residuals.out.shape, residuals.out.dtype)
    gradients: Any = _gradients(
        implementation, wanted, call, residuals.out, residuals.lse, dout, dlse
    )
    return (cotangent(call, gradients),)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gradients(
    implementation: Any,
    wanted: frozenset[str],
    call: AttentionCall,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array | None,
) -> Gradients:
    """The backward pass as a function of its own, so that it has a derivative too."""
    return implementation.backward(call, out, lse, dout, dlse, wanted)


def _gradients_forward(
    implementation: Any, wanted: frozenset[str], *operands: Any
) -> tuple[Gradients, Any]:
    call, _, _, dout, dlse = operands
    return _gradients(implementation, wanted, *operands), (call, dout, dlse)


def _gradients_backward(
    implementation: Any, wanted: frozenset[str], saved: Any, cotangents: Gradients
) -> tuple[Any, ...]:
    """Second derivatives: those of the reference's gradients, in O(T S) memory.

    Gradients are a function of the call and the cotangents alone: `out` and `lse` are themselves
    functions of the call, so nothing is left for them.
    """
    del implementation

    def gradients(call: AttentionCall, dout: Array, dlse: Array | None) -> Gradients:
        (_, lse), pull_back = jax.vjp(reference.forward, call)
        (dcall,) = pull_back((dout, jnp.zeros_like(lse) if dlse is None else dlse))
        fields = {name: getattr(dcall, name) for name in Gradients._fields}
        if dcall.score_mod is not None:
            fields["score_mod"] = dcall.score_mod.captured
        like = {
            name: jax.tree.map(
                lambda want, have: have.astype(want.dtype), wanted_like, fields[name]
            )
            for name, wanted_like in cotangents._asdict().items()
            if wanted_like is not None
        }
        return Gradients(**like)

    _, pull_back = jax.vjp(gradients, *saved)
    dcall, ddout, ddlse = pull_back(cotangents)
    return dcall, None, None, ddout, ddlse


_gradients.defvjp(_gradients_forward, _gradients_backward)


def _is_primal(node: Any) -> bool:
    return isinstance(node, jax.custom_derivatives.CustomVJPPrimal)


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


def cotangent(call: AttentionCall, gradients: Gradients) -> AttentionCall:
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


_attention.defvjp(_forward, _backward, symbolic_zeros=True)
