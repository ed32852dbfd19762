"""Duplicates as stages: one decision over all documents, then its execution shard by shard."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from experiments.data.documents import Document, write_json
from experiments.data.near_duplicates import NearDuplicateConfig, near_duplicates
from experiments.data.pipeline.records import Record, Tally, read_records
from experiments.data.pipeline.stages import Unit
from experiments.data.substrings import SubstringConfig, repeated_substrings

DECISIONS = "decisions.json"
CUTS = "cuts.npz"
COUNTS = "counts.json"


def decide_near_duplicates(
    folder: Path,
    documents: Iterable[Document],
    config: NearDuplicateConfig,
    *,
    held: Sequence[Document],
    workers: int,
) -> None:
    """Writes ``decisions.json``: for each dropped document, which one it resembles and how much.

    Args:
      folder: of the stage; nothing happens when the file is there.
      documents: of the corpus; may be iterated twice.
      config: what counts as a near duplicate.
      held: documents that none may resemble.
      workers: threads.
    """
    if (folder / DECISIONS).is_file():
        return
    found = near_duplicates(documents, config, held_out=held or None, workers=workers)
    wanted = set(found.kept.tolist())
    ids = {i: document.id for i, document in enumerate(documents) if i in wanted}
    total = len(found.keep)
    ids |= {total + j: f"held out: {document.id}" for j, document in enumerate(held)}
    rows = zip(found.dropped, found.kept, found.similarity, strict=True)
    value = {
        "counts": found.counts,
        "curve": config.curve(),
        "dropped": {
            str(int(index)): [ids[int(kept)], bool(kept >= total), round(float(similarity), 4)]
            for index, kept, similarity in rows
        },
    }
    write_json(folder / DECISIONS, value)


@functools.lru_cache(maxsize=1)
def _dropped(path: Path, time_ns: int) -> dict[str, list[Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["dropped"]


@dataclasses.dataclass(frozen=True)
class NearDuplicateStage:
    """Drops what ``decide_near_duplicates`` decided on; the detail names the one that stays."""

    config: NearDuplicateConfig
    name: ClassVar[str] = "near_duplicates"
    version: ClassVar[int] = 1

    @property
    def settings(self) -> NearDuplicateConfig:
        return self.config

    def records(self, unit: Unit, root: Path, folder: Path, tally: Tally) -> Iterator[Record]:
        shard, first = unit.payload
        path = folder / DECISIONS
        dropped = _dropped(path, path.stat().st_mtime_ns)
        for index, record in enumerate(read_records(root / shard), start=first):
            decision = dropped.get(str(index))
            if decision is None:
                yield record
                continue
            kept, is_held_out, similarity = decision
            reason = "resembles held-out text" if is_held_out else "near duplicate"
            tally.drop(reason, record, f"{similarity:.3f} like {kept}")


def decide_cuts(
    folder: Path,
    documents: Iterable[Document],
    config: SubstringConfig,
    *,
    held: Sequence[Document],
    workers: int,
) -> None:
    """Writes ``cuts.npz`` (document, first and last byte of each cut) and ``counts.json``.

    Args:
      folder: of the stage; nothing happens when the files are there.
      documents: of the corpus; may be iterated again.
      config: which repeats are cut.
      held: documents whose text is cut from the others.
      workers: threads.
    """
    if (folder / COUNTS).is_file():
        return
    found = repeated_substrings(documents, config, held_out=held or None, workers=workers)
    rows = [
        (index, start, end)
        for index, document in enumerate(documents)
        for start, end in found.spans(len(held) + index, document.text.encode())
    ]
    temporary = folder / f"{CUTS}.tmp"
    with temporary.open("wb") as file:
        np.savez_compressed(file, cuts=np.array(rows, dtype=np.int64).reshape(-1, 3))
    temporary.replace(folder / CUTS)
    names = ("documents", "bytes", "candidate_bytes", "partitions", "largest_partition")
    counts = {name.replace("_", " "): getattr(found.stats, name) for name in names}
    counts["spans cut"] = len(rows)
    counts["bytes cut"] = sum(end - start for _, start, end in rows)
    write_json(folder / COUNTS, counts)


@functools.lru_cache(maxsize=1)
def _cuts(path: Path, time_ns: int) -> np.ndarray:
    with np.load(path) as arrays:
        return arrays["cuts"]


@dataclasses.dataclass(frozen=True)
class SubstringStage:
    """Cuts what ``decide_cuts`` decided on; a document of which too little is left is dropped.

    Attributes:
      config: what counts as a repeat.
      exempt: sources that nothing is cut from.
    """

    config: SubstringConfig
    exempt: tuple[str, ...] = ()
    name: ClassVar[str] = "substrings"
    version: ClassVar[int] = 1

    @property
    def settings(self) -> list[Any]:
        return [self.config, self.exempt]

    def records(self, unit: Unit, root: Path, folder: Path, tally: Tally) -> Iterator[Record]:
        shard, first = unit.payload
        path = folder / CUTS
        cuts = _cuts(path, path.stat().st_mtime_ns)
        limits = functools.partial(np.searchsorted, cuts[:, 0])
        for index, record in enumerate(read_records(root / shard), start=first):
            if record.source in self.exempt:
                yield record
                continue
            spans = cuts[limits(index, side="left") : limits(index, side="right"), 1:].tolist()
            kept = cut_spans(record, spans, self.config, tally) if spans else record
            if kept is not None:
                yield kept


def cut_spans(
    record: Record, spans: list[list[int]], config: SubstringConfig, tally: Tally
) -> Record | None:
    """A record without the given bytes; None when too little is left."""
    data = record.text.encode()
    limits = [0, *(limit for span in spans for limit in span), len(data)]
    pieces = [data[a:b].decode() for a, b in zip(limits[::2], limits[1::2], strict=True) if a < b]
    text = config.joint.join(pieces)
    if sum(map(len, text.split())) < config.min_rest:
        tally.drop("nothing but repeats", record)
        return None
    start, end = spans[0]
    tally.change("documents with repeats cut")
    tally.change("bytes of repeats cut", sum(b - a for a, b in spans))
    tally.bytes_dropped += len(data) - len(text.encode())
    tally.sample(
        "documents with repeats cut", record.id, data[start:end].decode(), f"{end - start} bytes"
    )
    return dataclasses.replace(record, text=text)
