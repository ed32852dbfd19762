"""Batches from a mixture of sources, by number: the state of a run is the step.

A token store keeps its sources one after the other, so each is a slice of the train stream.
Row r of a run belongs to source s and is that source's j-th row (``mixing.MixtureSchedule``);
j gives the epoch and the place in it, and a keyed permutation of that epoch (``loader.permute``)
gives the row of the source. All of it is O(1): step 10^9 costs what step 0 costs.

Rows are windows of a source's stream (``MixtureBatches``) or rows of whole documents
(``PackedBatches``).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np
from jaxtyping import Int32, Int64

from experiments.data.fitting import (
    Long,
    Method,
    Packed,
    PackedBatch,
    document_limits,
    gather_rows,
    pack_documents,
)
from experiments.data.loader import TokenDataset, permute
from experiments.data.mixing import MixtureSchedule
from experiments.data.packing import gather_windows, window_count


def source_streams(dataset: TokenDataset) -> dict[str, np.ndarray]:
    """Each source's part of the train stream, ``EOS doc EOS ... doc EOS``, without a copy.

    Raises:
      ValueError: the store's counts do not fit its tokens.
    """
    streams = {}
    place = 0
    eos = dataset.tokenizer.eos_id
    for name, splits in dataset.meta["sources"].items():
        end = place + splits["train"]["tokens"]
        # The end-of-text that closes one source opens the next.
        stream = dataset.train[place : end + 1]
        if stream[0] != eos or stream[-1] != eos:
            raise ValueError(
                f"{dataset.name}: source {name!r} does not end at tokens {place}..{end}"
            )
        streams[name] = stream
        place = end
    return streams


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """Which row of which source each row of a run is.

    Attributes:
      schedule: the order of the sources.
      rows: rows per epoch of each source, in the schedule's order.
      batch_size: rows of a *global* batch, over all processes.
      seed: of the permutations.
      process_index: this host, which gets its contiguous share of every batch.
      process_count: hosts; must divide ``batch_size``.

    Raises:
      ValueError: a field is out of range, or a source with a share has no row.
    """

    schedule: MixtureSchedule
    rows: tuple[int, ...]
    batch_size: int
    seed: int
    process_index: int = 0
    process_count: int = 1

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.schedule.counts):
            raise ValueError(
                f"rows must have one entry per source ({len(self.schedule.counts)}), got "
                f"{len(self.rows)}"
            )
        for source, (rows, count) in enumerate(zip(self.rows, self.schedule.counts, strict=True)):
            if count > 0 and rows < 1:
                raise ValueError(
                    f"source {source} has a share of the mixture but not one row: use a shorter "
                    "seq_len or take it out of the mixture"
                )
        if self.batch_size < 1 or self.process_count < 1 or self.seed < 0:
            raise ValueError(
                "batch_size and process_count must be at least 1 and seed at least 0, got "
                f"{self.batch_size}, {self.process_count}, {self.seed}"
            )
        if not 0 <= self.process_index < self.process_count:
            raise ValueError(
                f"process_index must lie in [0, {self.process_count}), got {self.process_index}"
            )
        if self.batch_size % self.process_count:
            raise ValueError(
                f"batch_size {self.batch_size} must be a multiple of process_count "
                f"{self.process_count}"
            )

    def at(self, step: int) -> tuple[Int32[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
        """(source, row of that source) of this host's rows at ``step``."""
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        own = self.batch_size // self.process_count
        first = step * self.batch_size + self.process_index * own
        sources, visits = self.schedule.at(np.arange(first, first + own, dtype=np.int64))
        rows = np.empty_like(visits)
        for source in np.unique(sources):
            here = np.flatnonzero(sources == source)
            size = self.rows[source]
            epochs, offsets = np.divmod(visits[here], size)
            for epoch in np.unique(epochs):
                inside = epochs == epoch
                key = (self.seed, int(source), int(epoch))
                rows[here[inside]] = permute(offsets[inside], size=size, key=key)
        return sources, rows

    def epochs_at(self, step: int) -> list[float]:
        """How often each source has been seen after ``step`` batches."""
        periods, rest = divmod(step * self.batch_size, self.schedule.period)
        sources, _ = self.schedule.at(np.arange(rest))
        seen = np.bincount(sources, minlength=len(self.rows))
        counts = np.asarray(self.schedule.counts)
        return ((periods * counts + seen) / np.maximum(1, self.rows)).tolist()


@dataclasses.dataclass(frozen=True)
class MixtureBatches:
    """Batches of windows; stands in for ``loader.BatchSchedule`` in a training loop.

    Attributes:
      streams: one per source.
      seq_len: targets per row; rows hold ``seq_len + 1`` tokens.
      order: which rows; make it with ``mixture_batches``.
    """

    streams: tuple[np.ndarray, ...]
    seq_len: int
    order: RowOrder

    def batch_at(self, step: int) -> Int32[np.ndarray, "B T+1"]:
        """The batch of ``step``: inputs are ``[:, :-1]``, targets ``[:, 1:]``."""
        sources, rows = self.order.at(step)
        batch = np.empty((len(rows), self.seq_len + 1), dtype=np.int32)
        for source in np.unique(sources):
            here = sources == source
            batch[here] = gather_windows(self.streams[source], rows[here], seq_len=self.seq_len)
        return batch


def mixture_batches(
    streams: Sequence[np.ndarray],
    counts: Sequence[int],
    *,
    batch_size: int,
    seq_len: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> MixtureBatches:
    """Windows of the streams in the proportions ``counts`` (``mixing.integer_shares``)."""
    rows = tuple(window_count(len(stream), seq_len=seq_len) for stream in streams)
    order = RowOrder(
        MixtureSchedule(tuple(counts)), rows, batch_size, seed, process_index, process_count
    )
    return MixtureBatches(tuple(streams), seq_len, order)


@dataclasses.dataclass(frozen=True)
class BatchSource:
    """The first ``steps`` batches as a sequence, which is what Grain calls a random-access source.

    ``grain.MapDataset.source(BatchSource(batches, steps))`` then prefetches in threads, and its
    checkpoint is the step. Nothing here needs Grain.
    """

    batches: MixtureBatches | PackedBatches
    steps: int

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: SupportsIndex) -> np.ndarray | PackedBatch:
        index = operator.index(step)
        if not 0 <= index < self.steps:
            raise IndexError(f"step must lie in [0, {self.steps}), got {index}")
        return self.batches.batch_at(index)


@dataclasses.dataclass(frozen=True)
class PackedBatches:
    """Batches of rows of whole documents.

    Attributes:
      streams: one per source.
      starts: where each document of each stream opens.
      packed: the packing of each source.
      eos_id: fills padding.
      order: which rows; make it with ``packed_batches``.
    """

    streams: tuple[np.ndarray, ...]
    starts: tuple[np.ndarray, ...]
    packed: tuple[Packed, ...]
    eos_id: int
    order: RowOrder

    def batch_at(self, step: int) -> PackedBatch:
        """The batch of ``step``, with segments, positions and mask."""
        sources, rows = self.order.at(step)
        parts, places = [], []
        for source in np.unique(sources):
            here = np.flatnonzero(sources == source)
            places.append(here)
            parts.append(
                gather_rows(
                    self.streams[source], self.starts[source], self.packed[source], rows[here],
                    eos_id=self.eos_id,
                )
            )  # fmt: skip
        back = np.argsort(np.concatenate(places))
        return PackedBatch(
            *(
                np.concatenate([getattr(part, field.name) for part in parts])[back]
                for field in dataclasses.fields(PackedBatch)
            )
        )


def packed_batches(
    streams: Sequence[np.ndarray],
    counts: Sequence[int],
    *,
    batch_size: int,
    seq_len: int,
    eos_id: int,
    seed: int,
    method: Method = "best-fit",
    long: Long = "split",
    process_index: int = 0,
    process_count: int = 1,
) -> PackedBatches:
    """Packs every stream and mixes its rows in the proportions ``counts``.

    The shares are of rows, and equal those of targets as far as padding is equal: see the
    reports of ``packed``.
    """
    limits = [document_limits(stream, eos_id=eos_id) for stream in streams]
    packed = tuple(
        pack_documents(lengths, seq_len=seq_len, method=method, long=long) for _, lengths in limits
    )
    order = RowOrder(
        MixtureSchedule(tuple(counts)), tuple(p.rows for p in packed), batch_size, seed,
        process_index, process_count,
    )  # fmt: skip
    return PackedBatches(
        tuple(streams), tuple(starts for starts, _ in limits), packed, eos_id, order
    )
