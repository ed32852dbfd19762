"""Random arrays for the named cases, and comparisons against the reference.

`pallas_flash.shapes` lists the cases; this module draws their arrays. An implementation joins the
shared suite by its name in `IMPLEMENTATIONS`.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import pallas_flash
from pallas_flash.mask import Mask
from pallas_flash.shapes import Case

# Everything that must mean what the reference means, on any machine.
IMPLEMENTATIONS = ("xla", "triton")

# Compiling takes longer than running here.
QUICK = {"xla_backend_optimization_level": 0}


def abstract(shape, dtype) -> Any:
    """Shape and dtype where an array is expected: enough for tracing and lowering."""
    return jax.ShapeDtypeStruct(shape, dtype)


# Every kind of interval mask, for kernels that are only lowered.
_LENGTHS = abstract((2,), jnp.int32)
ABSTRACT_MASKS = {
    "none": Mask(),
    "causal": Mask(is_causal=True),
    "window": Mask(window=(100, 20)),
    "causal window, bottom right": Mask(
        is_causal=True, window=(100, None), causal_alignment="bottom_right"
    ),
    "lengths": Mask(is_causal=True, query_lengths=_LENGTHS, key_value_lengths=_LENGTHS),
}


def draw(
    case: Case, seed: int = 0, dtype: Any = jnp.float32
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(differentiable arrays, other arguments) of `dot_product_attention` for a case."""
    rng = np.random.default_rng([seed, *case.name.encode()])
    B, T, S, N, K, H, Hv = case.sizes

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    arrays: dict[str, Any] = {
        "query": normal(B, T, N, H),
        "key": normal(B, S, K, H),
        "value": normal(B, S, K, Hv),
    }
    if case.bias is not None:
        arrays["bias"] = normal(*case.broadcast_shape(case.bias))
    others: dict[str, Any] = {"is_causal": case.is_causal, "local_window_size": case.window}
    if case.dense is not None:
        others["mask"] = jnp.asarray(rng.random(case.broadcast_shape(case.dense)) < 0.6)
    if case.q_lengths:
        others["query_seq_lengths"] = jnp.asarray(_lengths(rng, B, T))
    if case.kv_lengths:
        others["key_value_seq_lengths"] = jnp.asarray(_lengths(rng, B, S))
    return arrays, others


def _lengths(rng: np.random.Generator, batch: int, size: int) -> np.ndarray:
    """Lengths that include the whole row and an empty one."""
    lengths = rng.integers(1, size + 1, batch)
    lengths[0] = size
    if batch > 2:
        lengths[-1] = 0
    return lengths.astype(np.int32)


def value_and_grads(
    arrays: dict[str, Any], others: dict[str, Any], implementation: str, seed: int = 0
) -> dict[str, np.ndarray]:
    """Output, LSE and the gradients of a random linear functional of both."""
    differentiable = {name: x for name, x in arrays.items() if x is not None}
    static = {
        name: x
        for name, x in others.items()
        if not isinstance(x, jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    }
    data: dict[str, Any] = {name: x for name, x in others.items() if name not in static}

    attention: Any = pallas_flash.dot_product_attention  # keywords by the dozen: untyped here

    make_score_mod = cast(Any, static.pop("make_score_mod", None))

    def run(differentiable: dict[str, Any], data: dict[str, Any], weights: tuple[Any, Any]):
        if make_score_mod is not None:
            # A function of a captured array, so that the array's gradient is seen.
            differentiable = dict(differentiable)
            differentiable["score_mod"] = make_score_mod(differentiable.pop("table"))
        out, lse = attention(
            **differentiable, **data, **static, implementation=implementation, return_residual=True
        )
        finite = jnp.where(lse == -jnp.inf, 0, lse)
        total = jnp.sum(out.astype(jnp.float32) * weights[0]) + jnp.sum(finite * weights[1])
        return total.astype(jnp.promote_types(lse.dtype, jnp.float32)), (out, lse)

    query, value = arrays["query"], arrays["value"]
    out_shape = (*query.shape[:-1], value.shape[-1])
    rng = np.random.default_rng(seed)
    weights = tuple(
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in (out_shape, query.shape[:-1])
    )
    grad = jax.jit(jax.grad(run, has_aux=True), compiler_options=QUICK)
    grads, (out, lse) = grad(differentiable, data, weights)
    results = {"out": out, "lse": lse, **{f"d{name}": g for name, g in grads.items()}}
    return {
        name: np.asarray(x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32))
        for name, x in results.items()
    }


def assert_close(
    got: dict[str, np.ndarray], want: dict[str, np.ndarray], tolerance: float = 2e-5
) -> None:
    """Largest error at most `tolerance` of the largest value, array by array; no NaN anywhere."""
    assert got.keys() == want.keys()
    for name, expected in want.items():
        actual = got[name]
        assert actual.shape == expected.shape, name
        assert not np.isnan(expected).any(), f"{name}: NaN in the reference"
        infinite = np.isinf(expected)
        np.testing.assert_array_equal(actual[infinite], expected[infinite], err_msg=name)
        difference = np.abs(actual[~infinite] - expected[~infinite])
        allowed = tolerance * max(1.0, np.abs(expected[~infinite]).max(initial=0))
        worst = difference.max(initial=0)
        assert worst <= allowed, f"{name}: error {worst:.2e}, allowed {allowed:.2e}"
