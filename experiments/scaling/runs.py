"""The folder of a sweep: what was asked, what was planned, what each point came to.

    runs/<name>/config.json               the sweep, its plan, data fingerprint, versions
                events.jsonl              what happened when
                points/<id>/config.json   one point, complete
                            metrics.jsonl one row per chunk of steps
                            state.npz     checkpoint of a point under way
                            result.json   final loss: the point is finished
                            lock          held, by the kernel, while a process trains the point
                fit.json, report.html, *.png

Everything is written whole or not at all, and a lock dies with its process, so after a kill at any
moment the folder says truly what is finished. Any number of workers may share it.
"""

import contextlib
import datetime
import fcntl
import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.data import TokenDataset
from experiments.scaling.fit import Points, make_points
from experiments.scaling.ladder import Plan, Point, SweepConfig
from experiments.training.checkpoint import read_json, write_json

FORMAT = 1
# Fields that may change between two calls on one folder: they do not touch what is trained.
FREE_FIELDS = ("out", "workers", "bootstrap", "delta")


class SweepError(RuntimeError):
    """A sweep cannot go on; the message says what to do."""


class Seconds(NamedTuple):
    """What the plan expects one worker to need for a point."""

    training: float
    compiling: float  # charged to the first point of a shape; 0 when measuring compiled it
    evaluation: float


@dataclass(frozen=True)
class Run:
    """An opened sweep folder."""

    folder: Path
    config: SweepConfig  # as asked
    plan: Plan  # as made: budgets may have been scaled to the machine
    scale: float  # factor on the budgets that were asked for
    dataset: dict  # name, fingerprint, train_tokens, bytes_per_token
    estimate: dict[str, Seconds]  # by point id

    def point_folder(self, point: Point) -> Path:
        return self.folder / "points" / point.id

    def result(self, point: Point) -> dict | None:
        """The finished point's result, or None."""
        path = self.point_folder(point) / "result.json"
        return read_json(path) if path.exists() else None

    def unfinished(self) -> list[Point]:
        return [p for p in self.plan.points if self.result(p) is None]

    def steps_done(self, point: Point) -> int:
        """Optimizer steps that the point's metrics have reached."""
        if self.result(point) is not None:
            return point.steps
        return last_step(self.point_folder(point) / "metrics.jsonl")

    def log_event(self, event: str, **details: object) -> None:
        """Append one row to events.jsonl."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with open(self.folder / "events.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"time": now, "event": event, **details}) + "\n")


def describe_dataset(dataset: TokenDataset) -> dict:
    """What a run folder keeps of its data."""
    return {
        "name": dataset.name,
        "fingerprint": dataset.fingerprint,
        "train_tokens": len(dataset.train),
        "heldout_tokens": len(dataset.heldout),
        "bytes_per_token": dataset.bytes_per_token,
        "vocab_size": dataset.vocab_size,
    }


def create_run(
    config: SweepConfig,
    plan: Plan,
    *,
    dataset: TokenDataset,
    scale: float = 1.0,
    estimate: dict[str, Seconds] | None = None,
) -> Run:
    """Write a new sweep folder.

    Raises:
      SweepError: the folder holds results whose plan is gone.
    """
    if any(Path(config.out).glob("points/*/result.json")):
        raise SweepError(
            f"{config.out} holds finished points but no config.json that says what they are; "
            "choose another --out, or delete the folder"
        )
    described = describe_dataset(dataset)
    run = Run(Path(config.out), config, plan, scale, described, estimate or {})
    for point in plan.points:
        folder = run.point_folder(point)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", point.to_json())
    # The sweep's own file comes last: with it the folder is complete.
    write_json(
        run.folder / "config.json",
        {
            "format": FORMAT,
            "config": asdict(config),
            "scale": scale,
            "notes": plan.notes,
            "points": [p.to_json() for p in plan.points],
            "dataset": run.dataset,
            "estimate": run.estimate,
            "machine": describe_machine(),
        },
    )
    run.log_event("created", points=len(plan.points), flops=plan.flops)
    return run


def describe_machine() -> dict:
    """Where numbers come from: device and versions."""
    device = jax.devices()[0]
    return {
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def open_run(folder: Path) -> Run:
    """Read a sweep folder.

    Raises:
      SweepError: there is none, or another version of the code wrote it.
    """
    path = folder / "config.json"
    if not path.exists():
        raise SweepError(
            f"{folder} holds no sweep; start one: python -m experiments.sweep --out DIR"
        )
    stored = read_json(path)
    if stored.get("format") != FORMAT:
        raise SweepError(
            f"{folder} was written in format {stored.get('format')}, this code reads {FORMAT}; "
            "choose another --out"
        )
    values: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in stored["config"].items()
    }
    points = tuple(Point.from_json(p) for p in stored["points"])
    return Run(
        folder,
        SweepConfig(**values),
        Plan(points, tuple(stored["notes"])),
        stored["scale"],
        stored["dataset"],
        {k: _seconds(*v) for k, v in stored["estimate"].items()},
    )


def _seconds(training: float, *rest: float) -> Seconds:
    """Folders of before 2026-11-30 hold compiling and evaluation as one number."""
    return Seconds(training, *(rest if len(rest) == 2 else (0.0, *rest)))


def check_same_sweep(run: Run, config: SweepConfig) -> None:
    """Refuse to continue a folder with another sweep.

    Raises:
      SweepError: fields that decide what is trained differ; the message lists them.
    """
    old, new = asdict(run.config), asdict(config)
    changed = [k for k in old if k not in FREE_FIELDS and old[k] != new[k]]
    if changed:
        listing = "; ".join(f"{k} is {old[k]} there, {new[k]} now" for k in changed)
        raise SweepError(
            f"{run.folder} holds another sweep: {listing}. Choose another --out, or delete the "
            "folder to start over"
        )


def check_same_data(run: Run, dataset: TokenDataset) -> None:
    """Refuse to mix points trained on different data.

    Raises:
      SweepError: the corpus or its tokenizer changed since the folder was made.
    """
    if run.dataset["fingerprint"] != dataset.fingerprint:
        raise SweepError(
            f"{run.folder} was trained on other tokens ({run.dataset['name']}, fingerprint "
            f"{run.dataset['fingerprint'][:12]}) than the corpus gives now ({dataset.name}, "
            f"{dataset.fingerprint[:12]}). Choose another --out"
        )


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Wait until no other process plans in this folder: two runs started at once share one plan."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[bool]:
    """True inside the block when this process alone holds the point; False when another does.

    An flock belongs to the open file of a process: the kernel drops it when the process ends,
    however it ends, so there are no stale locks to clean up.
    """
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def last_step(path: Path) -> int:
    """`step` of the last whole row of a metrics file; 0 when there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4096))
            lines = file.read().split(b"\n")[:-1]  # what follows the last newline is not whole
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return int(json.loads(line)["step"])
    return 0


def collect_points(run: Run) -> Points:
    """Finished points as columns for the fit; a diverged one has loss NaN, which the fit names."""
    table: dict[str, list] = {
        k: [] for k in ("params", "tokens", "loss", "flops", "budget", "seed")
    }
    rows = []
    for point in run.plan.points:
        result = run.result(point)
        if result is None:
            continue
        loss = float("nan") if result["loss"] is None else result["loss"]
        values = (point.params, point.tokens, loss, point.flops, point.budget, point.seed)
        for column, value in zip(table.values(), values, strict=True):
            column.append(value)
        rows.append(point.id)
    if any(b is None for b in table["budget"]):
        del table["budget"]
    return make_points(table, rows)
