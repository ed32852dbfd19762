"""The shape of the warm-up, stable, cooldown schedule."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.training.schedule import learning_rate, make_schedule

compiled = jax.jit(jax.vmap(learning_rate, in_axes=(None, 0)))


@st.composite
def schedules(draw):
    total = draw(st.integers(1, 64))
    warmup = draw(st.integers(0, total))
    cooldown = draw(st.integers(0, total - warmup))
    peak = draw(st.floats(1e-5, 1.0))
    return make_schedule(peak=peak, total_steps=total, warmup_steps=warmup, cooldown_steps=cooldown)


@settings(max_examples=100, deadline=None)
@given(schedules())
def test_shape(schedule):
    total, warmup, cooldown = (
        schedule.total_steps,
        schedule.warmup_steps,
        schedule.cooldown_steps,
    )
    rates = np.asarray(compiled(schedule, np.arange(80)))
    assert (rates[:total] > 0).all()  # no step of the run is wasted
    assert (rates[total:] == 0).all()
    assert rates.max() <= schedule.peak * (1 + 1e-6)
    rise, stable, fall = np.split(rates[:total], [warmup, total - cooldown])
    np.testing.assert_allclose(rise, schedule.peak * (np.arange(warmup) + 1) / max(warmup, 1), 1e-5)
    np.testing.assert_allclose(stable, schedule.peak, 1e-6)
    expected = schedule.peak * (1 - np.sqrt(np.arange(cooldown) / max(cooldown, 1)))
    np.testing.assert_allclose(fall, expected, 1e-4, atol=1e-7)


def test_steps_beyond_float32_integers_are_exact():
    """2^24 + 1 has no float32: a schedule on float steps would stand still there."""
    big = 2**24
    schedule = make_schedule(peak=1.0, total_steps=big + 4, warmup_steps=0, cooldown_steps=4)
    rates = [float(learning_rate(schedule, big + i)) for i in range(5)]
    np.testing.assert_allclose(rates, [1, 0.5, 1 - np.sqrt(0.5), 1 - np.sqrt(0.75), 0], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peak": 0.0}, "peak"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"cooldown_steps": -1}, "cooldown_steps"),
        ({"warmup_steps": 6, "cooldown_steps": 5}, "exceed total_steps 10"),
    ],
)
def test_bad_fields_are_named(change, message):
    good = {"peak": 1.0, "total_steps": 10, "warmup_steps": 2, "cooldown_steps": 2}
    with pytest.raises(ValueError, match=message):
        make_schedule(**{**good, **change})
