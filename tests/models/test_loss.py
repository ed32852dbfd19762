"""next_token_loss against a float64 loop, its masks, weights and gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import next_token_loss

B, T, V = 3, 5, 11
LOSS = jax.jit(next_token_loss)


def _batch(seed: int, scale: float = 3.0):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(B, T, V)) * scale).astype(np.float32)
    return jnp.asarray(logits), jnp.asarray(rng.integers(0, V, (B, T)))


def _naive(logits, targets, weights, z_loss):
    logits, targets, weights = (np.asarray(array) for array in (logits, targets, weights))
    total = z_total = hits = 0.0
    for index in np.ndindex(targets.shape):
        row = np.asarray(logits[index], np.float64)
        lse = math.log(sum(math.exp(value) for value in row))
        weight = float(weights[index])
        total += weight * (lse - row[targets[index]])
        z_total += weight * z_loss * lse**2
        hits += weight * float(row.argmax() == targets[index])
    weight = float(np.sum(weights))
    return total / weight, z_total / weight, hits / weight


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 1e-4, 0.1]), st.sampled_from([0.1, 3.0, 20.0]))
def test_equals_naive_loop(seed: int, z_loss: float, scale: float):
    logits, targets = _batch(seed, scale)
    weights = jnp.asarray(np.random.default_rng(seed).random((B, T)), jnp.float32)
    loss, metrics = LOSS(logits, targets, mask=weights, z_loss=z_loss)
    cross_entropy, z_term, accuracy = _naive(logits, targets, weights, z_loss)
    assert float(loss) == pytest.approx(cross_entropy + z_term, rel=1e-5)
    assert float(metrics["loss"]) == float(loss)
    assert float(metrics["cross_entropy"]) == pytest.approx(cross_entropy, rel=1e-5)
    assert float(metrics["z_loss"]) == pytest.approx(z_term, rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx(accuracy, rel=1e-5)
    assert float(metrics["weight"]) == pytest.approx(float(weights.sum()), rel=1e-6)


def test_no_mask_counts_every_token():
    logits, targets = _batch(0)
    loss, metrics = next_token_loss(logits, targets)
    ones, _ = next_token_loss(logits, targets, mask=jnp.ones((B, T), bool))
    assert float(loss) == float(ones)
    assert float(metrics["weight"]) == B * T
    assert all(value.dtype == jnp.float32 and value.shape == () for value in metrics.values())


def test_gradient_of_z_loss_is_its_formula():
    logits, targets = _batch(1)

    def z_term(x):
        return next_token_loss(x, targets, z_loss=0.01)[1]["z_loss"]

    lse = jax.nn.logsumexp(logits, -1, keepdims=True)
    want = 2 * 0.01 * lse * jax.nn.softmax(logits, -1) / (B * T)
    np.testing.assert_allclose(jax.grad(z_term)(logits), want, rtol=1e-4, atol=1e-8)


def test_gradient_of_cross_entropy_is_softmax_minus_one_hot():
    logits, targets = _batch(2)
    mask = jnp.arange(B * T).reshape(B, T) % 3 > 0
    grad = jax.grad(lambda x: next_token_loss(x, targets, mask=mask)[0])(logits)
    want = (jax.nn.softmax(logits, -1) - jax.nn.one_hot(targets, V)) * mask[..., None] / mask.sum()
    np.testing.assert_allclose(grad, want, atol=1e-6)
    assert not grad[~mask].any(), "a masked token has gradient exactly 0"


def test_masked_positions_cannot_enter():
    logits, targets = _batch(3)
    mask = jnp.ones((B, T), bool).at[1, 2].set(False)
    loss, _ = next_token_loss(logits, targets, mask=mask)
    poisoned, _ = next_token_loss(
        logits.at[1, 2].set(jnp.nan), targets.at[1, 2].set(-100), mask=mask
    )
    assert float(poisoned) == float(loss)


@pytest.mark.parametrize("bad_id", [-1, -100, V])
def test_unmasked_unknown_target_is_nan(bad_id: int):
    logits, targets = _batch(4)
    loss, _ = next_token_loss(logits, targets.at[0, 0].set(bad_id))
    assert math.isnan(loss)


def test_nan_logits_are_not_hidden():
    logits, targets = _batch(4)
    assert math.isnan(next_token_loss(logits.at[0, 0, 0].set(jnp.nan), targets)[0])


def test_nothing_counts_gives_zero_loss_and_gradient():
    logits, targets = _batch(5)
    value, grad = jax.value_and_grad(
        lambda x: next_token_loss(x, targets, mask=jnp.zeros((B, T)), z_loss=0.1)[0]
    )(logits)
    assert float(value) == 0.0
    assert not grad.any()


def test_microbatches_add_up_by_weight():
    """Rows of unequal length: mean of means is wrong, weighted sums are the whole batch."""
    logits, targets = _batch(6)
    mask = jnp.arange(T) < jnp.array([[1], [5], [2]])
    whole, _ = next_token_loss(logits, targets, mask=mask)
    parts = [next_token_loss(logits[i], targets[i], mask=mask[i]) for i in range(B)]
    weighted = sum(float(loss * m["weight"]) for loss, m in parts) / float(mask.sum())
    assert weighted == pytest.approx(float(whole), rel=1e-6)
    assert float(np.mean([loss for loss, _ in parts])) != pytest.approx(float(whole), rel=1e-3)


def test_shift_of_logits_changes_only_the_z_term():
    logits, targets = _batch(7)
    _, before = next_token_loss(logits, targets, z_loss=1e-3)
    _, after = next_token_loss(logits + 5.0, targets, z_loss=1e-3)
    assert float(after["cross_entropy"]) == pytest.approx(float(before["cross_entropy"]), rel=1e-5)
    assert float(after["z_loss"]) > float(before["z_loss"])


def test_low_precision_logits_are_summed_in_float32():
    logits, targets = _batch(8)
    low = logits.astype(jnp.bfloat16)
    loss, _ = next_token_loss(low, targets)
    exact, _ = next_token_loss(low.astype(jnp.float32), targets)
    assert loss.dtype == jnp.float32
    assert float(loss) == float(exact)


def test_bad_arguments_are_named():
    logits, targets = _batch(9)
    with pytest.raises(TypeError, match="targets must be integer"):
        next_token_loss(logits, targets.astype(jnp.float32))
    with pytest.raises(TypeError, match="logits must be floating"):
        next_token_loss(targets, targets[..., 0])
    with pytest.raises(ValueError, match=r"targets must have the shape.*\[3, 5\], got \[3, 4\]"):
        next_token_loss(logits, targets[:, :-1])
    with pytest.raises(ValueError, match="mask must have the shape of targets"):
        next_token_loss(logits, targets, mask=jnp.ones((T,)))
    with pytest.raises(ValueError, match="z_loss must be at least 0"):
        next_token_loss(logits, targets, z_loss=-1.0)
