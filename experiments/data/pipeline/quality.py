"""Quality as two stages: score every document, then drop by quantiles of the scores.

Scores stay beside each document (``notes``), also of those that a source is exempt for, so
that other thresholds need no new scoring.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from experiments.data.documents import Document, write_json
from experiments.data.pipeline.classifier import QualityClassifier, train_classifier
from experiments.data.pipeline.ngram_lm import NgramModel, train_ngram_model
from experiments.data.pipeline.records import Record, Tally, read_records
from experiments.data.pipeline.stages import Unit, read_json

MODEL = "ngrams.npz"
THRESHOLDS = "thresholds.json"
SCORES = ("perplexity", "quality")


@dataclasses.dataclass(frozen=True)
class PerplexityConfig:
    """Perplexity under an n-gram model of reference text (``ngram_lm``).

    Attributes:
      reference: files or folders of text that counts as good, read as a source is.
      order: longest n-gram, 1 to 3.
      bits: log2 of the buckets per order.
      quantiles: documents below the first or above the second quantile of their source are
        dropped. Both tails: very low perplexity is boilerplate and lists.
      exempt: sources that are scored but never dropped.
    """

    reference: tuple[str, ...]
    order: int = 3
    bits: int = 22
    quantiles: tuple[float, float] = (0.0, 0.95)
    exempt: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        low, high = self.quantiles
        if not 0 <= low < high <= 1:
            raise ValueError(f"quantiles must satisfy 0 <= low < high <= 1, got {self.quantiles}")


@dataclasses.dataclass(frozen=True)
class ClassifierConfig:
    """The linear classifier that ``python -m experiments.data train-quality`` made.

    Attributes:
      model: its file, relative to the configuration's.
      min_quantile: documents below this quantile of their source are dropped.
      exempt: sources that are scored but never dropped.
    """

    model: str
    min_quantile: float = 0.1
    exempt: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.min_quantile < 1:
            raise ValueError(f"min_quantile must lie in [0, 1), got {self.min_quantile}")


@dataclasses.dataclass(frozen=True)
class QualityConfig:
    """Scores and thresholds; a part that is missing is not computed.

    Attributes:
      perplexity: of an n-gram model.
      classifier: linear, on hashed n-grams.
      min_documents: in a source with fewer, quantiles mean little and nothing is dropped.
    """

    perplexity: PerplexityConfig | None = None
    classifier: ClassifierConfig | None = None
    min_documents: int = 20

    def __post_init__(self) -> None:
        if self.perplexity is None and self.classifier is None:
            raise ValueError("[quality] needs [quality.perplexity] or [quality.classifier]")


@dataclasses.dataclass(frozen=True)
class ScoreStage:
    """Adds ``perplexity`` and ``quality`` to the notes of every document."""

    config: QualityConfig
    classifier_file: str | None
    name: ClassVar[str] = "score"
    version: ClassVar[int] = 1

    @property
    def settings(self) -> list[Any]:
        # Thresholds are the next stage's: changing one must not score again.
        perplexity = self.config.perplexity
        return [perplexity and [perplexity.order, perplexity.bits], bool(self.classifier_file)]

    def records(self, unit: Unit, root: Path, folder: Path, tally: Tally) -> Iterator[Record]:
        model = _cached(_ngram_model, folder / MODEL if self.config.perplexity else None)
        file = self.classifier_file
        classifier = _cached(_classifier, Path(file) if file else None)
        yield from score_documents(read_records(root / unit.payload[0]), model, classifier)


def score_documents(
    documents: Iterable[Record], model: NgramModel | None, classifier: QualityClassifier | None
) -> Iterator[Record]:
    """The documents with their scores in the notes, to six digits."""
    for record in documents:
        notes: dict[str, float | None] = {}
        if model is not None:
            notes["perplexity"] = _rounded(model.perplexity(record.text))
        if classifier is not None:
            notes["quality"] = _rounded(classifier.score(record.text))
        yield record.noted(**notes)


def _rounded(score: float) -> float | None:
    """None for NaN, which JSON has no word for: a document without words has no score."""
    return None if math.isnan(score) else float(f"{score:.6g}")


@functools.lru_cache(maxsize=1)
def _ngram_model(path: Path, time_ns: int) -> NgramModel:
    return NgramModel.load(path)


@functools.lru_cache(maxsize=1)
def _classifier(path: Path, time_ns: int) -> QualityClassifier:
    return QualityClassifier.load(path)


def _cached(load: Callable[[Path, int], Any], path: Path | None) -> Any:
    """Loaded once per process and version of the file: a unit is a few seconds of work."""
    return None if path is None else load(path, path.stat().st_mtime_ns)


def prepare_model(folder: Path, texts: Iterable[str], config: PerplexityConfig) -> None:
    """Trains the n-gram model into a stage's folder, unless it is there."""
    if (folder / MODEL).is_file():
        return
    model = train_ngram_model(texts, order=config.order, bits=config.bits)
    temporary = folder / f"{MODEL}.tmp"
    model.save(temporary)
    temporary.replace(folder / MODEL)


def prepare_thresholds(folder: Path, records: Iterable[Record], config: QualityConfig) -> None:
    """Writes the bounds of every source and the quantiles for the report."""
    if (folder / THRESHOLDS).is_file():
        return
    scores: dict[str, dict[str, list[float]]] = {}
    for record in records:
        by_name = scores.setdefault(record.source, {name: [] for name in SCORES})
        for name in SCORES:
            if (score := record.notes.get(name)) is not None:
                by_name[name].append(score)
    value = {"bounds": {}, "quantiles": []}
    for source, by_name in scores.items():
        value["bounds"][source] = _bounds(source, by_name, config)
        value["quantiles"] += [_quantile_row(source, name, by_name[name]) for name in SCORES
                               if by_name[name]]  # fmt: skip
    write_json(folder / THRESHOLDS, value)


def _bounds(
    source: str, scores: dict[str, list[float]], config: QualityConfig
) -> dict[str, list[float]]:
    """Per score [low, high]; what lies outside is dropped."""
    found = {}
    perplexity, classifier = config.perplexity, config.classifier
    wanted = {
        "perplexity": perplexity.quantiles if perplexity else None,
        "quality": (classifier.min_quantile, 1.0) if classifier else None,
    }
    exempt = {
        "perplexity": perplexity.exempt if perplexity else (),
        "quality": classifier.exempt if classifier else (),
    }
    for name, quantiles in wanted.items():
        enough = len(scores[name]) >= max(1, config.min_documents)
        if quantiles is not None and enough and source not in exempt[name]:
            found[name] = [float(bound) for bound in np.quantile(scores[name], quantiles)]
    return found


def _quantile_row(source: str, name: str, scores: list[float]) -> dict[str, Any]:
    levels = (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)
    values = np.quantile(scores, levels)
    return {
        "source": source, "score": name, "documents": len(scores),
        **{f"{level:.0%}": float(value) for level, value in zip(levels, values, strict=True)},
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SelectStage:
    """Drops what lies outside the bounds of its source."""

    config: QualityConfig
    name: ClassVar[str] = "select"
    version: ClassVar[int] = 1

    @property
    def settings(self) -> QualityConfig:
        return self.config

    def records(self, unit: Unit, root: Path, folder: Path, tally: Tally) -> Iterator[Record]:
        bounds = read_json(folder / THRESHOLDS)["bounds"]
        yield from select_documents(read_records(root / unit.payload[0]), bounds, tally)


def select_documents(
    documents: Iterable[Record], bounds: dict[str, dict[str, list[float]]], tally: Tally
) -> Iterator[Record]:
    """Documents whose scores lie within the bounds of their source."""
    for record in documents:
        reason = _outside(record, bounds.get(record.source, {}))
        if reason is None:
            yield record
        else:
            tally.drop(reason, record, f"{record.notes}")


def _outside(record: Record, bounds: dict[str, list[float]]) -> str | None:
    for name, (low, high) in bounds.items():
        score = record.notes.get(name)
        if score is not None and score < low:
            return f"{name} below the quantile"
        if score is not None and score > high:
            return f"{name} above the quantile"
    return None


def train_from_files(
    good: Iterable[Document], bad: Iterable[Document], *, most: int, bits: int, seed: int
) -> QualityClassifier:
    """Trains the classifier on at most ``most`` documents of each set, chosen by hash of id."""
    sets = [_smallest(documents, most, seed) for documents in (good, bad)]
    return train_classifier(sets[0], sets[1], bits=bits, seed=seed)


def _smallest(documents: Iterable[Document], most: int, seed: int) -> list[str]:
    def key(document: Document) -> bytes:
        return hashlib.blake2b(f"{seed} {document.id}".encode(), digest_size=8).digest()

    return [document.text for document in heapq.nsmallest(most, documents, key=key)]
