"""The training loop: one batch after another until the schedule ends, whatever happens between.

    next index -> batch -> step -> (one step late) metrics -> detector -> log
                                     |                          |
                                     every N steps: checkpoint  spike: decide, record, restore

The host reads the metrics of step t - 1 after it has started step t, so the device never waits for
it. All that a decision depends on is in the rows and on disk: killed at any point, a run continues
to the same bits.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.data import TokenDataset
from experiments.training.config import TrainConfig
from experiments.training.curriculum import BatchSource
from experiments.training.programs import Programs
from experiments.training.run_checkpoints import Checkpoints, Saved
from experiments.training.run_folder import Events, locked, open_folder, versions
from experiments.training.spikes import (
    ADVICE,
    Abort,
    Checkpoint,
    Detector,
    LevelShift,
    Row,
    Spike,
    decide,
    observe,
)
from experiments.training.start import begin
from experiments.training.state import TrainState
from experiments.training.train_step import reset_guard
from experiments.training.watch import (
    MFU_CONVENTION,
    Console,
    Meter,
    MetricsLog,
    memory,
    peak_flops,
)
from models.sharding import make_mesh

log = logging.getLogger(__name__)


class TrainingAborted(RuntimeError):
    """Training cannot go on by itself; the message says why and what to do."""


@dataclass
class Position:
    """Where a run is: the device's state and what the host knows beside it."""

    state: TrainState
    step: int  # optimizer steps taken, as far as rows were read
    index: int  # next batch
    tokens: int  # that were trained on
    detector: Detector


@dataclass(frozen=True)
class Flying:
    """A step that was started and whose metrics were not read yet."""

    metrics: dict[str, jax.Array]
    tokens: int
    seq_len: int
    batch_size: int
    loader_wait: float
    compile_count: int


class Trainer:
    """One run from where its folder stands; `run()` takes it to its end.

    Args:
      config: the run.
      dataset: its tokens.
      source: batches by data index, when not those of the dataset (to inject faults).
      devices: to spread the run over; None for all.
      stop: asked after every step; True ends the run after a checkpoint.
    """

    def __init__(
        self,
        config: TrainConfig,
        dataset: TokenDataset,
        *,
        source: BatchSource | None = None,
        devices: Sequence[Any] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ):
        self.config, self.stop = config, stop
        self.curriculum = config.curriculum()
        self.source = source or BatchSource(
            dataset, self.curriculum, seed=config.data.seed, accumulation=config.accumulation
        )
        separator = dataset.tokenizer.eos_id if config.data.document_mask else None
        self.programs = Programs(config, make_mesh(config.mesh, devices), separator=separator)
        self.fingerprint = dataset.fingerprint
        self.total = config.schedule.total_steps
        device = self.programs.mesh.devices.flat[0]
        self.meter = Meter(config.model, self.programs.mesh.size, peak_flops(device))
        self.console = Console(self.total)
        self.loader = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self.ahead: tuple[int, Future] | None = None

    def run(self) -> str:
        """Train; returns "done", or "stopped" when `stop` asked for it.

        Raises:
          RunError: the folder belongs to another run or process.
          CheckpointError: a checkpoint could not be written; the ones before are intact.
          TrainingAborted: spikes that rollbacks do not cure.
        """
        with locked(Path(self.config.out)):
            folder = open_folder(self.config, fingerprint=self.fingerprint)
            self.events = Events(folder)
            try:
                with Checkpoints(folder / "checkpoints", self.config.checkpoint) as checkpoints:
                    self.checkpoints = checkpoints
                    self.resume(folder)
                    return self.train()
            finally:
                self.loader.shutdown(cancel_futures=True)

    # ---- the story ---------------------------------------------------------------------------

    def resume(self, folder: Path) -> None:
        """Set out from the newest checkpoint that the decisions on record leave valid."""
        self.history = self.events.history(self.config.skip)
        self.checkpoints.discard(lambda saved: not self.is_valid(saved))
        if not self.restore():
            self.position = begin_position(self.config, self.programs)
            self.save()
            self.checkpoints.wait()  # whatever comes, there is something to go back to
        self.metrics = MetricsLog(
            folder, attempt=len(self.history.rollbacks), data_index=self.position.index
        )
        self.events.append(
            "start",
            step=self.position.step,
            data_index=self.position.index,
            attempt=len(self.history.rollbacks),
            devices=self.programs.mesh.size,
            device_kind=jax.devices()[0].device_kind,
            mesh=dict(self.programs.mesh.shape),
            mfu_convention=MFU_CONVENTION,
            versions=versions(),
        )

    def train(self) -> str:
        """Steps until the schedule ends."""
        at, flying, last_save = self.position, None, self.position.step
        while True:
            # Refused steps do not count, so what is under way may or may not be the last.
            if at.step + (flying is not None) >= self.total:
                spike = self.land(flying)
                flying = None
                if spike is None and at.step >= self.total:
                    return self.finish()
            else:
                started = self.launch()
                spike = self.land(flying)
                flying = started
            stopping = self.stop()
            due = (at.step + 1) % self.config.checkpoint.every == 0 and flying is not None
            if spike is None and flying is not None and (due or stopping):
                spike = self.land(flying)
                flying = None
            if spike is not None:
                if self.react(spike):
                    at, flying, last_save = self.position, None, self.position.step
                continue
            whole = flying is None and at.step != last_save
            if whole and (stopping or at.step % self.config.checkpoint.every == 0):
                self.save()
                last_save = at.step
            if stopping:
                self.checkpoints.wait()
                self.events.append("stopped", step=at.step, data_index=at.index)
                return "stopped"

    def launch(self) -> Flying:
        """Start a step on the next batch."""
        at = self.position
        index = self.history.next_index(at.index)
        if index != at.index:
            at.state = dataclasses.replace(at.state, data_index=self.programs.counter(index))
        if self.history.resets_at(index):
            at.state = reset_guard(at.state, self.config.guard)
        batch, waited = self.take(index)
        phase = self.curriculum.phase_at(index)
        new = len(self.programs.used)
        step = self.programs.step_for(phase, batch)
        if len(self.programs.used) > new:
            self.events.append(
                "compiled",
                data_index=index,
                seconds=round(step.seconds, 3),
                temporary_bytes=step.temporary_bytes,
                count=len(self.programs.used),
                expected=self.expected_programs(),
            )
        schedule = self.programs.schedule(self.history.lr_factor(at.step))
        at.state, metrics = step.run(at.state, batch, schedule)
        at.index = index + 1
        compiled = len(self.programs.used)
        return Flying(metrics, phase.tokens, phase.seq_len, phase.batch_size, waited, compiled)

    def land(self, flying: Flying | None) -> Spike | None:
        """Read a step's metrics: count, log, and look for a spike."""
        if flying is None:
            return None
        at = self.position
        fetched = jax.device_get(flying.metrics)
        values = {name: np.asarray(x).item() for name, x in fetched.items()}
        accepted = bool(values["accepted"])
        at.step += accepted
        at.tokens += accepted * flying.tokens
        row = {
            **values,
            "tokens": at.tokens,
            "batch_size": flying.batch_size,
            "seq_len": flying.seq_len,
            **self.meter.lap(flying.tokens, flying.seq_len),
            "loader_wait": flying.loader_wait,
            **memory(),
            "compile_count": flying.compile_count,
            "attempt": len(self.history.rollbacks),
        }
        if values["step"] % self.config.log_every == 0 or not accepted:
            self.metrics.append(row)
        finite = math.isfinite(row["loss"])
        self.console.show(row | {"loss": row["loss"] if finite else None})
        if self.history.resets_at(values["data_index"]):
            at.detector = Detector()
        seen = Row(
            values["step"], values["data_index"], values["loss"] if finite else None, accepted
        )
        at.detector, spike = observe(at.detector, seen, self.config.rollback)
        if spike is None or not self.config.rollback.enabled:
            return None
        return None if self.history.awaits_reset(spike) else spike

    def react(self, spike: Spike) -> bool:
        """Decide, record, act. True when the run went back, so that what flies is void."""
        self.checkpoints.wait()
        valid = [Checkpoint(s.step, s.data_index) for s in self.checkpoints.saved()]
        decision = decide(spike, self.history, valid, self.config.rollback)
        if isinstance(decision, Abort):
            self.events.append("abort", decision=dataclasses.asdict(decision))
            newest = self.checkpoints.saved()[-1].path if valid else "none"
            raise TrainingAborted(
                f"stopped at batch {spike.data_index}: {spike.kind} losses from step "
                f"{spike.start_step} on, and {decision.reason}. Last checkpoint: {newest}. {ADVICE}"
            )
        kind = "level_shift" if isinstance(decision, LevelShift) else "rollback"
        self.events.append(kind, decision=dataclasses.asdict(decision), config=self.config.digest())
        self.history = self.history.and_then(decision)
        if isinstance(decision, LevelShift):
            log.warning("new level of the loss accepted at batch %d", decision.reset_at)
            return False
        log.warning(
            "%s losses from step %d on: back to step %d, skipping batches [%d, %d)",
            spike.kind, spike.start_step, decision.restored_step, *decision.skip,
        )  # fmt: skip
        self.go_back()
        return True

    def go_back(self) -> None:
        """Forget what came after the checkpoint that the last rollback names, and load it."""
        self.checkpoints.discard(lambda saved: not self.is_valid(saved))
        if not self.restore():
            raise TrainingAborted("no checkpoint before the spike is whole; start again")

    def finish(self) -> str:
        """Save the end of the run."""
        at = self.position
        if not any(saved.step == at.step for saved in self.checkpoints.saved()):
            self.save()
        self.checkpoints.wait()
        if not any(e["kind"] == "done" and e["step"] == at.step for e in self.events.read()):
            self.events.append("done", step=at.step, data_index=at.index, tokens=at.tokens)
        return "done"

    # ---- its parts ---------------------------------------------------------------------------

    def take(self, index: int) -> tuple[Any, float]:
        """The batch of an index, and the seconds that were spent waiting for it."""
        begun = time.perf_counter()
        if self.ahead is None or self.ahead[0] != index:
            self.ahead = (index, self.loader.submit(self.load, index))
        batch = self.ahead[1].result()
        waited = time.perf_counter() - begun
        following = self.history.next_index(index + 1)
        self.ahead = (following, self.loader.submit(self.load, following))
        return batch, waited

    def load(self, index: int) -> Any:
        return self.programs.place(self.source.at(index))

    def save(self) -> None:
        """Start saving the state and everything the host would need."""
        at = self.position
        record = {
            "step": at.step,
            "data_index": at.index,
            "tokens": at.tokens,
            "detector": at.detector.to_json(),
            "generation": len(self.history.rollbacks),
            "config": self.config.digest(),
            "fingerprint": self.fingerprint,
            "versions": versions(),
        }
        self.checkpoints.save(at.state, record)

    def restore(self) -> bool:
        """Load the newest valid checkpoint; False when there is none."""
        found = self.checkpoints.load_newest(self.programs.abstract, usable=self.is_valid)
        for problem in self.checkpoints.problems():
            self.events.append("bad_checkpoint", message=problem)
        if found is None:
            return False
        state, saved = found
        self.position = position_of(state, saved)
        return True

    def is_valid(self, saved: Saved) -> bool:
        """Not from a time that a later rollback undid."""
        later = self.history.rollbacks[saved.record["generation"] :]
        return all(saved.step <= rollback.restored_step for rollback in later)

    def expected_programs(self) -> int:
        """Distinct shapes and RoPEs in the curriculum."""
        phases = self.curriculum.phases
        return len({(p.batch_size, p.seq_len, p.rope_theta, p.rope_scaling) for p in phases})


def position_of(state: TrainState, saved: Saved) -> Position:
    """Where a checkpoint was made."""
    record = saved.record
    detector = Detector.from_json(record["detector"])
    return Position(state, saved.step, saved.data_index, record["tokens"], detector)


def begin_position(config: TrainConfig, programs: Programs) -> Position:
    """Where a new run begins: fresh, with given parameters, or where another run was."""
    state, saved = begin(config, programs)
    if saved is not None:
        return position_of(state, saved)
    return Position(state, 0, 0, 0, Detector())
