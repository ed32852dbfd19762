"""The chunked loss equals the plain one, values and gradients, and holds no logits."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import ModelConfig, chunked_next_token_loss, decoder_loss, init_params, next_token_loss
from models.chunked_loss import ChunkSizes, loss_and_gradients

D, V = 8, 21
CONFIG = ModelConfig(
    vocab_size=V,
    num_layers=1,
    d_model=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    ffn_dim=16,
    max_seq_len=16,
    z_loss=1e-2,
    compute_dtype="float32",
)


def _problem(seed: int, shape: tuple[int, ...] = (2, 7), *, tied: bool = False):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(*shape, D)) / 2, jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(V, D) if tied else (D, V)), jnp.float32)
    weights = jnp.asarray(rng.random(shape) * (rng.random(shape) < 0.8), jnp.float32)
    return x, kernel, jnp.asarray(rng.integers(0, V, shape)), weights


def _plain(x, kernel, targets, *, tied=False, **options):
    return next_token_loss(x @ (kernel.T if tied else kernel), targets, **options)


@functools.cache
def _gradients(sizes: ChunkSizes | None, tied: bool):
    """Compiled value, metrics and gradients of three times the loss; of the plain one for None."""

    def f(x, kernel, weights, z, targets):
        options = {"mask": weights, "z_loss": z, "tied": tied}
        if sizes is None:
            value, metrics = _plain(x, kernel, targets, **options)
        else:
            value, metrics = chunked_next_token_loss(x, kernel, targets, sizes=sizes, **options)
        return 3 * value, metrics

    return jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2, 3), has_aux=True))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1), (4, 2), (14, 7), (64, 4)])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), z_loss=st.sampled_from([0.0, 0.03]))
def test_equals_plain_loss_and_gradients(sizes, tied, seed, z_loss):
    x, kernel, targets, weights = _problem(seed, tied=tied)
    arguments = (x, kernel, weights, jnp.float32(z_loss), targets)
    got = _gradients(ChunkSizes(*sizes), tied)(*arguments)
    want = _gradients(None, tied)(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


def test_gradients_of_bfloat16_are_near_those_of_float32():
    x, kernel, targets, _ = _problem(0, (96,))
    low = jnp.bfloat16
    loss, dx, dw = loss_and_gradients(
        x.astype(low), kernel.astype(low), targets, jnp.ones(96), sizes=ChunkSizes(4, 4)
    )
    assert (loss.dtype, dx.dtype, dw.dtype) == (jnp.float32, low, jnp.float32)
    exact = jax.grad(lambda x, w: 96 * _plain(x, w, targets)[0], (0, 1))(
        x.astype(low).astype(jnp.float32), kernel.astype(low).astype(jnp.float32)
    )
    for got, want in zip((dx, dw), exact, strict=True):
        error = jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want)
        assert error < 5e-3, "one rounding of the logits' gradient, however many chunks"


def test_ignored_positions_may_hold_anything():
    x, kernel, targets, _ = _problem(1)
    mask = jnp.ones(targets.shape, bool).at[0, 3].set(False).at[1, 6].set(False)
    loss, grads = jax.value_and_grad(
        lambda x, w: chunked_next_token_loss(x, w, targets, mask=mask)[0], (0, 1)
    )(x, kernel)
    dirty, marked = x.at[0, 3].set(jnp.nan), targets.at[1, 6].set(-100).at[0, 3].set(-100)
    got, dirty_grads = jax.value_and_grad(
        lambda x, w: chunked_next_token_loss(x, w, marked, ignore_index=-100)[0], (0, 1)
    )(dirty, kernel)
    assert float(got) == float(loss)
    assert all(bool((a == b).all()) for a, b in zip(grads, dirty_grads, strict=True))
    assert not grads[0][0, 3].any()


def test_nothing_hides():
    x, kernel, targets, _ = _problem(2)
    assert jnp.isnan(chunked_next_token_loss(x, kernel, targets.at[0, 0].set(V))[0])
    assert jnp.isnan(chunked_next_token_loss(x.at[1, 1, 0].set(jnp.nan), kernel, targets)[0])


def test_nothing_counts_gives_zero_loss_and_gradient():
    x, kernel, targets, _ = _problem(3)
    value, grads = jax.value_and_grad(
        lambda x, w: chunked_next_token_loss(
            x, w, targets, mask=jnp.zeros(targets.shape), z_loss=0.1
        )[0],
        (0, 1),
    )(x, kernel)
    assert float(value) == 0.0
    assert not any(g.any() for g in grads)


def test_memory_is_that_of_one_chunk():
    """Beyond the gradients: at most 5% of the logits at 64 chunks, where the plain loss has all."""
    tokens, d, v = 2048, 32, 4096
    abstract = jax.ShapeDtypeStruct
    x, kernel = abstract((tokens, d), jnp.float32), abstract((d, v), jnp.float32)
    targets = abstract((tokens,), jnp.int32)
    logits = tokens * v * 4

    def temporaries(loss) -> int:
        f = jax.grad(lambda x, w, t: loss(x, w, t)[0], (0, 1))
        found: Any = jax.jit(f).lower(x, kernel, targets).compile().memory_analysis()
        return found.temp_size_in_bytes

    def chunked(x, w, t):
        return chunked_next_token_loss(x, w, t, sizes=ChunkSizes(32, 16))

    # The sums of dW and dx are temporaries of a CPU program before they are scaled.
    gradients = (tokens * d + d * v) * 4
    assert temporaries(_plain) > logits
    assert temporaries(chunked) - gradients < 0.05 * logits


@pytest.mark.parametrize("tied", [False, True])
def test_decoder_loss_by_config(tied: bool):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    params = init_params(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 13), 0, V)

    def both(loss_chunk):
        chosen = dataclasses.replace(config, loss_chunk=loss_chunk)
        f = jax.value_and_grad(
            lambda p: decoder_loss(chosen, p, tokens[:, :-1], tokens[:, 1:]), has_aux=True
        )
        return jax.jit(f)(params)

    (plain, grads), (chunked, chunked_grads) = both(0), both(5)
    np.testing.assert_allclose(chunked[0], plain[0], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), chunked_grads, grads
    )
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), both(None), both(0)))


def test_default_chunks_large_vocabularies_alone():
    config = dataclasses.replace(CONFIG, vocab_size=2**20, tie_embeddings=True)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))

    def is_plain(rows: int) -> bool:
        tokens = jax.ShapeDtypeStruct((rows, 16), jnp.int32)
        f = jax.grad(lambda p, t: decoder_loss(config, p, t, t)[0])
        text = jax.jit(f).lower(shapes, tokens).as_text()
        return f"tensor<{rows}x16x{config.vocab_size}xf32>" in text

    assert is_plain(16)
    assert not is_plain(17)


def test_wrong_arguments_are_named():
    x, kernel, targets, _ = _problem(4)
    with pytest.raises(ValueError, match=r"kernel must have shape \(V, D\) with D = 8"):
        chunked_next_token_loss(x, kernel, targets, tied=True)
    with pytest.raises(ValueError, match="targets must have the shape of x"):
        chunked_next_token_loss(x, kernel, targets[0])
    with pytest.raises(TypeError, match="targets must be integer"):
        chunked_next_token_loss(x, kernel, targets.astype(jnp.float32))
    with pytest.raises(ValueError, match="z_loss must be at least 0"):
        chunked_next_token_loss(x, kernel, targets, z_loss=-1.0)
    with pytest.raises(ValueError, match="tile=3 must divide chunk=4"):
        ChunkSizes(4, 3)
    with pytest.raises(ValueError, match="loss_chunk must be at least 1"):
        dataclasses.replace(CONFIG, loss_chunk=-1)
