"""The build: every stage in order, then the manifest and the report.

``OUT/1-read``, ``OUT/2-clean``, ... hold one stage each; ``OUT/manifest.json`` makes the last
stage's shards a corpus that ``load_dataset`` opens.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from experiments.data.documents import MANIFEST_FORMAT, MANIFEST_NAME, write_json
from experiments.data.pipeline.clean import CleanStage
from experiments.data.pipeline.config import BuildConfig
from experiments.data.pipeline.duplicates import (
    COUNTS,
    DECISIONS,
    NearDuplicateStage,
    SubstringStage,
    decide_cuts,
    decide_near_duplicates,
)
from experiments.data.pipeline.finish import (
    mix_sources,
    packing_rows,
    timed,
    tokenize_cpu_seconds,
    tokenize_shards,
)
from experiments.data.pipeline.quality import (
    THRESHOLDS,
    QualityClassifier,
    ScoreStage,
    SelectStage,
    prepare_model,
    prepare_thresholds,
)
from experiments.data.pipeline.readers import (
    COMPRESSED,
    InputFile,
    ReadConfig,
    SourceConfig,
    find_files,
    read_file,
)
from experiments.data.pipeline.records import Record, ShardStream, Tally
from experiments.data.pipeline.report import build_report, write_report
from experiments.data.pipeline.stages import (
    BuildError,
    Shard,
    Stage,
    StageResult,
    Unit,
    WorkerPool,
    clean_stop,
    read_json,
    run_stage,
)

COMPRESSION = 4  # of text by gzip and zstd, roughly: it only shapes the units of work


@dataclasses.dataclass(frozen=True)
class ReadStage:
    """Files to shards; a unit's payload is a tuple of files of one source."""

    config: ReadConfig
    name: ClassVar[str] = "read"
    version: ClassVar[int] = 1

    @property
    def settings(self) -> ReadConfig:
        return self.config

    def records(self, unit: Unit, root: Path, folder: Path, tally: Tally) -> Iterator[Record]:
        for file in unit.payload:
            yield from read_file(file, self.config, tally)


@dataclasses.dataclass
class Build:
    """A build under way: its configuration, its folder, the stages done, more for the report."""

    config: BuildConfig
    root: Path
    pool: WorkerPool
    results: list[StageResult] = dataclasses.field(default_factory=list)
    sections: dict[str, Any] = dataclasses.field(default_factory=dict)
    timings: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.results[-1].shards

    def shard_digests(self) -> list[list[str]]:
        """What the next stage's output depends on."""
        return [[shard.path, shard.sha256] for shard in self.shards]

    def run(
        self,
        stage: Stage,
        units: Sequence[Unit],
        inputs: Any,
        prepare: Callable[[Path], object] | None = None,
    ) -> StageResult:
        """Runs one stage and appends its result."""
        result = run_stage(
            stage,
            units,
            root=self.root,
            folder=f"{len(self.results) + 1}-{stage.name}",
            inputs=inputs,
            pool=self.pool,
            shard_bytes=int(self.config.read.shard_mb * 1e6),
            prepare=prepare,
        )
        self.results.append(result)
        return result

    def run_on_shards(
        self, stage: Stage, *, inputs: Any = None, prepare: Callable[[Path], object] | None = None
    ) -> StageResult:
        """Runs a stage that takes one shard per unit: the payload is its path and where it
        starts in the count of all documents."""
        units, first = [], 0
        for i, shard in enumerate(self.shards):
            units.append(Unit(f"{i:05d}", (shard.path, first)))
            first += shard.documents
        return self.run(stage, units, [self.shard_digests(), inputs], prepare)

    def stream(self) -> ShardStream:
        """The documents of the last stage, as often as wanted."""
        return ShardStream(self.root, self.shards)


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
    root = base / config.out
    with clean_stop(root), WorkerPool(config.processes, progress=progress) as pool:
        build = Build(config, root, pool)
        build.root.mkdir(parents=True, exist_ok=True)
        read_sources(build, base)
        if config.clean is not None:
            build.run_on_shards(CleanStage(config.clean))
        held = Held.of(config, base)
        if config.near_duplicates is not None:
            drop_near_duplicates(build, held)
        if config.substrings is not None:
            cut_substrings(build, held)
        if config.quality is not None:
            select_by_quality(build, base)
        write_manifest(build)
        if config.tokenize is not None:
            make_batches(build, base)
        report = build_report(config, build.results, build.sections, build.timings)
        write_report(build.root, report)
    return build


def read_sources(build: Build, base: Path) -> StageResult:
    """The first stage: finds the files of every source and reads them."""
    found = Tally()
    files = [file for source in build.config.source for file in find_files(source, base, found)]
    limit = int(build.config.read.shard_mb * 1e6)
    units = [Unit(f"{i:05d}", group) for i, group in enumerate(group_files(files, limit))]
    result = build.run(ReadStage(build.config.read), units, file_digests(files))
    result.tally.merge(found)
    return result


def file_digests(files: Sequence[InputFile]) -> list[list[Any]]:
    """What a file's content is known by: name, size and time.

    Not by a checksum: reading everything to find out whether to read it is no gain.
    """
    return [
        [file.source, file.name, file.size, file.path.stat().st_mtime_ns, file.format,
         file.text_field]
        for file in files
    ]  # fmt: skip


def drop_near_duplicates(build: Build, held: Held) -> StageResult:
    """Near duplicates within the corpus, and of the held-out sources."""
    config = build.config.near_duplicates
    assert config is not None
    stream = build.stream()

    def prepare(folder: Path) -> None:
        workers = build.config.processes
        decide_near_duplicates(folder, stream, config, held=held.read(), workers=workers)

    result = build.run_on_shards(NearDuplicateStage(config), inputs=held.digests, prepare=prepare)
    decisions = read_json(result.folder / DECISIONS)
    build.sections["Near duplicates"] = decisions["counts"]
    build.sections["Near duplicates: chance that a pair becomes a candidate"] = decisions["curve"]
    return result


def cut_substrings(build: Build, held: Held) -> StageResult:
    """Exact repeats within the corpus, and of the held-out sources."""
    config = build.config.substrings
    assert config is not None
    stream = build.stream()

    def prepare(folder: Path) -> None:
        decide_cuts(folder, stream, config, held=held.read(), workers=build.config.processes)

    result = build.run_on_shards(
        SubstringStage(config, build.config.substrings_exempt),
        inputs=held.digests,
        prepare=prepare,
    )
    build.sections["Exact substrings"] = read_json(result.folder / COUNTS)
    return result


@dataclasses.dataclass(frozen=True)
class Held:
    """The held-out text of a build."""

    files: tuple[InputFile, ...]
    config: ReadConfig

    @classmethod
    def of(cls, config: BuildConfig, base: Path) -> Held:
        tally = Tally()
        files = tuple(f for source in config.held_out for f in find_files(source, base, tally))
        _check_all_read(tally)
        return cls(files, config.read)

    @property
    def digests(self) -> list[list[Any]]:
        return file_digests(self.files)

    def read(self) -> list[Record]:
        """All of it; raises BuildError when some cannot be read."""
        tally = Tally()
        records = [record for file in self.files for record in read_file(file, self.config, tally)]
        _check_all_read(tally)
        return records


def _check_all_read(tally: Tally) -> None:
    if tally.faults:  # a benchmark that was not read would pass for one that is clean
        raise BuildError(f"held-out text cannot all be read: {dict(tally.faults)}")


def select_by_quality(build: Build, base: Path) -> StageResult:
    """Scores every document, then drops by quantiles of each source."""
    config, read = build.config.quality, build.config.read
    assert config is not None
    inputs: list[Any] = []
    prepare = model_file = None
    if config.perplexity is not None:
        reference = SourceConfig("reference", config.perplexity.reference)
        files = find_files(reference, base, Tally())
        inputs += file_digests(files)
        texts = (record.text for file in files for record in read_file(file, read, Tally()))
        prepare = functools.partial(prepare_model, texts=texts, config=config.perplexity)
    if config.classifier is not None:
        model_file = base / config.classifier.model
        QualityClassifier.load(model_file)  # a clear error now, not in a worker
        inputs.append(hashlib.sha256(model_file.read_bytes()).hexdigest())
    stage = ScoreStage(config, str(model_file) if model_file else None)
    build.run_on_shards(stage, inputs=inputs, prepare=prepare)
    stream = build.stream()
    result = build.run_on_shards(
        SelectStage(config),
        prepare=functools.partial(prepare_thresholds, records=stream, config=config),
    )
    found = read_json(result.folder / THRESHOLDS)
    build.sections["Quality scores: quantiles"] = found["quantiles"]
    return result


def make_batches(build: Build, base: Path) -> None:
    """The token store, the mixture and the report on packing."""
    config = build.config
    assert config.tokenize is not None
    folder = f"{len(build.results) + 1}-tokenize"
    tokenize = functools.partial(
        tokenize_shards, build.root, build.shards, config.tokenize, base,
        folder=folder, pool=build.pool,
    )  # fmt: skip
    build.sections |= timed(build.timings, "tokenize", tokenize)
    build.timings["tokenize, CPU"] = round(tokenize_cpu_seconds(build.root / folder), 2)
    rows = mix_sources(build.root, config.groups, config.mix)
    build.sections["Mixture"] = rows
    packing = functools.partial(packing_rows, build.root, config.pack)
    title = f"Packing into rows of {config.pack.seq_len}, used: {config.pack.method}"
    build.sections[title] = timed(build.timings, "pack", packing)


def group_files(files: Sequence[InputFile], limit: int) -> Iterator[tuple[InputFile, ...]]:
    """Runs of files of one source, of about ``limit`` bytes of text or one file each."""
    group: list[InputFile] = []
    size = 0
    for file in files:
        text = file.size * (COMPRESSION if file.path.suffix in COMPRESSED else 1)
        if group and (file.source != group[0].source or size + text > limit):
            yield tuple(group)
            group, size = [], 0
        group.append(file)
        size += text
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
