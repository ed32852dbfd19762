"""Extraction: what was memorised is given back, what was not is not; intervals against scipy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.stats import binomtest

from experiments.evaluation.extraction import (
    continue_sequences,
    count_occurrences,
    edit_distances,
)
from experiments.evaluation.intervals import wilson_interval
from models import ModelConfig, apply, init_params, next_token_loss

MODEL = ModelConfig(
    vocab_size=64, num_layers=1, d_model=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn_dim=128,
    max_seq_len=96, compute_dtype="float32", attention_implementation="reference",
)  # fmt: skip


def test_a_memorised_text_is_extracted_and_the_control_is_not():
    known, control = np.random.default_rng(0).integers(1, 64, (2, 4, 66))
    params = init_params(MODEL, jax.random.key(0))
    optimizer = optax.adam(3e-3)
    rows = jnp.asarray(known)

    @jax.jit
    def train(params):
        def step(carry, _):
            params, state = carry

            def loss(p):
                return next_token_loss(apply(MODEL, p, rows[:, :-1]), rows[:, 1:])[0]

            updates, state = optimizer.update(jax.grad(loss)(params), state)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), None, length=300)[0][0]

    params = train(params)
    found = continue_sequences(MODEL, params, known, prompt=16, continuation=50, batch_size=3)
    assert (found.matched == 50).all()
    assert (found.similarity == 1).all()
    assert (found.tokens == known[:, -50:]).all()
    assert found.loss.max() < 0.1
    other = continue_sequences(MODEL, params, control, prompt=16, continuation=50)
    assert (other.matched < 50).all()
    assert (other.similarity < 0.8).all()
    assert other.loss.min() > found.loss.max()
    broken = jax.tree.map(lambda x: x * jnp.nan, params)
    with pytest.raises(ValueError, match="not finite"):
        continue_sequences(MODEL, broken, known, prompt=16, continuation=50)
    with pytest.raises(ValueError, match="max_seq_len"):
        continue_sequences(MODEL, params, np.zeros((1, 99), int), prompt=49, continuation=50)


@pytest.mark.parametrize("total", [1, 7, 25])
@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_wilson_agrees_with_scipy(total, confidence):
    for count in range(total + 1):
        want = binomtest(count, total).proportion_ci(confidence, method="wilson")
        got = wilson_interval(count, total, confidence=confidence)
        np.testing.assert_allclose(got, (want.low, want.high), atol=1e-12)


def test_occurrences_across_pieces(monkeypatch):
    monkeypatch.setattr("experiments.evaluation.extraction.CHUNK", 5)
    rng = np.random.default_rng(1)
    stream = rng.integers(0, 300, 400).astype(np.uint16) % 3 * 257 % 514  # bytes repeat in tokens
    patterns = [stream[i : i + n] for i in range(20) for n in (1, 2, 3)]
    windows = [
        sum((stream[i : i + len(p)] == p).all() for i in range(len(stream) - len(p) + 1))
        for p in patterns
    ]
    assert count_occurrences(stream, patterns).tolist() == windows


def test_edit_distance_bounds():
    a, b = np.random.default_rng(2).integers(0, 4, (2, 30, 9))
    distance = edit_distances(a, b)
    assert (distance == edit_distances(b, a)).all()
    assert (distance <= (a != b).sum(axis=1)).all()
    assert (edit_distances(a, np.roll(a, 1, axis=1)) <= 2).all()
    assert (edit_distances(a, a) == 0).all()
