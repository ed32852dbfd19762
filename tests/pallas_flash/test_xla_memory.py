"""Temporary memory of the scan, as XLA's own compiler reports it."""

import jax
import jax.numpy as jnp
import pytest
from problems import QUICK

import pallas_flash


def temporary_bytes(T: int, **options) -> int:
    """Temporaries of a compiled forward and backward at T queries and keys, one head."""
    shape = jax.ShapeDtypeStruct((1, T, 1, 16), jnp.float32)
    arrays = {name: x for name, x in options.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {name: x for name, x in options.items() if name not in arrays}

    def loss(q, k, v, arrays):
        out = pallas_flash.dot_product_attention(q, k, v, implementation="xla", **arrays, **static)
        return jnp.sum(out**2)

    floating = any(jnp.issubdtype(x.dtype, jnp.floating) for x in arrays.values())
    grad = jax.grad(loss, (0, 1, 2, 3) if floating else (0, 1, 2))
    return temporaries(grad, shape, shape, shape, arrays)


def temporaries(function, *arguments) -> int:
    compiled = jax.jit(function, compiler_options=QUICK).lower(*arguments).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None, "this backend does not report memory"
    return analysis.temp_size_in_bytes


def assert_linear(sizes: list[int]) -> None:
    """Doubling T adds as much as the doubling before, twice: 8k, 16k, 32k."""
    small, middle, large = sizes
    assert large < 2.2 * middle < 2.2 * 2.2 * small
    # A float32 score matrix alone would take 4 T^2 bytes.
    assert large < 4 * 32768**2 / 50


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_backward_memory_is_linear(is_causal):
    assert_linear([temporary_bytes(T, is_causal=is_causal) for T in (8192, 16384, 32768)])


def test_the_quadratic_reference_would_fail_this():
    T = 8192
    x = jax.ShapeDtypeStruct((1, T, 1, 16), jnp.float32)

    def loss(q, k, v):
        return jnp.sum(pallas_flash.dot_product_attention(q, k, v, implementation="reference"))

    assert temporaries(jax.grad(loss), x, x, x) > 4 * T**2


@pytest.mark.parametrize("kind", ["bias", "segments", "score_mod"])
def test_memory_is_linear_with_every_kind_of_operand(kind):
    def options(T: int) -> dict:
        ids = jax.ShapeDtypeStruct((1, T), jnp.int32)
        return {
            "bias": {"bias": jax.ShapeDtypeStruct((1, 1, 1, T), jnp.float32)},
            "segments": {"query_segment_ids": ids, "key_value_segment_ids": ids},
            "score_mod": {"score_mod": lambda score, b, n, i, j: score + jnp.sin(i - j)},
        }[kind]

    small, large = (temporary_bytes(T, **options(T)) for T in (8192, 16384))
    assert large < 2.2 * small
    assert large < 4 * 16384**2 / 50
