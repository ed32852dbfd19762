"""What every learning-rate schedule must satisfy, whatever its falling side."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.training.schedule import learning_rate, make_schedule

SHAPES = ("1-sqrt", "linear", "cosine")
# One program a shape: the counts are arguments of it.
rates_of = jax.jit(jax.vmap(learning_rate, in_axes=(None, 0)))


def rates(schedule, steps):
    padded = np.full(128, steps - 1, np.int32)
    padded[:steps] = np.arange(steps)
    return np.asarray(rates_of(schedule, padded))[:steps]


@given(
    shape=st.sampled_from(SHAPES),
    warmup=st.integers(0, 30),
    stable=st.integers(0, 40),
    cooldown=st.integers(1, 50),
    final=st.sampled_from([0.0, 0.1]),
)
def test_trapezoid(shape, warmup, stable, cooldown, final):
    total = warmup + stable + cooldown
    schedule = make_schedule(
        peak=2.0,
        total_steps=total,
        warmup_steps=warmup,
        cooldown_steps=cooldown,
        shape=shape,
        final=final,
    )
    lr = rates(schedule, total)
    assert np.all(np.diff(lr[:warmup]) > 0)
    np.testing.assert_allclose(lr[warmup : warmup + stable], 2.0, rtol=1e-6)
    assert np.all(np.diff(lr[warmup + stable :]) <= 0)
    assert np.all(lr[warmup:] >= 2.0 * final - 1e-6)
    assert lr[warmup + stable] == pytest.approx(2.0)


def test_values_by_hand():
    fall = {
        shape: rates(
            make_schedule(peak=1.0, total_steps=4, warmup_steps=0, cooldown_steps=4, shape=shape),
            4,
        )
        for shape in SHAPES
    }
    np.testing.assert_allclose(fall["linear"], [1, 0.75, 0.5, 0.25], atol=1e-6)
    np.testing.assert_allclose(fall["cosine"], [1, 0.853553, 0.5, 0.146447], atol=1e-6)
    np.testing.assert_allclose(fall["1-sqrt"], [1, 0.5, 0.292893, 0.133975], atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cooldown_may_branch_from_any_longer_stable_run(shape):
    """Before the cooldown starts, the rate is that of the stable run bit for bit."""
    stable = rates(
        make_schedule(peak=0.3, total_steps=100, warmup_steps=7, cooldown_steps=0, shape=shape), 100
    )
    for end in (40, 60, 100):
        branch = rates(
            make_schedule(
                peak=0.3, total_steps=end, warmup_steps=7, cooldown_steps=20, shape=shape
            ),
            end,
        )
        assert np.array_equal(branch[: end - 20], stable[: end - 20])


@pytest.mark.parametrize(("field", "value"), [("shape", "step"), ("final", 1.5)])
def test_bad_fields_are_named(field, value):
    arguments = {"peak": 1.0, "total_steps": 4, "warmup_steps": 1, "cooldown_steps": 1}
    with pytest.raises(ValueError, match=field):
        make_schedule(**(arguments | {field: value}))
