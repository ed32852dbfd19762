"""JAX's transformations, bad input, empty shapes, and the choice of implementation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash
from pallas_flash import api, implementations

attention: Any = pallas_flash.dot_product_attention
pytestmark = pytest.mark.usefixtures("scan_in_several_tiles")
KEYS = jax.random.split(jax.random.key(0), 4)
Q = jax.random.normal(KEYS[0], (3, 2, 60, 4, 8))
K = jax.random.normal(KEYS[1], (3, 2, 70, 2, 8))
V = jax.random.normal(KEYS[2], (3, 2, 70, 2, 8))
BIAS = jax.random.normal(KEYS[3], (3, 1, 4, 1, 70))
LENGTHS = jnp.array([[70, 9], [31, 50], [70, 70]])


def xla(q, k, v, bias=None, lengths=None):
    return attention(
        q, k, v, bias, is_causal=True, key_value_seq_lengths=lengths, implementation="xla"
    )


def test_vmap_over_any_axes():
    got = jax.jit(jax.vmap(xla, (0, 0, 0, 0, 0)))(Q, K, V, BIAS, LENGTHS)
    want = [xla(*one) for one in zip(Q, K, V, BIAS, LENGTHS, strict=True)]
    np.testing.assert_allclose(got, jnp.stack(want), atol=1e-5)
    moved = jax.vmap(xla, (2, None, None, 0), 1)(jnp.moveaxis(Q, 0, 2), K[0], V[0], BIAS)
    want = [xla(q, K[0], V[0], bias) for q, bias in zip(Q, BIAS, strict=True)]
    np.testing.assert_allclose(moved, jnp.stack(want, 1), atol=1e-5)


def test_vmap_of_grad_and_jacrev():
    def loss(q, k, v, bias):
        return jnp.sum(jnp.sin(xla(q, k, v, bias)))

    got = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 3)), (0, 0, 0, 0)))(Q, K, V, BIAS)
    for n in range(3):
        want = jax.grad(loss, (0, 1, 3))(Q[n], K[n], V[n], BIAS[n])
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x[n], y, atol=1e-5)
    q, k, v = Q[0, :1, :3], K[0, :1, :5], V[0, :1, :5]
    by_ours, by_reference = (
        jax.jacrev(lambda q, i=i: attention(q, k, v, implementation=i))(q)
        for i in ("xla", "reference")
    )
    np.testing.assert_allclose(by_ours, by_reference, atol=1e-5)


def test_second_derivatives_are_right_and_forward_mode_says_what_to_do():
    q, k, v = Q[0, :, :5], K[0, :, :6], V[0, :, :6]

    def directional(q, k, implementation):
        def loss(q, k):
            out, lse = attention(
                q, k, v, is_causal=True, return_residual=True, implementation=implementation
            )
            return jnp.sum(jnp.sin(out)) + jnp.sum(lse**2)

        dq, dk = jax.grad(loss, (0, 1))(q, k)
        return jnp.sum(dq * jnp.cos(q)) + jnp.sum(dk**2)

    got, want = (jax.grad(directional, (0, 1))(q, k, i) for i in ("xla", "reference"))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)
    with pytest.raises(TypeError, match="implementation='reference'"):
        jax.jvp(lambda q: xla(q, k, v), (q,), (q,))
    jax.jvp(lambda q: attention(q, k, v, implementation="reference"), (q,), (q,))


def test_checkpoint_policy_that_saves_the_names_runs_the_forward_once():
    q, k, v = Q[0], K[0], V[0]
    names = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")

    def exponentials(policy):
        layer = jax.checkpoint(lambda q: jnp.sum(xla(q, k, v) ** 2), policy=policy)
        compiled = jax.jit(jax.value_and_grad(layer)).lower(q).as_text()
        return compiled.count("stablehlo.exponential")

    saved, recomputed = exponentials(names), exponentials(None)
    # The forward's loop has two exponentials, the backward's one.
    assert (saved, recomputed) == (3, 5)
    plain = jax.grad(lambda q: jnp.sum(xla(q, k, v) ** 2))(q)
    layer = jax.checkpoint(lambda q: jnp.sum(xla(q, k, v) ** 2), policy=names)
    np.testing.assert_array_equal(jax.grad(layer)(q), plain)


def test_gradients_repeat_bitwise():
    grad = jax.jit(jax.grad(lambda q, k: jnp.sum(xla(q, k, V[0], BIAS[0], LENGTHS[1])), (0, 1)))
    first, second = grad(Q[0], K[0]), grad(Q[0], K[0])
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("pattern", ["", "B", "N", "T", "S", "NS", "NTS", "BT", "BNTS"])
def test_bias_gradient_of_every_broadcast_pattern(pattern):
    shape = [
        size if axis in pattern else 1 for axis, size in zip("BNTS", (2, 4, 60, 70), strict=True)
    ]
    bias = jax.random.normal(KEYS[3], shape, jnp.bfloat16)

    def loss(bias, implementation):
        out = attention(
            Q[0], K[0], V[0], bias, key_value_seq_lengths=LENGTHS[0], implementation=implementation
        )
        return jnp.sum(jnp.sin(out))

    got, want = (jax.grad(loss)(bias, i) for i in ("xla", "reference"))
    assert got.shape == bias.shape
    assert got.dtype == bias.dtype
    np.testing.assert_allclose(
        got.astype(jnp.float32), want.astype(jnp.float32), rtol=1e-2, atol=1e-4
    )


# ---- empty shapes, bad input --------------------------------------------------------------------


@pytest.mark.parametrize(("B", "T", "S"), [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
def test_empty_shapes(B, T, S, implementation):
    q, k = jnp.ones((B, T, 2, 8)), jnp.ones((B, S, 2, 8))

    def run(q, k):
        out, lse = attention(
            q, k, k, is_causal=True, implementation=implementation, return_residual=True
        )
        return jnp.sum(out), (out, lse)

    grads, (out, lse) = jax.grad(run, (0, 1), has_aux=True)(q, k)
    assert out.shape == (B, T, 2, 8)
    assert (out == 0).all()
    assert (lse == -jnp.inf).all()
    assert all((g == 0).all() for g in grads)


X = jnp.ones((2, 5, 4, 8))
X3, HALF, IDS = X[:, :, :3], X.astype(jnp.bfloat16), jnp.ones((2, 5), int)
BLOCKS = pallas_flash.block_mask(lambda b, n, i, j: i < j, T=8, S=8)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (TypeError, "query must have a dtype of .* got int32", {"query": X.astype(int)}),
        (TypeError, "key has dtype bfloat16 but query has float32", {"key": HALF}),
        (TypeError, "query must be an array, got list", {"query": [[1.0]]}),
        (ValueError, "4 heads, which is not a multiple of key's 3", {"key": X3, "value": X3}),
        (ValueError, "key and value must agree", {"value": X[:, :3]}),
        (ValueError, "key has batch size 1", {"key": X[:1], "value": X[:1]}),
        (ValueError, "key has head dim 4", {"key": X[..., :4]}),
        (TypeError, "mask must be boolean", {"mask": jnp.ones((5, 5), int)}),
        (ValueError, "mask of shape .* does not broadcast", {"mask": jnp.ones((4, 5), bool)}),
        (TypeError, "bias is boolean", {"bias": jnp.ones((5, 5), bool)}),
        (ValueError, "bias must have rank 2 to 4", {"bias": jnp.ones(5)}),
        (ValueError, "local_window_size must not be negative", {"local_window_size": (-1, 0)}),
        (TypeError, "local_window_size must hold static ints", {"local_window_size": 1.5}),
        (ValueError, "query_seq_lengths must have shape", {"query_seq_lengths": jnp.ones(3, int)}),
        (TypeError, "query_seq_lengths must be an integer", {"query_seq_lengths": jnp.ones(2)}),
        (TypeError, "query_seq_lengths must be an integer .* 2.5", {"query_seq_lengths": [1, 2.5]}),
        (TypeError, "query_positions .* holds True", {"query_positions": [[0, True]]}),
        (ValueError, "query_seq_lengths must fit in 32", {"query_seq_lengths": [5, 2**40]}),
        (ValueError, "query_seq_lengths must fit", {"query_seq_lengths": np.array([5, 2**40])}),
        (ValueError, "query_positions .* rows of one length", {"query_positions": [[0, 1], [0]]}),
        (ValueError, "must be given together", {"query_segment_ids": jnp.ones((2, 5), int)}),
        (ValueError, "causal_alignment must be one of", {"causal_alignment": "left"}),
        (ValueError, "bottom_right", {"causal_alignment": "bottom_right", "query_positions": IDS}),
        (ValueError, "logits_soft_cap must be positive", {"logits_soft_cap": 0.0}),
        (ValueError, r"sinks must have shape \(N,\) = \(4,\)", {"sinks": jnp.ones(3)}),
        (ValueError, "needs dropout_rng", {"dropout_rate": 0.1}),
        (ValueError, r"dropout_rate must be in \[0, 1\)", {"dropout_rate": 1.0}),
        (TypeError, "mask_mod must return one boolean scalar", {"mask_mod": lambda b, n, i, j: i}),
        (ValueError, "scale must be a number or a scalar", {"scale": jnp.ones(2)}),
        (ValueError, "mask_mod is a block mask of T, S", {"mask_mod": BLOCKS}),
        (ValueError, "implementation must be None or .*'fast'$", {"implementation": "fast"}),
        (ValueError, r"'cudnn': .* jax\.nn\.dot_product.* pass None", {"implementation": "cudnn"}),
    ],
)  # fmt: skip
def test_bad_input_is_named(error, message, options):
    with pytest.raises(error, match=message):
        attention(**{"query": X, "key": X, "value": X, **options})


def test_lists_of_ints_are_integer_arrays():
    ids = [[0, 0, 1, 1, -1], [0, 1, 1, 2, 2]]
    options: dict[str, Any] = {
        "is_causal": True,
        "query_seq_lengths": [5, 3],
        "key_value_seq_lengths": (4, np.int64(5)),
        "query_segment_ids": ids,
        "key_value_segment_ids": tuple(map(tuple, ids)),
        "query_positions": [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]],
        "key_value_positions": [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]],
    }
    got = api.build_call(X, X, X, **options).mask
    arrays = {k: jnp.asarray(v, jnp.int32) for k, v in options.items() if k != "is_causal"}
    want = api.build_call(X, X, X, is_causal=True, **arrays).mask
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert {x.dtype.name for x in jax.tree.leaves(got)} == {"int32"}
    lengths = jax.jit(lambda n: api.build_call(X, X, X, query_seq_lengths=n).mask.query_lengths)
    np.testing.assert_array_equal(lengths([5, 3]), [5, 3])  # traced scalars in a list


def test_default_implementation_by_context_and_environment(monkeypatch):
    def chosen(**options):
        call = api.build_call(X, X, X)
        return implementations.choose(call, options.get("implementation")).NAME

    assert chosen() == "xla"
    monkeypatch.setenv("PALLAS_FLASH_IMPLEMENTATION", "reference")
    assert chosen() == "reference"
    with pallas_flash.default_implementation("xla"):
        assert chosen() == "xla"
        assert chosen(implementation="reference") == "reference"
    monkeypatch.setenv("PALLAS_FLASH_IMPLEMENTATION", "nonsense")
    with pytest.raises(ValueError, match="environment variable PALLAS_FLASH_IMPLEMENTATION"):
        chosen()


def test_long_batches_and_odd_head_dims():
    q = jax.random.normal(jax.random.key(0), (4096, 1, 17, 3))
    out = attention(q, q, q[..., :2], implementation="xla")
    np.testing.assert_allclose(out, q[..., :2], atol=1e-5)
