"""The folder of a training run.

    runs/<name>/config.json     what was asked, its digest, data fingerprint, versions
                events.jsonl    what happened when; rollbacks in it are binding
                metrics.jsonl   one row per step
                checkpoints/    see run_checkpoints.py
                lock            held, by the kernel, while a process trains

`events.jsonl` is the one record of decisions: a line is written and synced before anything else is
done about it, so a process that is killed in between finds it and does the rest.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from experiments.training.checkpoint import read_json, write_atomic, write_json
from experiments.training.config import TrainConfig, differences
from experiments.training.spikes import History, LevelShift, Rollback, Spike

FORMAT = 1


class RunError(RuntimeError):
    """A run cannot start or go on; the message says what to do."""


def versions() -> dict[str, str]:
    """What the numbers of a run depend on beside its config."""
    from importlib.metadata import version

    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def commit() -> str | None:
    """The commit of the checkout, with a plus when files differ from it; None outside of one."""
    root = Path(__file__).resolve().parents[2]
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
            cwd=root, capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def open_folder(config: TrainConfig, *, fingerprint: str) -> Path:
    """The folder of a run, made now or found as it was left.

    Raises:
      RunError: it holds another run; the message names the fields that differ.
    """
    folder, now = Path(config.out), config.fixed() | {"fingerprint": fingerprint}
    path = folder / "config.json"
    if path.exists():
        before = read_json(path)
        then = before["fixed"] | {"fingerprint": before["fingerprint"]}
        changed = differences(json.loads(json.dumps(then)), json.loads(json.dumps(now)))
        if changed:
            raise RunError(
                f"{folder} holds a run with other settings ({', '.join(changed)}): choose another "
                "out, or give that run's settings to continue it. A new schedule for an old run "
                "is --branch-from"
            )
        return folder
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        value = {
            "format": FORMAT,
            "digest": config.digest(),
            "fingerprint": fingerprint,
            "fixed": config.fixed(),
            "asked": json.loads(json.dumps(dataclasses.asdict(config))),
            "versions": versions(),
            "commit": commit(),
        }
        write_json(path, value)
    return folder


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock.

    Raises:
      RunError: another process trains there.
    """
    name = "lock" if jax.process_index() == 0 else f"lock-{jax.process_index()}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / name, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another process trains in {folder}; wait for it or stop it") from None
        yield


# ---- events ----------------------------------------------------------------------------------


class Events:
    """`events.jsonl` of a run, opened for reading and appending."""

    def __init__(self, folder: Path):
        self.path = folder / "events.jsonl"
        if self.path.exists() and jax.process_index() == 0:
            whole = self.path.read_bytes()
            if whole and not whole.endswith(b"\n"):  # a line that a kill cut off never happened
                write_atomic(self.path, whole[: whole.rfind(b"\n") + 1])

    def read(self) -> list[dict[str, Any]]:
        """All events, oldest first."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")
        return [json.loads(line) for line in lines[:-1]]  # the last is empty, or cut off

    def append(self, kind: str, **fields: Any) -> None:
        """Add an event; on disk when this returns. Only the first process writes."""
        if jax.process_index():
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        line = json.dumps({"time": now, "kind": kind, **fields}, allow_nan=False) + "\n"
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def history(self, skips: tuple[tuple[int, int], ...]) -> History:
        """The decisions on record, with the windows of the config."""
        rollbacks, shifts = [], []
        for event in self.read():
            if event["kind"] == "rollback":
                value = event["decision"]
                spike, skip = Spike(**value["spike"]), tuple(value["skip"])
                rollbacks.append(Rollback(**(value | {"spike": spike, "skip": skip})))
            elif event["kind"] == "level_shift":
                value = event["decision"]
                shifts.append(LevelShift(Spike(**value["spike"]), value["reset_at"]))
        return History(tuple(rollbacks), tuple(shifts), tuple((a, b) for a, b in skips))
