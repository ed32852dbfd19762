"""Flax's MultiHeadAttention computes the same with our attention function as with its own."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import pallas_flash

X = jax.random.normal(jax.random.key(0), (2, 12, 16))
MASK = nn.combine_masks(
    nn.make_causal_mask(X[..., 0]), jnp.arange(12) < jnp.array([[9], [12]])[:, None, None]
)


OURS = pallas_flash.flax_attention_fn(implementation="xla")


def nnx_step(attention_fn) -> dict:
    """Parameters after one SGD step of an NNX layer that starts from a fixed seed."""
    kwargs = {} if attention_fn is None else {"attention_fn": attention_fn}
    layer = nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0), **kwargs)
    optimizer = nnx.Optimizer(layer, optax.sgd(0.1), wrt=nnx.Param)
    grads = nnx.grad(lambda layer: jnp.sum(layer(X, mask=MASK) ** 2))(layer)
    optimizer.update(layer, grads)
    return nnx.to_pure_dict(nnx.state(layer, nnx.Param))


def test_an_nnx_training_step_is_the_same():
    ours, theirs = nnx_step(OURS), nnx_step(None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)


def test_a_linen_layer_and_its_gradient_are_the_same():
    results = []
    options: tuple[dict[str, Any], ...] = ({}, {"attention_fn": OURS})
    for kwargs in options:
        layer = nn.MultiHeadDotProductAttention(num_heads=4, **kwargs)
        params = layer.init(jax.random.key(1), X)

        def loss(params: Any, layer: Any = layer) -> jax.Array:
            return jnp.sum(layer.apply(params, X, mask=MASK) ** 2)

        results.append(jax.grad(loss)(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), *results)


def test_causal_by_flax_or_by_option():
    layer = nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0))
    want = layer(X, is_causal=True)
    layer.attention_fn = pallas_flash.flax_attention_fn()
    np.testing.assert_allclose(layer(X, is_causal=True), want, atol=1e-5)
    layer.attention_fn = pallas_flash.flax_attention_fn(is_causal=True)
    np.testing.assert_allclose(layer(X), want, atol=1e-5)


def test_deterministic_means_no_dropout():
    layer = nnx.MultiHeadAttention(
        4, 16, decode=False, dropout_rate=0.5, rngs=nnx.Rngs(0),
        attention_fn=pallas_flash.flax_attention_fn(),
    )  # fmt: skip
    quiet = layer(X, deterministic=True)
    np.testing.assert_array_equal(quiet, layer(X, deterministic=True))
    first, second = (layer(X, deterministic=False, rngs=nnx.Rngs(seed)) for seed in (1, 2))
    assert (np.abs(first - quiet) > 1e-3).mean() > 0.9
    assert (np.abs(first - second) > 1e-3).mean() > 0.9


def test_several_batch_axes():
    q = jax.random.normal(jax.random.key(2), (2, 3, 5, 4, 8))
    mask = jax.random.bernoulli(jax.random.key(3), 0.8, (2, 3, 4, 5, 5)).at[..., 0].set(True)
    np.testing.assert_allclose(
        pallas_flash.flax_attention_fn()(q, q, q, mask=mask),
        nn.dot_product_attention(q, q, q, mask=mask),
        atol=1e-5,
    )


def test_weights_cannot_be_sown():
    layer = nnx.MultiHeadAttention(
        4, 16, decode=False, rngs=nnx.Rngs(0), attention_fn=pallas_flash.flax_attention_fn()
    )
    with pytest.raises(NotImplementedError, match="sow_weights"):
        layer(X, sow_weights=True)


def test_decoding_with_a_cache_equals_flax_and_causal_there_is_refused():
    def decode(attention_fn) -> list:
        kwargs = {} if attention_fn is None else {"attention_fn": attention_fn}
        layer = nnx.MultiHeadAttention(4, 16, decode=True, rngs=nnx.Rngs(0), **kwargs)
        layer.init_cache(X.shape)
        return [np.asarray(layer(X[:, i : i + 1])) for i in range(4)]

    for got, want in zip(decode(OURS), decode(None), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    with pytest.raises(ValueError, match=r"1 queries and 12 keys.*leave is_causal out"):
        decode(pallas_flash.flax_attention_fn(is_causal=True))
