"""Near duplicates as a stage: one decision over all documents, then a filter over shards."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from experiments.data.documents import Document, write_json
from experiments.data.near_duplicates import NearDuplicateConfig, near_duplicates
from experiments.data.pipeline.records import Record, Tally, read_records
from experiments.data.pipeline.stages import Unit

DECISIONS = "decisions.json"


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
