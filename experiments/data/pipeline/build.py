"""The build: every stage in order, then the manifest and the report.

``OUT/1-read``, ``OUT/2-clean``, ... hold one stage each; ``OUT/manifest.json`` makes the last
stage's shards a corpus that ``load_dataset`` opens.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from experiments.data.documents import MANIFEST_FORMAT, MANIFEST_NAME, write_json
from experiments.data.pipeline.clean import CleanStage
from experiments.data.pipeline.config import BuildConfig
from experiments.data.pipeline.readers import InputFile, ReadConfig, find_files, read_file
from experiments.data.pipeline.records import Record, Tally
from experiments.data.pipeline.report import build_report, write_report
from experiments.data.pipeline.stages import Shard, Stage, StageResult, Unit, clean_stop, run_stage

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ReadStage:
    """Files to shards; a unit's payload is a tuple of files of one source."""

    config: ReadConfig
    name: ClassVar[str] = "read"
    version: ClassVar[int] = 1

    @property
    def settings(self) -> ReadConfig:
        return self.config

    def records(self, unit: Unit, root: Path, tally: Tally) -> Iterator[Record]:
        for file in unit.payload:
            yield from read_file(file, self.config, tally)


@dataclasses.dataclass
class Build:
    """A build under way: its configuration, its folder, the stages done, more for the report."""

    config: BuildConfig
    root: Path
    progress: bool = True
    results: list[StageResult] = dataclasses.field(default_factory=list)
    sections: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.results[-1].shards

    def shard_digests(self) -> list[list[str]]:
        """What the next stage's output depends on."""
        return [[shard.path, shard.sha256] for shard in self.shards]

    def run(self, stage: Stage, units: Sequence[Unit], inputs: Any) -> StageResult:
        """Runs one stage and appends its result."""
        result = run_stage(
            stage,
            units,
            root=self.root,
            folder=f"{len(self.results) + 1}-{stage.name}",
            inputs=inputs,
            workers=self.config.processes,
            shard_bytes=int(self.config.read.shard_mb * 1e6),
            progress=self.progress,
        )
        self.results.append(result)
        return result

    def run_on_shards(self, stage: Stage) -> StageResult:
        """Runs a stage that takes one shard per unit."""
        units = [Unit(f"{i:05d}", shard.path) for i, shard in enumerate(self.shards)]
        return self.run(stage, units, self.shard_digests())


def run_build(config: BuildConfig, base: Path, *, progress: bool = True) -> Build:
    """Runs or continues a build.

    Args:
      config: what to do.
      base: the folder that relative paths of the configuration start from.
      progress: shows a bar per stage.

    Raises:
      ValueError: a source that is not there.
      BuildError: the disk is full or workers keep dying; the same call continues.
    """
    build = Build(config, base / config.out, progress)
    with clean_stop(build.root):
        build.root.mkdir(parents=True, exist_ok=True)
        read_sources(build, base)
        if config.clean is not None:
            build.run_on_shards(CleanStage(config.clean))
        write_manifest(build)
        write_report(build.root, build_report(config, build.results, build.sections))
    return build


def read_sources(build: Build, base: Path) -> StageResult:
    """The first stage: finds the files of every source and reads them."""
    found = Tally()
    files = [file for source in build.config.source for file in find_files(source, base, found)]
    limit = int(build.config.read.shard_mb * 1e6)
    units = [Unit(f"{i:05d}", group) for i, group in enumerate(group_files(files, limit))]
    # Times instead of contents: reading everything to find out whether to read it is no gain.
    inputs = [[file.source, file.name, file.size, file.path.stat().st_mtime_ns, file.format,
               file.text_field] for file in files]  # fmt: skip
    result = build.run(ReadStage(build.config.read), units, inputs)
    result.tally.merge(found)
    return result


def group_files(files: Sequence[InputFile], limit: int) -> Iterator[tuple[InputFile, ...]]:
    """Runs of files of one source, of at most ``limit`` bytes on disk or one file each."""
    group: list[InputFile] = []
    size = 0
    for file in files:
        if group and (file.source != group[0].source or size + file.size > limit):
            yield tuple(group)
            group, size = [], 0
        group.append(file)
        size += file.size
    if group:
        yield tuple(group)


def write_manifest(build: Build) -> None:
    """Makes the last stage's shards a corpus in the sense of ``documents.read_corpus``."""
    entries = [
        {
            "name": shard.source, "group": shard.source, "package": "build", "version": "",
            "licence": "of its source", "file": shard.path, "documents": shard.documents,
            "bytes": shard.bytes, "sha256": shard.sha256,
        }
        for shard in build.shards
    ]  # fmt: skip
    manifest = {"format": MANIFEST_FORMAT, "name": build.root.name, "sources": entries}
    write_json(build.root / MANIFEST_NAME, manifest)
