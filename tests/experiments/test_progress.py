"""The time left that a sweep shows, against the truth of simulated sweeps."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.scaling.progress import START_SECONDS, Forecast, Standing, makespan

TICK = 0.5
# Like the default sweep on two cores: three budgets of five sizes, the large groups first.
CPU_PLAN = [33.0, 12.0, 5.0, 33.0, 12.0, 5.0, 35.0, 14.0, 38.0, 39.0, 12.0, 5.0, 12.0, 5.0, 5.0]


def simulate(
    plan: list[float], workers: int, slowness: Callable[[float, int], float], *, start: float = 3.0
) -> Iterator[tuple[float, Standing]]:
    """Elapsed seconds and standing, every tick, until all is done.

    Args:
      plan: worker seconds of each point by the plan, in the order in which they are taken.
      workers: that many points are worked on at once.
      slowness: (elapsed, point) -> real seconds for a second of the plan.
      start: seconds before workers begin.
    """
    left, elapsed, held = list(plan), 0.0, list(range(min(workers, len(plan))))
    queue = list(range(len(held), len(plan)))
    while True:
        waiting = [left[i] for i in queue]
        now = tuple(left[i] for i in held) + tuple(waiting)
        done = len(plan) - len(now)
        yield elapsed, Standing(done, len(plan), sum(plan) - sum(now), sum(plan), 0.0, now)
        if not now:
            return
        elapsed += TICK
        if elapsed > start:
            for i in list(held):
                left[i] -= TICK / slowness(elapsed, i)
                if left[i] <= 0:
                    held.remove(i)
                    held += [queue.pop(0)] if queue else []


def errors(plan: list[float], workers: int, slowness, **options) -> list[tuple[float, float]]:
    """(share of the wall time gone, error of the time left as a share of the wall time)."""
    forecast = Forecast(workers)
    rows = [
        (elapsed, forecast.left(elapsed, now))
        for elapsed, now in simulate(plan, workers, slowness, **options)
    ]
    wall = rows[-1][0]
    return [(elapsed / wall, (elapsed + left - wall) / wall) for elapsed, left in rows]


def worst(rows: list[tuple[float, float]], begin: float, end: float = 1.0) -> float:
    return max(abs(error) for share, error in rows if begin <= share <= end)


@settings(max_examples=30, deadline=None)
@given(
    plan=st.lists(st.floats(2.0, 60.0), min_size=3, max_size=20).filter(lambda x: sum(x) > 60),
    workers=st.integers(1, 4),
    pace=st.floats(0.5, 4.0),
)
def test_steady_machine(plan, workers, pace):
    rows = errors(plan, workers, lambda *_: pace, start=3.0 if workers > 1 else 0.0)
    assert worst(rows, 0.5) < 0.1
    assert rows[-1][1] == pytest.approx(0, abs=1e-6)


def test_a_sweep_that_goes_as_planned_is_told_right_from_the_start():
    for workers in (1, 2):
        start = START_SECONDS if workers > 1 else 0.0
        rows = errors(CPU_PLAN, workers, lambda *_: 1.0, start=start)
        assert worst(rows, 0.0) < 0.03


@pytest.mark.parametrize("workers", [1, 2])
def test_a_machine_that_was_busy_at_first_does_not_stay_slow(workers):
    """The mean pace of the whole run would be too pessimistic until the end."""
    rows = errors(CPU_PLAN, workers, lambda elapsed, _: 3.0 if elapsed < 60 else 1.0)
    assert worst(rows, 0.7) < 0.05


def test_a_machine_that_becomes_busy_is_noticed():
    rows = errors(CPU_PLAN, 2, lambda elapsed, _: 3.0 if elapsed > 60 else 1.0)
    assert worst(rows, 0.5) < 0.06


def test_an_idle_worker_at_the_end_is_not_counted_on():
    """The last point has one worker whatever their number, and waiting is not slowness."""
    rows = errors([10.0] * 8 + [60.0], 2, lambda *_: 1.5)
    assert worst(rows, 0.4) < 0.06


def test_sizes_that_are_slower_than_planned_cost_little_accuracy():
    rows = errors(CPU_PLAN, 2, lambda _, point: 2.0 if point > 9 else 1.2)
    assert worst(rows, 0.8) < 0.12


@pytest.mark.parametrize("workers", [1, 2])
def test_before_anything_is_done_the_plan_speaks(workers):
    start = START_SECONDS if workers > 1 else 0.0
    now = Standing(0, 3, 0.0, 30.0, 0.0, (10.0, 10.0, 10.0))
    forecast = Forecast(workers)
    for elapsed in (0.5, 2.0, 20.0):
        assert forecast.left(elapsed, now) == max(0, start - elapsed) + makespan(now.left, workers)


def test_work_that_is_undone_gives_no_nonsense():
    """A killed point goes back to its checkpoint."""
    forecast = Forecast(1)
    for elapsed, done in ((0.5, 50.0), (10.0, 60.0), (20.0, 20.0), (30.0, 30.0)):
        left = forecast.left(elapsed, Standing(0, 1, done, 100.0, 0.0, (100.0 - done,)))
        assert 0 < left < 2000
