"""Records on their way through the build: documents with scores, shards of them, and a tally."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import heapq
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.data.documents import Document, read_shard_rows

SAMPLES = 5  # kept of each reason
SAMPLE_CHARACTERS = 600


@dataclasses.dataclass(frozen=True, slots=True)
class Record(Document):
    """A document with what the stages found out about it.

    Attributes:
      notes: JSON values by name: ``language``, ``perplexity``, ``quality``.
    """

    notes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def noted(self, **notes: Any) -> Record:
        """A copy with more notes."""
        return dataclasses.replace(self, notes={**self.notes, **notes})


def read_records(path: Path) -> Iterator[Record]:
    """The records of a shard, with their notes."""
    for row in read_shard_rows(path):
        yield Record(row["id"], row["source"], row["text"], row.get("notes", {}))


@dataclasses.dataclass(frozen=True)
class ShardStream:
    """The records of shards in order; iterate as often as wanted, nothing is held in memory."""

    root: Path
    shards: Sequence[Any]

    def __iter__(self) -> Iterator[Record]:
        for shard in self.shards:
            yield from read_records(self.root / shard.path)


@dataclasses.dataclass
class Tally:
    """What a stage did, and why, with samples of what it dropped.

    The samples of a reason are those whose ids have the smallest hashes: a uniform choice
    that does not depend on the order of the work, so any number of workers keeps the same.

    Attributes:
      dropped: documents dropped, by reason.
      changed: documents altered, by reason (or occurrences, where the reason says so).
      faults: files or rows that could not be read, by reason.
      samples: reason -> [hash, id, text, detail].
      bytes_dropped: UTF-8 text that left the corpus, in bytes.
    """

    dropped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    changed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    faults: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    samples: dict[str, list[list[str]]] = dataclasses.field(default_factory=dict)
    bytes_dropped: int = 0

    def drop(self, reason: str, document: Document, detail: str = "") -> None:
        """Counts a dropped document, and maybe keeps it as a sample."""
        self.dropped[reason] += 1
        self.bytes_dropped += len(document.text.encode())
        self.sample(reason, document.id, document.text, detail)

    def change(self, reason: str, count: int = 1) -> None:
        if count:
            self.changed[reason] += count

    def fault(self, reason: str, where: str, detail: str = "") -> None:
        """Counts input that could not be read; ``where`` names the file and row."""
        self.faults[reason] += 1
        self.sample(reason, where, "", detail)

    def sample(self, reason: str, name: str, text: str, detail: str = "") -> None:
        key = hashlib.blake2b(name.encode(errors="replace"), digest_size=8).hexdigest()
        row = [key, name, text[:SAMPLE_CHARACTERS], detail]
        self.samples[reason] = heapq.nsmallest(SAMPLES, [*self.samples.get(reason, []), row])

    def merge(self, other: Tally) -> None:
        """Adds another shard's tally."""
        self.dropped.update(other.dropped)
        self.changed.update(other.changed)
        self.faults.update(other.faults)
        self.bytes_dropped += other.bytes_dropped
        for reason, rows in other.samples.items():
            merged = [*self.samples.get(reason, []), *rows]
            self.samples[reason] = heapq.nsmallest(SAMPLES, merged)

    def to_json(self) -> dict[str, Any]:
        """Plain values with sorted keys: equal tallies give equal bytes."""
        return {
            "dropped": dict(sorted(self.dropped.items())),
            "changed": dict(sorted(self.changed.items())),
            "faults": dict(sorted(self.faults.items())),
            "bytes_dropped": self.bytes_dropped,
            "samples": dict(sorted(self.samples.items())),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Tally:
        counters = {
            key: collections.Counter(value[key]) for key in ("dropped", "changed", "faults")
        }
        return cls(**counters, samples=value["samples"], bytes_dropped=value["bytes_dropped"])


def digest_of(value: Any) -> str:
    """SHA-256 of a JSON value (dataclasses as objects, paths as text), keys sorted."""
    text = json.dumps(value, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in a fingerprint")
