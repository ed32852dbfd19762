"""The host controller, driven by made-up metrics: no device, no model."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.training.spikes import (
    Abort,
    Checkpoint,
    Detector,
    History,
    LevelShift,
    Rollback,
    RollbackConfig,
    Row,
    decide,
    observe,
)

CONFIG = RollbackConfig(linger_steps=20)
EVERY = 50  # steps between checkpoints of the simulated run


def simulate(loss_at, *, config=CONFIG, steps=1000, refuse=lambda loss: not math.isfinite(loss)):
    """A run without parameters: the loss is a function of (step, data index)."""
    history, detector = History(), Detector()
    step = index = 0
    saved = {0: (0, detector)}
    decisions, visited = [], []
    while step < steps:
        index = history.next_index(index)
        if history.resets_at(index):
            detector = Detector()
        loss = loss_at(step, index)
        accepted = not refuse(loss) or any(s.reset_at <= index for s in history.shifts)
        row = Row(step, index, loss if math.isfinite(loss) else None, accepted)
        visited.append(index)
        detector, spike = observe(detector, row, config)
        step, index = step + accepted, index + 1
        if spike and not history.awaits_reset(spike):
            checkpoints = [Checkpoint(s, i) for s, (i, _) in saved.items()]
            decision = decide(spike, history, checkpoints, config)
            decisions.append(decision)
            if isinstance(decision, Abort):
                break
            if isinstance(decision, LevelShift):
                history = history.and_then(decision)
                continue
            history = history.and_then(decision)
            step = decision.restored_step
            saved = {s: v for s, v in saved.items() if s <= step}
            index, detector = saved[step]
        elif accepted and step % EVERY == 0:
            saved[step] = (index, detector)
    return decisions, visited, step


def curve(step, index):
    return 3 + 5 / math.sqrt(step + 10) + 0.02 * random.Random(index).gauss(0, 1)


def poisoned(bad, value):
    return lambda step, index: value if index in bad else curve(step, index)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_batch_is_the_guards_business(value):
    decisions, visited, step = simulate(poisoned({400}, value))
    assert decisions == []
    assert step == 1000
    assert len(visited) == 1001


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_burst_rolls_back_and_skips(value):
    decisions, visited, step = simulate(poisoned(range(420, 430), value))
    (rollback,) = decisions
    assert isinstance(rollback, Rollback)
    assert (rollback.spike.kind, rollback.spike.start_index) == ("non-finite", 420)
    assert rollback.spike.data_index == 422  # the third one decides
    assert rollback.restored_step == 300  # the newest at least 100 steps before
    assert rollback.skip == (300, 620)
    assert (rollback.attempt, rollback.lr_factor, step) == (1, 1.0, 1000)
    # after the decision, training goes on behind the window
    assert visited[visited.index(422) + 1] == 620


def test_a_refused_burst_of_finite_losses_rolls_back():
    def loss(step, index):
        return curve(step, index) + (4 * math.exp(-(index - 500) / 5) if 500 <= index < 540 else 0)

    decisions, _, step = simulate(loss, refuse=lambda x: x > 4.7)
    (rollback,) = decisions
    assert (rollback.spike.kind, rollback.spike.start_index) == ("refused", 500)
    assert rollback.restored_step == 400
    assert step == 1000


def test_a_loss_that_climbs_slowly_rolls_back():
    """Each step is within the guard's threshold; the smoothed loss gives it away."""

    def loss(step, index):
        return curve(step, index) + (max(0, index - 500) * 0.02 if index < 700 else 0)

    decisions, _, step = simulate(loss, refuse=lambda _: False)
    rollback = decisions[0]
    assert rollback.spike.kind == "lingering"
    assert 500 <= rollback.spike.start_index < rollback.spike.data_index < 550
    assert rollback.restored_step == 400
    assert step == 1000


def test_two_spikes_far_apart_are_two_first_attempts():
    decisions, _, step = simulate(
        poisoned({*range(300, 310), *range(900, 910)}, math.nan), steps=1500
    )
    assert [d.attempt for d in decisions] == [1, 1]
    assert [d.skip[0] for d in decisions] == [200, 800]
    assert step == 1500


def test_two_spikes_in_a_row_double_the_skip():
    decisions, _, step = simulate(poisoned({*range(400, 410), *range(640, 650)}, math.nan))
    first, second = decisions
    assert (first.skip[1], first.attempt) == (600, 1)
    assert (second.skip[1], second.attempt) == (640 + 400, 2)
    assert second.restored_step <= first.restored_step
    assert step == 1000


def test_escalation_ends_in_lower_learning_rate_and_then_abort():
    # A state that always breaks at step 450, whatever the data
    decisions, *_ = simulate(lambda step, i: math.nan if step >= 450 else curve(step, i))
    assert [type(d).__name__ for d in decisions] == ["Rollback"] * 3 + ["Abort"]
    assert [d.attempt for d in decisions[:3]] == [1, 2, 3]
    assert [d.lr_factor for d in decisions[:3]] == [1.0, 1.0, 0.5]
    history = History(tuple(decisions[:3]))
    start = decisions[2].restored_step
    assert history.lr_factor(start) == history.lr_factor(start + 999) == 0.5
    assert history.lr_factor(start - 1) == history.lr_factor(start + 1000) == 1.0
    assert "place" in decisions[3].reason


def test_a_budget_of_rollbacks_bounds_the_trouble():
    bad = {i for start in range(300, 6000, 700) for i in range(start, start + 5)}
    decisions, *_ = simulate(poisoned(bad, math.nan), steps=4000)
    assert [type(d).__name__ for d in decisions] == ["Rollback"] * 3 + ["Abort"]
    assert "budget" in decisions[-1].reason


def test_a_spike_in_warm_up_goes_back_to_the_start():
    decisions, visited, step = simulate(poisoned(range(30, 36), math.nan))
    (rollback,) = decisions
    assert rollback.restored_step == 0
    assert rollback.skip == (0, 230)
    assert visited[visited.index(32) + 1] == 230
    assert step == 1000


def test_a_level_shift_costs_one_rollback_and_is_then_accepted():
    """From batch 600 on the data is another: no state and no skip will change its loss."""

    def loss(step, index):
        return curve(step, index) + (1.7 if index >= 600 else 0)

    decisions, _, step = simulate(loss, refuse=lambda x: x > 4.7, steps=1200)
    assert [type(d).__name__ for d in decisions] == ["Rollback", "LevelShift"]
    assert step == 1200
    decisions, _, step = simulate(loss, refuse=lambda _: False, steps=1200)  # by the smoothed loss
    assert [type(d).__name__ for d in decisions] == ["Rollback", "LevelShift"]
    assert step == 1200


def test_no_checkpoint_is_an_abort():
    detector, spike = Detector(), None
    for i in range(3):
        detector, spike = observe(detector, Row(i, i, None, False), CONFIG)
    assert spike is not None
    assert isinstance(decide(spike, History(), [], CONFIG), Abort)


@given(
    losses=st.lists(st.one_of(st.none(), st.floats(1, 10)), min_size=1, max_size=60),
    cut=st.integers(0, 60),
)
def test_a_detector_survives_json_at_any_point(losses, cut):
    """Killed and resumed, the detector says the same."""
    config = RollbackConfig(linger_steps=5, recent=6, refused=3, nonfinite=2)
    straight, resumed = Detector(), Detector()
    for i, loss in enumerate(losses):
        row = Row(i, i, loss, loss is not None and loss < 6)
        if i == cut:
            resumed = Detector.from_json(json.loads(json.dumps(resumed.to_json())))
        straight, a = observe(straight, row, config)
        resumed, b = observe(resumed, row, config)
        assert a == b
    assert straight == resumed


@pytest.mark.parametrize(
    ("field", "value"),
    [("refused", 0), ("recent", 2), ("margin", -1), ("lr_factor", 0.0), ("linger_nats", 0.0)],
)
def test_config_names_the_field(field, value):
    with pytest.raises(ValueError, match=field):
        RollbackConfig(**{field: value})
