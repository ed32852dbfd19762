"""The checkpoints of a training run: asynchronous, atomic, verified, thinned out.

    checkpoints/00000400/          written by Orbax beside its name and renamed
                         seal.json counters of the host, and SHA-256 of every file: written last

A checkpoint without a valid seal was cut off, one whose files differ from it is damaged; both are
named and passed over for the one before. Sealing and thinning run in the thread that waits for
Orbax, so training pays for the copy off the device alone.
"""

import hashlib
import json
import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from experiments.training.checkpoint import write_json
from experiments.training.state import TrainState

log = logging.getLogger(__name__)
SEAL = "seal.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which and what is left."""


@dataclass(frozen=True)
class RetentionConfig:
    """How often to save and what to keep."""

    every: int = 500  # steps between checkpoints
    latest: int = 2  # newest checkpoints that are kept
    margin: int = 100  # and one at least this many steps older than the newest, to roll back to
    keep_every: int = 0  # and every multiple of this step, to branch from; 0 for none

    def __post_init__(self) -> None:
        if self.every < 1 or self.latest < 1:
            raise ValueError(
                f"every and latest must be at least 1, got {self.every} and {self.latest}"
            )
        if self.margin < 0 or self.keep_every < 0:
            raise ValueError(
                f"margin and keep_every must be 0 or more, got {self.margin} and {self.keep_every}"
            )


def kept(steps: Sequence[int], config: RetentionConfig) -> set[int]:
    """Which of the checkpoints at `steps` stay.

    Beside the newest, a chain of anchors half a margin apart: its newest link that is a margin
    old serves rollbacks, and the younger ones grow into that place.

    >>> sorted(kept(range(0, 1001, 50), RetentionConfig(latest=2, margin=100)))
    [900, 950, 1000]
    """
    ordered = sorted(steps)
    stay = set(ordered[-config.latest :])
    if config.keep_every:
        stay |= {s for s in ordered if s and s % config.keep_every == 0}
    anchors: list[int] = []
    for s in ordered:
        if not anchors or s - anchors[-1] >= config.margin / 2:
            anchors.append(s)
    old = [s for s in anchors if ordered and s <= ordered[-1] - config.margin]
    stay |= {s for s in anchors if s >= max(old, default=0)}
    return stay


@dataclass(frozen=True)
class Saved:
    """A sealed checkpoint: where it is and what the host knew when it was made."""

    path: Path
    record: dict[str, Any]

    @property
    def step(self) -> int:
        return self.record["step"]

    @property
    def data_index(self) -> int:
        return self.record["data_index"]


class Checkpoints:
    """The checkpoint folder of one run; a context manager that waits for the last save.

    Args:
      folder: made when missing.
      config: when to save, what to keep.
    """

    def __init__(self, folder: Path, config: RetentionConfig):
        self.folder, self.config = folder, config
        self.folder.mkdir(parents=True, exist_ok=True)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._problems: dict[str, str] = {}

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.wait()
        elif self._thread:
            self._thread.join()

    # ---- writing -----------------------------------------------------------------------------

    def save(self, state: TrainState, record: dict[str, Any]) -> None:
        """Start saving; returns when the device's buffers are copied and may be donated.

        Args:
          state: what the step works on.
          record: JSON values of the host; `step` and `data_index` among them.

        Raises:
          CheckpointError: the save before this one failed.
        """
        from orbax.checkpoint.experimental import v1 as ocp  # imports slowly

        self.wait()
        path = self.folder / f"{record['step']:08d}"
        if jax.process_index() == 0:
            shutil.rmtree(path, ignore_errors=True)  # cut off: a whole one is never saved again
        try:
            response = ocp.save_checkpointables_async(str(path.absolute()), {"state": state})
        except Exception as error:  # Orbax and TensorStore have no common base class
            self._fail(path, error)
            self.wait()
            raise

        def finish() -> None:
            try:
                response.result()
                if jax.process_index() == 0:
                    seal(path, record)
                    self._thin_out()
            except Exception as error:
                self._fail(path, error)

        self._thread = threading.Thread(target=finish, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the save under way is on disk.

        Raises:
          CheckpointError: it failed; checkpoints before it are intact.
        """
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._error:
            error, self._error = self._error, None
            raise error
        _barrier("checkpoint sealed")

    def _fail(self, path: Path, error: BaseException) -> None:
        shutil.rmtree(path, ignore_errors=True)
        for leftover in self.folder.glob(f"{path.name}.orbax-checkpoint-tmp*"):
            shutil.rmtree(leftover, ignore_errors=True)
        last = self.saved()
        good = f"the last good one is {last[-1].path}" if last else "there is none before it"
        self._error = CheckpointError(
            f"checkpoint {path} could not be written ({_one_line(error)}); {good}. Make room (or "
            "raise checkpoint.every) and give the same command again"
        )
        self._error.__cause__ = error

    def _thin_out(self) -> None:
        saved = {s.step: s.path for s in self.saved()}
        for step in set(saved) - kept(list(saved), self.config):
            _remove(saved[step])

    # ---- reading -----------------------------------------------------------------------------

    def saved(self) -> list[Saved]:
        """Sealed checkpoints by step. Files are not yet verified."""
        found = []
        for path in sorted(self.folder.iterdir()):
            if not path.is_dir() or not path.name.isdigit():
                continue
            try:
                found.append(Saved(path, read_seal(path)["record"]))
            except CheckpointError as error:
                self._note(path, error)
        return found

    def load_newest(
        self, abstract: TrainState, *, usable: Callable[[Saved], bool] = lambda _: True
    ) -> tuple[TrainState, Saved] | None:
        """The newest usable checkpoint that is whole; None when there is none.

        Args:
          abstract: shapes, dtypes and shardings to restore to; any number of devices.
          usable: which checkpoints to consider.
        """
        for saved in reversed(self.saved()):
            if not usable(saved):
                continue
            try:
                return load(saved.path, abstract), saved
            except CheckpointError as error:
                self._note(saved.path, error)
        return None

    def discard(self, unwanted: Callable[[Saved], bool]) -> None:
        """Remove checkpoints that must not be resumed from, and whatever was cut off."""
        self.wait()
        if jax.process_index() == 0:
            whole = {s.path for s in self.saved() if not unwanted(s)}
            for path in self.folder.iterdir():
                if path not in whole and path.is_dir():
                    _remove(path)
        _barrier("checkpoints discarded")

    def problems(self) -> list[str]:
        """What was passed over since the last call, for the log of events."""
        found, self._problems = list(self._problems.values()), {}
        return found

    def _note(self, path: Path, error: CheckpointError) -> None:
        if path.name not in self._problems:
            self._problems[path.name] = str(error)
            log.warning("%s", error)


def load(path: Path, abstract: Any) -> Any:
    """Verify a checkpoint and restore its state.

    Raises:
      CheckpointError: it is cut off, damaged, or of another model; the message names the file.
    """
    from orbax.checkpoint.experimental import v1 as ocp

    verify(path)
    try:
        restored = ocp.load_checkpointables(str(path.absolute()), {"state": abstract})
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {path} does not fit this run's state: {_one_line(error)}"
        ) from error
    return restored["state"]


# ---- the seal --------------------------------------------------------------------------------


def seal(path: Path, record: dict[str, Any]) -> None:
    """Write what makes a checkpoint whole: the record and the digest of every file."""
    files = {
        str(file.relative_to(path)): _digest(file)
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
    body = {"record": record, "files": files}
    write_json(path / SEAL, body | {"sha256": _digest_of(body)})


def read_seal(path: Path) -> dict[str, Any]:
    """The seal of a checkpoint.

    Raises:
      CheckpointError: there is none (the save was cut off), or it is damaged.
    """
    try:
        value = json.loads((path / SEAL).read_bytes())
        digest = value.pop("sha256")
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path} is incomplete: its save was cut off") from None
    except (ValueError, KeyError, AttributeError):
        raise CheckpointError(f"checkpoint {path} is damaged: {SEAL} is not readable") from None
    if digest != _digest_of(value):
        raise CheckpointError(f"checkpoint {path} is damaged: {SEAL} was changed")
    return value


def verify(path: Path) -> dict[str, Any]:
    """Compare every file with the seal; returns the record.

    Raises:
      CheckpointError: a file is missing or differs; the message names it.
    """
    value = read_seal(path)
    for name, digest in value["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing")
        if _digest(file) != digest:
            raise CheckpointError(f"checkpoint {path} is damaged: {name} differs from its seal")
    return value["record"]


def _digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest_of(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _remove(path: Path) -> None:
    """Unseal first: a removal that is cut off leaves nothing that looks whole."""
    (path / SEAL).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _barrier(name: str) -> None:
    """Wait for the other processes: what the first one did to the folder, all of them see."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
