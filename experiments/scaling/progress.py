"""How far a sweep is, and an honest time left: read from its folder, so any process can ask."""

import bisect
import heapq
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tqdm import tqdm

from experiments.scaling.runs import Run, Seconds

START_SECONDS = 6.0  # of a worker process: imports and opening the data
COMPILE_ALL = 1.3  # of the time for the training program, for that of evaluation too
PRIOR = 0.02  # of the work: so much weight has the plan's own pace
LINE_SECONDS = 15.0  # between lines when the output is not a terminal


@dataclass(frozen=True)
class Standing:
    """Where a sweep is."""

    points_done: int
    points: int
    work_done: float  # seconds of one worker, as the plan estimated them
    work: float
    flops_done: float
    left: tuple[float, ...]  # work left of each unfinished point, those under way first


def standing(run: Run) -> Standing:
    """Read the folder: finished points count whole, points under way by their steps."""
    done = work = total = flops = 0.0
    finished = 0
    left = []
    group: dict[tuple, float] = defaultdict(float)
    for point in run.plan.points:
        group[point.shape] += point.flops
    for point in run.plan.points:
        share = run.steps_done(point) / point.steps
        cost = run.estimate.get(point.id, Seconds(1.0, 0.0, 0.0))
        over = run.result(point) is not None
        finished += over
        # The program for evaluation is compiled at the end, that for training before its first row.
        compiled = 1.0 if over else (share > 0) / COMPILE_ALL
        gained = cost.training * share + cost.compiling * compiled + cost.evaluation * over
        if not over:
            # Those that nobody has begun stand in the order in which workers take them, about.
            order = (share == 0, -group[point.shape], -point.flops)
            left.append((order, sum(cost) - gained))
        work += sum(cost)
        done += gained
        flops += point.flops * share
        total += point.flops
    queue = tuple(seconds for _, seconds in sorted(left))
    return Standing(finished, len(run.plan.points), done, work, flops, queue)


def clock(seconds: float) -> str:
    """Minutes and seconds.

    >>> clock(125.4)
    '2:05'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def makespan(seconds: Iterable[float], workers: int) -> float:
    """When the last of `workers` is done, if each takes the next piece of work when it is free.

    >>> makespan([5, 1, 1, 4], workers=2)
    6.0
    """
    busy_until = [0.0] * workers
    for piece in seconds:
        heapq.heapreplace(busy_until, busy_until[0] + piece)
    return max(busy_until)


class Forecast:
    """The time left, from what is left by the plan's estimate and how the work compares with it.

        pace = (worker seconds spent + prior) / (seconds of the plan done with them + prior)
        left = pace * makespan(what is left, workers)

    Both sums are over the last half of the time: a machine that was busy at first, or is now, has
    another pace than the mean. A worker spends time only while there is a point for it, so that
    one which is idle at the end does not look slow. Until something is done the pace is 1.
    """

    def __init__(self, workers: int):
        self._workers = workers
        self._start = START_SECONDS if workers > 1 else 0.0
        self._history: list[tuple[float, float, float]] = []  # elapsed, worker seconds, work done

    def left(self, elapsed: float, now: Standing) -> float:
        """Seconds left; to be asked again and again, with `elapsed` from the start of the work."""
        working = max(0.0, elapsed - self._start)
        before, spent, _ = self._history[-1] if self._history else (working, 0.0, 0.0)
        spent += (working - before) * min(self._workers, len(now.left))
        self._history.append((working, spent, now.work_done))
        starting = max(0.0, self._start - elapsed)
        return starting + self._pace(now.work) * makespan(now.left, self._workers)

    def _pace(self, work: float) -> float:
        working, spent, done = self._history[-1]
        if done <= self._history[0][2]:
            return 1.0
        half = bisect.bisect_left(self._history, working / 2, key=lambda row: row[0])
        _, spent_before, done_before = self._history[half]
        prior = PRIOR * work
        # Work is undone when a point goes back to its checkpoint.
        return (spent - spent_before + prior) / (max(0.0, done - done_before) + prior)


class Watcher:
    """A thread that shows progress while the work goes on: a bar on a terminal, else lines."""

    def __init__(self, run: Run, *, workers: int):
        self._run, self._forecast = run, Forecast(workers)
        self._start = standing(run)
        self._begun = time.monotonic()
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> "Watcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        self._thread.join()

    def _text(self, now: Standing) -> str:
        elapsed = time.monotonic() - self._begun
        left = self._forecast.left(elapsed, now)
        rate = (now.flops_done - self._start.flops_done) / elapsed
        return (
            f"{now.points_done}/{now.points} points, {rate:.3g} FLOP/s, "
            f"{clock(elapsed)} gone, about {clock(left)} left"
        )

    def _loop(self) -> None:
        terminal = sys.stderr.isatty()
        style = "training {percentage:3.0f}%|{bar}| {postfix}"
        total = self._start.work
        shown = 0.0
        with tqdm(total=total, bar_format=style, disable=not terminal, file=sys.stderr) as bar:
            while not self._finished.wait(0.5):
                now = standing(self._run)
                bar.n = min(now.work_done, total)
                text = self._text(now)
                bar.set_postfix_str(text)
                if not terminal and time.monotonic() - shown > LINE_SECONDS:
                    percent = 100 * now.work_done / now.work
                    print(f"training {percent:3.0f}%  {text}", file=sys.stderr, flush=True)
                    shown = time.monotonic()
            bar.n = min(standing(self._run).work_done, total)
            bar.refresh()
