"""What batch number j is: its size, its sequence length and the RoPE it is trained with.

All of it is a function of `data_index` j, never of the step: batch j holds the same tokens in every
run of one config, whatever was skipped or refused before, and a cursor is all there is to resume.

    j        0 ........ 1000 ....... 5000 ............. 6000
    rows     16         32           32                 4          batch_ramp, batch in context
    seq_len  4096       4096         4096               32768      context
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int32

from experiments.data import TokenDataset
from models.rope_scaling import RopeScaling

ContextRope = Literal["linear", "ntk", "yarn"]


@dataclass(frozen=True)
class Phase:
    """A stretch of batches of one shape.

    Attributes:
      start: first data index.
      seq_len: T.
      batch_size: rows of a batch.
      rope_theta: RoPE base of the model.
      rope_scaling: its context extension.
      first_row: how many rows of `seq_len` tokens lie before it in the order of the data.
    """

    start: int
    seq_len: int
    batch_size: int
    rope_theta: float
    first_row: int = 0
    rope_scaling: RopeScaling | None = None

    @property
    def tokens(self) -> int:
        """Targets of one batch."""
        return self.batch_size * self.seq_len


@dataclass(frozen=True)
class Curriculum:
    """The phases of a run, by start."""

    phases: tuple[Phase, ...]

    def phase_at(self, data_index: int) -> Phase:
        """The phase that a batch belongs to."""
        return [phase for phase in self.phases if phase.start <= data_index][-1]


def make_curriculum(
    *,
    batch_size: int,
    seq_len: int,
    rope_theta: float,
    rope_scaling: RopeScaling | None = None,
    batch_ramp: Sequence[tuple[int, int]] = (),
    context: Sequence[tuple[int, int, float]] = (),
    context_rope: ContextRope | None = None,
) -> Curriculum:
    """The phases that a constant batch, a ramp and context switches amount to.

    Args:
      batch_size, seq_len, rope_theta, rope_scaling: of the first batch.
      batch_ramp: (data index, rows of a batch from there on), in rows of the first `seq_len`.
      context: (data index, sequence length, RoPE base from there on). The tokens of a batch stay:
        rows shrink as sequences grow.
      context_rope: extension of RoPE from the first switch on, by the factor that sequences have
        grown since the first batch (`models.rope_scaling`); None changes the base alone.

    Raises:
      ValueError: starts do not rise, a batch is no whole number of the longer sequences, or
        `context_rope` meets a model that is extended already.

    >>> phases = make_curriculum(batch_size=8, seq_len=4, rope_theta=1e4,
    ...                          batch_ramp=[(10, 16)], context=[(20, 8, 5e5)]).phases
    >>> [(p.start, p.batch_size, p.seq_len, p.first_row) for p in phases]
    [(0, 8, 4, 0), (10, 16, 4, 80), (20, 8, 8, 120)]
    """
    for name, switches in (("batch_ramp", batch_ramp), ("context", context)):
        starts = [0, *(s[0] for s in switches)]
        if any(a >= b for a, b in itertools.pairwise(starts)):
            raise ValueError(f"{name} must start above 0 and rise, got starts {starts[1:]}")
    if context_rope and rope_scaling is not None:
        raise ValueError(
            f"context_rope={context_rope!r} would extend a model that has a rope_scaling of type "
            f"{rope_scaling.type!r} already; leave one of them out"
        )
    rows, length, theta = batch_size, seq_len, rope_theta
    phases: list[Phase] = []
    for start in sorted({0, *(s[0] for s in batch_ramp), *(s[0] for s in context)}):
        rows = dict(batch_ramp).get(start, rows)
        for at, new_length, new_theta in context:
            length, theta = (new_length, new_theta) if at == start else (length, theta)
        if rows * seq_len % length or rows < 1:
            raise ValueError(
                f"context: a batch of {rows} x {seq_len} tokens is no whole number of sequences "
                f"of {length}; make batch_size a multiple of {length // math.gcd(length, seq_len)}"
            )
        size = rows * seq_len // length
        scaling = rope_scaling
        if context_rope and length > seq_len:
            scaling = extension(context_rope, length / seq_len, seq_len)
        before = _rows_before(phases, start, length)
        phases.append(Phase(start, length, size, theta, before, scaling))
    return Curriculum(tuple(phases))


def extension(rope: ContextRope, factor: float, trained_len: int) -> RopeScaling:
    """The `RopeScaling` that takes a model of `trained_len` tokens to `factor` times as many."""
    original = trained_len if rope == "yarn" else None
    return RopeScaling(type=rope, factor=float(factor), original_max_seq_len=original)


def _rows_before(phases: list[Phase], start: int, seq_len: int) -> int:
    if not phases:
        return 0
    last = phases[-1]
    rows = last.first_row + (start - last.start) * last.batch_size
    return -(-rows * last.seq_len // seq_len)


def next_index(data_index: int, skips: Sequence[tuple[int, int]]) -> int:
    """The batch to train on at a cursor: the cursor itself, or the end of the windows it lies in.

    >>> next_index(5, [(3, 8), (8, 10)]), next_index(10, [(3, 8), (8, 10)])
    (10, 10)
    """
    for start, end in sorted(skips):
        if start <= data_index < end:
            data_index = end
    return data_index


class BatchSource:
    """Batches of a corpus by data index, cut into microbatches.

    Every process reads the whole batch (4 bytes a token) and keeps its devices' part: what a
    batch is does not depend on how many processes there are.

    Args:
      dataset: the corpus.
      curriculum: sizes.
      seed: of the order of the data.
      accumulation: microbatches of a batch; divides every batch size.
    """

    def __init__(
        self, dataset: TokenDataset, curriculum: Curriculum, *, seed: int, accumulation: int = 1
    ):
        self.dataset, self.curriculum = dataset, curriculum
        self.seed, self.accumulation = seed, accumulation
        for phase in curriculum.phases:
            if phase.batch_size % accumulation:
                raise ValueError(
                    f"accumulation {accumulation} must divide every batch size, and from batch "
                    f"{phase.start} on that is {phase.batch_size}"
                )

    def tokens_at(self, data_index: int) -> Int32[np.ndarray, "B T+1"]:
        """The rows of a batch."""
        phase = self.curriculum.phase_at(data_index)
        row = phase.first_row + (data_index - phase.start) * phase.batch_size
        # The loader serves aligned batches; where a phase starts out of line, smaller ones fit.
        unit = math.gcd(row, phase.batch_size)
        batches = self.dataset.batches(unit, phase.seq_len, seed=self.seed)
        first = row // unit
        parts = [batches.batch_at(i) for i in range(first, first + phase.batch_size // unit)]
        return np.concatenate(parts)

    def at(self, data_index: int) -> dict[str, np.ndarray]:
        """The batch as `train_step.Batch`: tokens (A, B / A, T+1)."""
        tokens = self.tokens_at(data_index)
        return {"tokens": tokens.reshape(self.accumulation, -1, tokens.shape[1])}
