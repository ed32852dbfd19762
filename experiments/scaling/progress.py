"""How far a sweep is, and an honest time left: read from its folder, so any process can ask."""

import sys
import threading
import time
from dataclasses import dataclass

from tqdm import tqdm

from experiments.scaling.runs import Run, Seconds

START_SECONDS = 6.0  # of a worker process: imports and opening the data
LINE_SECONDS = 15.0  # between lines when the output is not a terminal


@dataclass(frozen=True)
class Standing:
    """Where a sweep is."""

    points_done: int
    points: int
    work_done: float  # seconds of one worker, as the plan estimated them
    work: float
    flops_done: float


def standing(run: Run) -> Standing:
    """Read the folder: finished points count whole, points under way by their steps."""
    done = work = total = flops = 0.0
    finished = 0
    for point in run.plan.points:
        share = run.steps_done(point) / point.steps
        cost = run.estimate.get(point.id, Seconds(1.0, 0.0, 0.0))
        over = run.result(point) is not None
        finished += over
        work += sum(cost)
        done += cost.training * share + cost.compiling * (share > 0) + cost.evaluation * over
        flops += point.flops * share
        total += point.flops
    return Standing(finished, len(run.plan.points), done, work, flops)


def clock(seconds: float) -> str:
    """Minutes and seconds.

    >>> clock(125.4)
    '2:05'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Watcher:
    """A thread that shows progress while the work goes on: a bar on a terminal, else lines.

    The time left weighs points by the seconds that the plan estimated for them, and corrects the
    estimate by how the work so far compares with it.
    """

    def __init__(self, run: Run, *, workers: int):
        self._run, self._workers = run, workers
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
        gained = now.work_done - self._start.work_done
        left = (now.work - now.work_done) / self._workers
        if gained > 0.03 * now.work:
            left *= min(4.0, max(0.25, elapsed * self._workers / gained))
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
                bar.set_postfix_str(self._text(now))
                if not terminal and time.monotonic() - shown > LINE_SECONDS:
                    percent = 100 * now.work_done / now.work
                    print(
                        f"training {percent:3.0f}%  {self._text(now)}", file=sys.stderr, flush=True
                    )
                    shown = time.monotonic()
            bar.n = min(standing(self._run).work_done, total)
            bar.refresh()
