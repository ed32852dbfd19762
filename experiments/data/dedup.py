"""The ``dedup`` command: near duplicates and exact repeats of files, with the evidence beside."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import tyro

from experiments.data.documents import Document, read_shard, write_json, write_shard
from experiments.data.near_duplicates import NearDuplicateConfig, NearDuplicates, near_duplicates
from experiments.data.pipeline.readers import ReadConfig, SourceConfig, find_files, read_file
from experiments.data.pipeline.records import Record, Tally
from experiments.data.substrings import SubstringConfig, cut_repeats

KEPT, DROPPED, REPORT = "documents.jsonl.zst", "dropped.jsonl.zst", "dedup.json"
Stage = Literal["near", "substrings"]


class Spool:
    """The documents of files and folders, in one shard that is read again for each pass.

    The source of a document is the name of the path that it came from. The order is that of the
    paths, then of file names. Files are decoded and made valid once; text is not held in memory.
    """

    def __init__(self, shard: Path, paths: tuple[Path, ...], *, text_field: str) -> None:
        self.shard = shard
        tally = Tally()
        files = [
            file for path in paths for file in find_files(_source(path, text_field), Path(), tally)
        ]
        documents = (d for file in files for d in read_file(file, ReadConfig(), tally))
        write_shard(shard, documents, level=1)
        self.faults = dict(tally.faults + tally.dropped)

    def __iter__(self) -> Iterator[Document]:
        return read_shard(self.shard)


def _source(path: Path, text_field: str) -> SourceConfig:
    return SourceConfig(path.name.split(".")[0] or "input", (str(path),), text_field=text_field)


class Kept:
    """Those of some documents that stay."""

    def __init__(self, documents: Spool, found: NearDuplicates) -> None:
        self.documents, self.found = documents, found

    def __iter__(self) -> Iterator[Document]:
        for document, keep in zip(self.documents, self.found.keep, strict=True):
            if keep:
                yield document


@dataclasses.dataclass(frozen=True)
class Dedup:
    """Drops near duplicates and cuts exact repeats: JSONL, Parquet, text or code, also .gz, .zst.

    Writes the documents that stay, one row of evidence for each one dropped, and the counts.
    """

    inputs: tyro.conf.Positional[tuple[Path, ...]]
    """Files and folders; each is a source, and earlier ones come first."""
    out: Path
    """Folder for documents.jsonl.zst, dropped.jsonl.zst and dedup.json."""
    held_out: tuple[Path, ...] = ()
    """Files and folders of an evaluation set: what resembles or repeats it goes."""
    stages: tuple[Stage, ...] = ("near", "substrings")
    """What to do; near duplicates go first."""
    near: NearDuplicateConfig = dataclasses.field(default_factory=NearDuplicateConfig)
    """What counts as a near duplicate."""
    substrings: SubstringConfig = dataclasses.field(default_factory=SubstringConfig)
    """What counts as an exact repeat."""
    text_field: str = "text"
    """The column of the text in JSONL and Parquet."""
    workers: int = 2
    """Threads; no byte of the output depends on it."""

    def run(self) -> None:
        if not self.inputs:
            raise ValueError("inputs: name at least one file or folder")
        if not self.stages:
            raise ValueError("stages: name near, substrings or both")
        self.out.mkdir(parents=True, exist_ok=True)
        for name in (KEPT, DROPPED, REPORT):  # of an earlier run
            (self.out / name).unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=self.out, prefix="spool-") as folder:
            spools = [
                Spool(Path(folder) / name, paths, text_field=self.text_field)
                for name, paths in (("input", self.inputs), ("held_out", self.held_out))
            ]
            report = self._run(*spools)
        write_json(self.out / REPORT, report)
        print(json.dumps(report, indent=2, ensure_ascii=False))

    def _run(self, files: Spool, held: Spool) -> dict[str, Any]:
        report: dict[str, Any] = {"stages": list(self.stages)}
        documents: Spool | Kept = files
        if "near" in self.stages:
            print(self.near.curve(), file=sys.stderr)
            found = near_duplicates(files, self.near, held_out=held, workers=self.workers)
            write_shard(self.out / DROPPED, evidence(files, held, found))
            documents = Kept(files, found)
            report["near_duplicates"] = found.counts
        stream: Iterator[Document] = iter(documents)
        if "substrings" in self.stages:
            stream, stats = cut_repeats(
                documents, self.substrings, held_out=held, workers=self.workers
            )
            written = write_shard(self.out / KEPT, stream)
            report["substrings"] = dataclasses.asdict(stats)
        else:
            written = write_shard(self.out / KEPT, stream)
        return report | {
            "kept": {"documents": written.documents, "bytes": written.bytes},
            "sha256": written.hexdigest(),
            "faults": files.faults,
        }


def evidence(files: Spool, held: Spool, found: NearDuplicates) -> Iterator[Record]:
    """The dropped documents, with the id of the one that each resembles and the similarity."""
    total = len(found.keep)
    wanted = set(found.kept.tolist())
    names = {i: document.id for i, document in enumerate(files) if i in wanted}
    names |= {total + j: f"held-out {d.id}" for j, d in enumerate(held) if total + j in wanted}
    rows = zip(found.dropped.tolist(), found.kept.tolist(), found.similarity.tolist(), strict=True)
    like = {index: (names[kept], similarity) for index, kept, similarity in rows}
    for index, document in enumerate(files):
        if index in like:
            name, similarity = like[index]
            notes = {"like": name, "similarity": round(similarity, 4)}
            yield Record(document.id, document.source, document.text, notes)
