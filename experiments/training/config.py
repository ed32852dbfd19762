"""What a training run is: every choice as data, checked when it is made."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.training.curriculum import ContextRope, Curriculum, make_curriculum
from experiments.training.guard import GuardConfig
from experiments.training.optimizer import OptimizerConfig
from experiments.training.run_checkpoints import RetentionConfig
from experiments.training.schedule import Schedule, Shape, make_schedule
from experiments.training.spikes import RollbackConfig
from models.config import ModelConfig
from models.sharding import MeshConfig

# Fields that may differ between two calls on one folder: no number of the run depends on them
# (a mesh only through the order of sums).
FREE_FIELDS = ("out", "checkpoint", "log_every", "mesh", "xla_options", "skip")


@dataclass(frozen=True)
class DataConfig:
    """Which tokens."""

    corpus: str = "sample"  # "sample", a corpus folder or a token store
    vocab_size: int = 256  # of the tokenizer: 256 means bytes
    seed: int = 0  # of the order of windows
    document_mask: bool = False  # documents of a row do not attend to each other


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate by step: `schedule.Schedule` with a name for the common case."""

    peak: float = 1e-3
    total_steps: int = 1000
    warmup_steps: int = 100
    cooldown_steps: int | None = None  # None: all steps after warm-up (with shape=cosine, "cosine")
    shape: Shape = "cosine"
    final: float = 0.1  # part of the peak at the end

    def __post_init__(self) -> None:
        self.make()

    def make(self) -> Schedule:
        """The checked schedule."""
        cooldown = self.cooldown_steps
        if cooldown is None:
            cooldown = max(0, self.total_steps - self.warmup_steps)
        return make_schedule(
            peak=self.peak,
            total_steps=self.total_steps,
            warmup_steps=self.warmup_steps,
            cooldown_steps=cooldown,
            shape=self.shape,
            final=self.final,
        )


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    Raises:
      ValueError: a field is out of range or disagrees with another; the message names it.
    """

    model: ModelConfig
    out: str = "runs/train"  # folder of the run
    batch_size: int = 32  # sequences of a step, over all devices
    seq_len: int = 256  # tokens of a sequence
    accumulation: int = 1  # microbatches that a batch is cut into
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    # (batch, sequences from there on), in sequences of `seq_len`
    batch_ramp: tuple[tuple[int, int], ...] = ()
    # (batch, tokens of a sequence, RoPE base from there on); tokens of a batch stay
    context: tuple[tuple[int, int, float], ...] = ()
    # RoPE is extended at these switches by what sequences have grown; None changes its base alone
    context_rope: ContextRope | None = None
    guard: GuardConfig = field(default_factory=GuardConfig)
    rollback: RollbackConfig = field(default_factory=RollbackConfig)
    checkpoint: RetentionConfig = field(default_factory=RetentionConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    seed: int = 0  # of the initial parameters
    init_from: str | None = None  # parameters of a run of ours or a Hugging Face folder
    branch_from: str | None = None  # run folder: go on from its state with this run's schedule
    branch_step: int | None = None  # step of that state; None: its newest
    skip: tuple[tuple[int, int], ...] = ()  # batches [a, b) that are never trained on
    log_every: int = 1  # steps between rows of metrics.jsonl
    xla_options: tuple[tuple[str, str], ...] = ()  # (name, value) for the compiler of the step

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len", "accumulation", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.model.vocab_size < self.data.vocab_size:
            raise ValueError(
                f"model.vocab_size {self.model.vocab_size} is below data.vocab_size "
                f"{self.data.vocab_size}: tokens would have no embedding"
            )
        longest = max(phase.seq_len for phase in self.curriculum().phases)
        if longest > self.model.max_seq_len:
            raise ValueError(
                f"sequences of {longest} tokens need model.max_seq_len >= {longest}, got "
                f"{self.model.max_seq_len}"
            )
        if self.init_from and self.branch_from:
            raise ValueError("init_from takes parameters, branch_from a whole state: give one")
        if self.branch_step is not None and not self.branch_from:
            raise ValueError("branch_step needs branch_from, the run that the step belongs to")
        if any(not 0 <= a < b for a, b in self.skip):
            raise ValueError(f"skip must hold windows (a, b) with 0 <= a < b, got {self.skip}")
        if self.rollback.enabled and self.checkpoint.margin < self.rollback.margin:
            raise ValueError(
                f"checkpoint.margin {self.checkpoint.margin} is below rollback.margin "
                f"{self.rollback.margin}: the checkpoint to roll back to would be gone"
            )

    def curriculum(self) -> Curriculum:
        """Batch sizes and lengths by data index."""
        return make_curriculum(
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            rope_theta=self.model.rope_theta,
            rope_scaling=self.model.rope_scaling,
            batch_ramp=self.batch_ramp,
            context=self.context,
            context_rope=self.context_rope,
        )

    def fixed(self) -> dict[str, Any]:
        """What must not change while a run goes on, as JSON values."""
        values = json.loads(json.dumps(dataclasses.asdict(self)))
        return {name: value for name, value in values.items() if name not in FREE_FIELDS}

    def digest(self) -> str:
        """Identifies `fixed()`."""
        return hashlib.sha256(json.dumps(self.fixed(), sort_keys=True).encode()).hexdigest()[:16]


def differences(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> list[str]:
    """Names of the fields in which two configs differ, nested ones with dots.

    >>> differences({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 1, "b": {"c": 2, "d": 4}})
    ['b.d']
    """
    found = []
    for name in sorted(a.keys() | b.keys()):
        x, y = a.get(name), b.get(name)
        if isinstance(x, dict) and isinstance(y, dict):
            found += differences(x, y, f"{prefix}{name}.")
        elif x != y:
            found.append(prefix + name)
    return found


def run_of(path: str | Path) -> Path:
    """A path, if it is the folder of a run.

    Raises:
      ValueError: it is not.
    """
    if not (Path(path) / "checkpoints").is_dir():
        raise ValueError(f"{path} is no run folder: it holds no checkpoints/")
    return Path(path)
