"""Runs one stage over its units in parallel, so that it continues after a kill at any point.

A *unit* is a group of input files or one shard. Its output is one or more shards and a JSON
record that is renamed into place last: a unit is done when its record is there. A stage is
done when ``stage.json`` is there. ``plan.json`` holds the fingerprint of everything that the
bytes depend on (settings, version of the code, input); when it differs, the stage starts anew,
so a folder never mixes two configurations. The number of workers is no part of it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import json
import logging
import multiprocessing
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tqdm import tqdm

from experiments.data.documents import CorpusError, write_json, write_shard
from experiments.data.pipeline.records import Record, Tally, digest_of

logger = logging.getLogger(__name__)

POOL_RETRIES = 3  # a worker that dies this often dies for a reason
ZSTD_LEVEL = 3


class BuildError(CorpusError):
    """The build stopped; the message says what to do before the same command continues it."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of records. ``path`` is relative to the build's folder."""

    path: str
    source: str
    documents: int
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Unit:
    """A piece of work. ``key`` names its files and gives the order; ``payload`` is the input."""

    key: str
    payload: Any


class Stage(Protocol):
    """What a stage is: a picklable object that makes records out of a unit.

    ``settings`` is all that its output depends on besides the input; ``version`` is raised
    when the code changes its output.
    """

    name: ClassVar[str]
    version: ClassVar[int]

    @property
    def settings(self) -> Any: ...

    def records(self, unit: Unit, root: Path, folder: Path, tally: Tally) -> Iterator[Record]:
        """The output of one unit, grouped by source; ``folder`` is the stage's own."""
        ...


@dataclasses.dataclass(frozen=True)
class StageResult:
    """What a stage made, in the order of its units.

    ``seconds`` is wall time of this run; ``peak_memory_mb`` that of the largest process that
    worked on a unit, at the end of it.
    """

    name: str
    folder: Path
    shards: tuple[Shard, ...]
    tally: Tally
    fingerprint: str
    seconds: float
    cpu_seconds: float
    peak_memory_mb: int
    cached: bool

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)


def fingerprint_of(name: str, version: int, settings: Any, inputs: Any) -> str:
    """Names the bytes that a stage will write."""
    return digest_of({"name": name, "version": version, "settings": settings, "inputs": inputs})


def open_folder(folder: Path, fingerprint: str) -> bool:
    """Makes a stage's folder ready; True when the stage is done. Other content is removed."""
    plan = read_json(folder / "plan.json")
    if plan is not None and plan.get("fingerprint") == fingerprint:
        for half in folder.glob("*.tmp"):
            half.unlink()
        return (folder / "stage.json").is_file()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "plan.json", {"fingerprint": fingerprint})
    return False


def read_json(path: Path) -> Any:
    """The JSON value of a file, or None when it is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def run_stage(
    stage: Stage,
    units: Sequence[Unit],
    *,
    root: Path,
    folder: str,
    inputs: Any,
    pool: WorkerPool | None = None,
    shard_bytes: int = 16_000_000,
    prepare: Callable[[Path], object] | None = None,
) -> StageResult:
    """Runs what is not done yet of a stage and returns all of its output.

    Args:
      stage: makes the records.
      units: in the order of the output.
      root: the build's folder; ``folder`` is the stage's own, below it.
      inputs: JSON value that changes with the input, such as the checksums of shards.
      pool: of processes; None runs in this one.
      shard_bytes: text per output shard.
      prepare: called with the stage's folder before the units of an unfinished stage; writes
        what they all need (a model, decisions) and does nothing when it is there already.

    Raises:
      BuildError: the disk is full, or workers keep dying.
    """
    start = time.monotonic()
    fingerprint = fingerprint_of(stage.name, stage.version, stage.settings, inputs)
    place = root / folder
    with clean_stop(place):
        cached = open_folder(place, fingerprint)
        preparing = time.process_time()  # of all threads
        if prepare is not None and not cached:
            prepare(place)
        preparing = time.process_time() - preparing
        left = [unit for unit in units if not _is_done(root, place / f"{unit.key}.json")]
        cached = cached and not left
        if left:
            task = _Task(stage, root, folder, shard_bytes)
            (pool or WorkerPool()).run(task, left, label=stage.name)
        result = _collect(stage.name, place, units, fingerprint)
        if cached:
            preparing = read_json(place / "stage.json").get("prepare_cpu_seconds", 0.0)
        else:
            value = {"prepare_cpu_seconds": round(preparing, 3), "tally": result.tally.to_json()}
            write_json(place / "stage.json", value)
    return dataclasses.replace(
        result,
        seconds=time.monotonic() - start,
        cpu_seconds=result.cpu_seconds + preparing,
        cached=cached,
    )


def _collect(name: str, place: Path, units: Sequence[Unit], fingerprint: str) -> StageResult:
    """Adds up the records of a stage's units, in their order."""
    records = [json.loads((place / f"{unit.key}.json").read_text("utf-8")) for unit in units]
    tally = Tally()
    for record in records:
        tally.merge(Tally.from_json(record["tally"]))
    return StageResult(
        name=name,
        folder=place,
        shards=tuple(Shard(**row) for record in records for row in record["shards"]),
        tally=tally,
        fingerprint=fingerprint,
        seconds=0.0,
        cpu_seconds=sum(record["cpu_seconds"] for record in records),
        peak_memory_mb=max((record["peak_memory_mb"] for record in records), default=0),
        cached=False,
    )


def _is_done(root: Path, path: Path) -> bool:
    """A unit has a record, and all its shards are there (a damaged one may be deleted)."""
    record = read_json(path)
    return record is not None and all((root / row["path"]).is_file() for row in record["shards"])


class clean_stop:
    """Turns a full disk into one clear message."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BuildError(
                f"{self._place}: no space left on the disk. What is finished is kept: free some "
                "space and run the same command to continue"
            ) from error


@dataclasses.dataclass(frozen=True)
class _Task:
    """One unit's work, as a picklable function of the unit."""

    stage: Stage
    root: Path
    folder: str
    shard_bytes: int

    def __call__(self, unit: Unit) -> None:
        start = time.process_time()
        tally = Tally()
        records = self.stage.records(unit, self.root, self.root / self.folder, tally)
        shards = [
            dataclasses.asdict(shard)
            for shard in write_shards(
                records, self.root, f"{self.folder}/{unit.key}", self.shard_bytes
            )
        ]
        record = {
            "shards": shards,
            "tally": tally.to_json(),
            "cpu_seconds": round(time.process_time() - start, 3),
            "peak_memory_mb": peak_memory_mb(),
        }
        write_json(self.root / self.folder / f"{unit.key}.json", record)


def peak_memory_mb() -> int:
    """The most resident memory that this process has had so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000


def write_shards(
    records: Iterator[Record], root: Path, stem: str, shard_bytes: int
) -> Iterator[Shard]:
    """Writes records into shards ``STEM-PP.jsonl.zst`` of one source and limited size each."""
    pending = next(records, None)
    part = 0
    while pending is not None:
        source = pending.source
        held: list[Record] = []  # the record that opens the next shard

        def one_shard(first: Record = pending, held: list[Record] = held) -> Iterator[Record]:
            size = len(first.text)
            yield first
            for record in records:
                size += len(record.text)
                if record.source != first.source or size > shard_bytes:
                    held.append(record)
                    return
                yield record

        path = f"{stem}-{part:03d}.jsonl.zst"
        digest = write_shard(root / path, one_shard(), level=ZSTD_LEVEL)
        yield Shard(path, source, digest.documents, digest.bytes, digest.hexdigest())
        pending = held[0] if held else None
        part += 1


class WorkerPool:
    """Processes that serve every stage of a build; started at the first need.

    A worker that dies (killed, out of memory) takes the pool with it: the units that were not
    finished run again in a new one, a few times. With one worker, or one unit, all runs in
    this process.

    Args:
      workers: processes.
      progress: shows a bar with the time left.
    """

    def __init__(self, workers: int = 1, *, progress: bool = False) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self.workers = workers
        self._progress = progress
        self._executor: concurrent.futures.ProcessPoolExecutor | None = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes; what they have not started is not done."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def run(
        self, task: Callable[[Unit], Any], units: Sequence[Unit], *, label: str
    ) -> dict[str, Any]:
        """Runs a picklable function over units; returns key -> what it returned.

        Raises:
          BuildError: workers keep dying.
        """
        results: dict[str, Any] = {}
        with tqdm(total=len(units), desc=label, unit="shard", disable=not self._progress) as bar:
            if min(self.workers, len(units)) <= 1:
                for unit in units:
                    results[unit.key] = task(unit)
                    bar.update()
                return results
            for attempt in range(POOL_RETRIES + 1):
                left = [unit for unit in units if unit.key not in results]
                try:
                    self._run(task, left, results, bar)
                    return results
                except BrokenProcessPool:
                    self.close()
                    lost = sum(unit.key not in results for unit in units)
                    logger.warning(
                        "%s: a worker died; %d of %d shards are not done, run %d of %d starts",
                        label, lost, len(units), attempt + 2, POOL_RETRIES + 1,
                    )  # fmt: skip
        raise BuildError(
            f"{label}: workers died {POOL_RETRIES + 1} times (out of memory?): use fewer workers "
            "or a smaller shard_mb, then run the same command to continue"
        )

    def _run(
        self,
        task: Callable[[Unit], Any],
        units: Sequence[Unit],
        results: dict[str, Any],
        bar: tqdm,  # type: ignore[type-arg]
    ) -> None:
        if self._executor is None:
            # spawn: the parent may hold threads of the tokenizer or of JAX, which fork copies dead.
            context = multiprocessing.get_context("spawn")
            self._executor = concurrent.futures.ProcessPoolExecutor(
                self.workers, context, initializer=end_with_parent
            )
        jobs = {self._executor.submit(task, unit): unit.key for unit in units}
        try:
            for job in concurrent.futures.as_completed(jobs):
                results[jobs[job]] = job.result()
                bar.update()
        except BrokenProcessPool:
            raise
        except BaseException:
            self.close()
            raise


def end_with_parent() -> None:
    """Ends this worker when its parent is killed: it would go on through the queue otherwise."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the pool has a worker per core already
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
