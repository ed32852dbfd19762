"""From a stream of step metrics to a decision: go on, roll back, accept a new level, or give up.

Pure functions of plain data. The in-step guard (`guard.py`) keeps one bad batch out of the
parameters; this is for what it cannot absorb: many refused steps, or a loss that climbs slowly.

    rows -> observe -> Spike -> decide(spike, earlier decisions, checkpoints) -> Decision

A rollback restores a checkpoint from well before the spike and skips the batches from there to
well beyond it: replaying them from another state often does not spike, and a checkpoint from just
before one often still does (PaLM, arXiv 2204.02311, section 5.1). Every decision depends on the
rows alone, not on when the host saw them, so that a killed run repeats it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from experiments.training.curriculum import next_index


@dataclass(frozen=True)
class RollbackConfig:
    """When to roll back and how far."""

    enabled: bool = True
    margin: int = 100  # steps between the checkpoint that is restored and the spike, at least
    extra: int = 200  # batches skipped from the start of the spike on
    refused: int = 5  # refused steps among the last `recent` that make a spike
    recent: int = 20
    nonfinite: int = 3  # of which not finite: these alone make one too
    linger_steps: int = 50  # accepted steps whose median is the smoothed loss
    linger_nats: float = 0.5  # smoothed loss above its minimum that makes a spike
    budget: int = 3  # rollbacks per `budget_steps`; one more ends the run
    budget_steps: int = 10_000
    lr_factor: float = 0.5  # learning rate for `lr_steps` after the third try at one place
    lr_steps: int = 1_000

    def __post_init__(self) -> None:
        for name in ("refused", "recent", "nonfinite", "linger_steps", "extra", "lr_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("margin", "budget", "budget_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if max(self.refused, self.nonfinite) > self.recent:
            raise ValueError(
                f"recent {self.recent} must be at least refused {self.refused} and nonfinite "
                f"{self.nonfinite}, or they are never reached"
            )
        if not 0 < self.lr_factor <= 1 or not self.linger_nats > 0:
            raise ValueError(
                f"lr_factor must lie in (0, 1] and linger_nats above 0, got {self.lr_factor} and "
                f"{self.linger_nats}"
            )


@dataclass(frozen=True)
class Row:
    """What one step did. `loss` is None when it was not finite."""

    step: int
    data_index: int
    loss: float | None
    accepted: bool


@dataclass(frozen=True)
class Detector:
    """What the host remembers of the run; part of every checkpoint.

    Attributes:
      recent: the last rows, refused or not.
      accepted: losses of the last accepted steps.
      best: lowest smoothed loss so far.
      rising: (step, data index) since when the smoothed loss is halfway to a spike.
    """

    recent: tuple[Row, ...] = ()
    accepted: tuple[float, ...] = ()
    best: float | None = None
    rising: tuple[int, int] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Detector":
        rising = value["rising"]
        return Detector(
            tuple(Row(**row) for row in value["recent"]),
            tuple(value["accepted"]),
            value["best"],
            tuple(rising) if rising else None,
        )


@dataclass(frozen=True)
class Spike:
    """Something that the guard could not absorb."""

    kind: str  # "non-finite", "refused" or "lingering"
    start_step: int
    start_index: int  # data index of its first batch
    step: int  # where it was detected
    data_index: int
    level: float | None  # nats, median loss of the spike; None when not finite
    baseline: float | None  # nats, before it


def observe(detector: Detector, row: Row, config: RollbackConfig) -> tuple[Detector, Spike | None]:
    """Take in one row; the spike that it completes, if any."""
    recent = (*detector.recent, row)[-config.recent :]
    detector = replace(detector, recent=recent)
    if row.accepted and row.loss is not None:
        detector = _smooth(detector, row, row.loss, config)
    bad = [r for r in recent if not r.accepted]
    nonfinite = [r for r in bad if r.loss is None]
    kind = None
    if len(nonfinite) >= config.nonfinite:
        kind = "non-finite"
    elif len(bad) >= config.refused:
        kind = "refused"
    if kind and not row.accepted:
        finite = [r.loss for r in bad if r.loss is not None]
        level = median(finite) if finite and kind == "refused" else None
        return detector, _spike(kind, bad[0].step, bad[0].data_index, row, level, detector)
    if _smoothed_above(detector, config.linger_nats, config):
        start = detector.rising or (row.step, row.data_index)
        return detector, _spike("lingering", *start, row, median(detector.accepted), detector)
    return detector, None


def _spike(
    kind: str, step: int, index: int, row: Row, level: float | None, detector: Detector
) -> Spike:
    baseline = detector.best
    if baseline is None and detector.accepted:
        baseline = median(detector.accepted)
    return Spike(kind, step, index, row.step, row.data_index, level, baseline)


def _smooth(detector: Detector, row: Row, loss: float, config: RollbackConfig) -> Detector:
    accepted = (*detector.accepted, loss)[-config.linger_steps :]
    detector = replace(detector, accepted=accepted)
    if len(accepted) == config.linger_steps:
        smoothed = median(accepted)
        detector = replace(
            detector, best=smoothed if detector.best is None else min(detector.best, smoothed)
        )
    halfway = _smoothed_above(detector, config.linger_nats / 2, config)
    rising = (detector.rising or (row.step, row.data_index)) if halfway else None
    return replace(detector, rising=rising)


def _smoothed_above(detector: Detector, nats: float, config: RollbackConfig) -> bool:
    full = len(detector.accepted) == config.linger_steps
    return full and detector.best is not None and median(detector.accepted) > detector.best + nats


# ---- what to do about it ---------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that could be restored."""

    step: int
    data_index: int


@dataclass(frozen=True)
class Rollback:
    """Restore `restored_step` and never train on batches [skip[0], skip[1])."""

    spike: Spike
    restored_step: int
    skip: tuple[int, int]
    attempt: int  # 1, 2, 3: how often this place has spiked
    lr_factor: float = 1.0
    lr_until: int = 0  # step


@dataclass(frozen=True)
class LevelShift:
    """The loss has a new level that is no spike: forget the old one at batch `reset_at`."""

    spike: Spike
    reset_at: int


@dataclass(frozen=True)
class Abort:
    """Nothing automatic is left to try."""

    spike: Spike
    reason: str


Decision = Rollback | LevelShift | Abort


@dataclass(frozen=True)
class History:
    """The decisions of a run so far, and the windows that it was told to skip from the start."""

    rollbacks: tuple[Rollback, ...] = ()
    shifts: tuple[LevelShift, ...] = ()
    skips: tuple[tuple[int, int], ...] = ()

    def and_then(self, decision: "Rollback | LevelShift") -> "History":
        """The history with one more decision."""
        if isinstance(decision, Rollback):
            return replace(self, rollbacks=(*self.rollbacks, decision))
        return replace(self, shifts=(*self.shifts, decision))

    def next_index(self, data_index: int) -> int:
        """The batch to train on at a cursor."""
        return next_index(data_index, [*self.skips, *(r.skip for r in self.rollbacks)])

    def lr_factor(self, step: int) -> float:
        """Part of the scheduled learning rate that a step is taken with."""
        factor = 1.0
        for rollback in self.rollbacks:
            if rollback.restored_step <= step < rollback.lr_until:
                factor *= rollback.lr_factor
        return factor

    def resets_at(self, data_index: int) -> bool:
        """Whether guard and detector start anew before this batch."""
        return any(shift.reset_at == data_index for shift in self.shifts)

    def awaits_reset(self, spike: "Spike") -> bool:
        """Whether a spike is what a level shift on record is about to end."""
        return any(0 < shift.reset_at - spike.data_index <= 2 for shift in self.shifts)


def decide(
    spike: Spike, history: History, checkpoints: Sequence[Checkpoint], config: RollbackConfig
) -> Decision:
    """What to do about a spike.

    * The same level again, on other data and from a state that was good: the data's level has
      moved (a new source, longer sequences), and training goes on.
    * Else the newest checkpoint at least `margin` steps before the spike, or the oldest there is.
      At the same place again: twice the skip, then also `lr_factor`, then the end.
    """
    last = history.rollbacks[-1] if history.rollbacks else None
    again = last is not None and spike.start_index <= last.skip[1] + config.extra
    if last and again and _same_level(last.spike, spike):
        # Two batches on: the next one may be under way already.
        return LevelShift(spike, spike.data_index + 2)
    attempt = last.attempt + 1 if last and again else 1
    if attempt > 3:
        return Abort(spike, f"three rollbacks at this place (batch {spike.start_index}) failed")
    recent = [
        r for r in history.rollbacks if r.spike.start_step > spike.start_step - config.budget_steps
    ]
    if len(recent) >= config.budget:
        return Abort(
            spike, f"{len(recent)} rollbacks within {config.budget_steps} steps are the budget"
        )
    before = [c for c in checkpoints if c.data_index <= spike.start_index]
    if not before:
        return Abort(spike, f"there is no checkpoint before batch {spike.start_index}")
    old = [c for c in before if c.step <= spike.start_step - config.margin]
    chosen = max(old or [min(before, key=lambda c: c.step)], key=lambda c: c.step)
    extra = config.extra * (1 if attempt == 1 else 2)
    end = max(spike.start_index + extra, spike.data_index + 1)
    last_try = attempt == 3
    return Rollback(
        spike,
        chosen.step,
        (chosen.data_index, end),
        attempt,
        config.lr_factor if last_try else 1.0,
        chosen.step + config.lr_steps if last_try else 0,
    )


def _same_level(first: Spike, second: Spike) -> bool:
    """Whether two excursions rest at one level: nearer to each other than to the baseline."""
    if first.level is None or second.level is None or first.baseline is None:
        return False
    return abs(second.level - first.level) <= 0.25 * (first.level - first.baseline)


ADVICE = (
    "The data or the optimisation is at fault, not chance. Look at metrics.jsonl around the spike "
    "(update_norm rises first). What helps: a lower peak learning rate or a longer warm-up, "
    "qk_norm and z_loss in the model, a smaller beta2, a look at the batches themselves "
    "(BatchSource.at). Start again with --branch-from this run and a step before the spike."
)
