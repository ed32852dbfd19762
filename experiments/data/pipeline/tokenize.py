"""Tokenizing as a stage: one tokenizer, then every shard by itself, then one token store."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tokenizers

from experiments.data.documents import Document, write_json
from experiments.data.pipeline.records import read_records
from experiments.data.pipeline.stages import Unit, read_json
from experiments.data.store import (
    check_heldout_fraction,
    describe_store,
    is_held_out,
    open_store,
    publish_store,
    split_counts,
    token_dtype,
    training_sample,
)
from experiments.data.tokenizer import (
    BPETokenizer,
    Tokenizer,
    tokenizer_from_config,
    train_tokenizer,
)

TOKENIZER = "tokenizer.json"
BATCH_DOCUMENTS = 256
SPLITS = ("train", "heldout")


@dataclasses.dataclass(frozen=True)
class TokenizeConfig:
    """How text becomes tokens.

    Attributes:
      vocab_size: of the byte-level BPE that is trained on the corpus; 256 means plain bytes.
      tokenizer: a given ``tokenizer.json`` of the ``tokenizers`` library instead, relative to
        the configuration's file; it must have the token ``<|endoftext|>``.
      training_mb: text that training takes, from all over the train split.
      heldout_fraction: share of documents held out, by hash of their id.
    """

    vocab_size: int = 16384
    tokenizer: str | None = None
    training_mb: float = 64.0
    heldout_fraction: float = 0.01

    def __post_init__(self) -> None:
        check_heldout_fraction(self.heldout_fraction)
        if not self.training_mb > 0:
            raise ValueError(f"training_mb must be positive, got {self.training_mb}")


def prepare_tokenizer(
    folder: Path, documents: Iterable[Document], size: int, config: TokenizeConfig, base: Path
) -> None:
    """Trains or copies the tokenizer into the stage's folder, unless it is there.

    Args:
      folder: of the stage.
      documents: of the corpus; ``size`` is their text in bytes.
      config: what is wanted.
      base: where a relative path of a given tokenizer starts.
    """
    if (folder / TOKENIZER).is_file():
        return
    if config.tokenizer is not None:
        tokenizer: Tokenizer = given_tokenizer(base / config.tokenizer)
    else:
        rate = min(1.0, config.training_mb * 1e6 / max(1, size))
        texts = training_sample(documents, heldout_fraction=config.heldout_fraction, rate=rate)
        tokenizer = train_tokenizer(texts, vocab_size=config.vocab_size)
    write_json(folder / TOKENIZER, tokenizer.to_config())


def given_tokenizer(path: Path) -> BPETokenizer:
    """A ``tokenizer.json`` from elsewhere; raises ValueError when it cannot be used."""
    try:
        return BPETokenizer(tokenizers.Tokenizer.from_file(str(path)))
    except ValueError:
        raise
    except Exception as error:  # the library raises bare Exception for a bad file
        raise ValueError(f"tokenizer {path} cannot be read: {error}") from None


@functools.lru_cache(maxsize=1)
def _tokenizer(path: Path, time_ns: int) -> Tokenizer:
    return tokenizer_from_config(json.loads(path.read_text(encoding="utf-8")))


@dataclasses.dataclass(frozen=True)
class TokenizeTask:
    """Encodes one shard: two files of tokens (``doc EOS doc EOS``) and a record of counts."""

    root: Path
    folder: Path
    heldout_fraction: float

    def __call__(self, unit: Unit) -> None:
        path = self.folder / TOKENIZER
        tokenizer = _tokenizer(path, path.stat().st_mtime_ns)
        stem = self.folder / unit.key
        temporary = {split: Path(f"{stem}.{split}.{os.getpid()}.tmp") for split in SPLITS}
        counter = _Counter(tokenizer)
        start = time.process_time()
        with temporary["train"].open("wb") as train, temporary["heldout"].open("wb") as heldout:
            files = {"train": train, "heldout": heldout}
            batch: list[Document] = []
            for record in read_records(self.root / unit.payload):
                batch.append(record)
                if len(batch) == BATCH_DOCUMENTS:
                    self._write(batch, tokenizer, files, counter)
                    batch = []
            self._write(batch, tokenizer, files, counter)
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        for split in SPLITS:
            temporary[split].replace(f"{stem}.{split}")
        cpu = round(time.process_time() - start, 3)
        write_json(Path(f"{stem}.json"), counter.to_json() | {"cpu_seconds": cpu})

    def _write(
        self,
        batch: Sequence[Document],
        tokenizer: Tokenizer,
        files: Mapping[str, BinaryIO],
        counter: _Counter,
    ) -> None:
        dtype = token_dtype(tokenizer.vocab_size)
        for document, ids in zip(batch, tokenizer.encode([d.text for d in batch]), strict=True):
            split = "heldout" if is_held_out(document.id, self.heldout_fraction) else "train"
            files[split].write(np.append(ids, tokenizer.eos_id).astype(dtype).tobytes())
            counter.add(document, split, ids)


class _Counter:
    """Documents, bytes, tokens, words, unknown tokens and failed round trips of one shard."""

    ROUND_TRIPS = 20  # documents per shard that are decoded again

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._unknown = unknown_id(tokenizer)
        self.sources: dict[str, dict[str, dict[str, int]]] = {}
        self.words = self.unknown = self.tried = self.failed = 0

    def add(self, document: Document, split: str, ids: np.ndarray) -> None:
        empty = {"documents": 0, "bytes": 0, "tokens": 0}
        source = self.sources.setdefault(document.source, {s: dict(empty) for s in SPLITS})
        source[split]["documents"] += 1
        source[split]["bytes"] += len(document.text.encode())
        source[split]["tokens"] += len(ids) + 1
        self.words += len(document.text.split())
        if self._unknown is not None:
            self.unknown += int((ids == self._unknown).sum())
        if self.tried < self.ROUND_TRIPS:
            self.tried += 1
            self.failed += self._tokenizer.decode(ids) != document.text

    def to_json(self) -> dict[str, Any]:
        names = ("words", "unknown", "tried", "failed")
        return {"sources": self.sources, **{name: getattr(self, name) for name in names}}


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """The id that stands for text outside the vocabulary; None for a tokenizer over bytes."""
    config = tokenizer.to_config()
    if config["kind"] == "bytes":
        return None
    backend = config["backend"]
    unknown = backend["model"].get("unk_token")
    return None if unknown is None else backend["model"]["vocab"].get(unknown)


def join_tokens(
    folder: Path, keys: Sequence[str], out: Path, *, config: TokenizeConfig, fingerprint: str
) -> dict[str, Any]:
    """Joins the shards' tokens into the store ``out``; returns what the report says.

    Both streams begin with an end-of-text, as ``packing`` wants them.
    """
    records = [json.loads((folder / f"{key}.json").read_text(encoding="utf-8")) for key in keys]
    sources: dict[str, dict[str, dict[str, int]]] = {}
    for record in records:
        for name, splits in record["sources"].items():
            if name not in sources:
                sources[name] = splits
                continue
            for split, counts in splits.items():
                for key, count in counts.items():
                    sources[name][split][key] += count
    totals = {n: sum(r[n] for r in records) for n in ("words", "unknown", "tried", "failed")}
    meta = read_json(out.with_suffix(".json"))
    if meta is None or meta.get("provenance") != {"build": fingerprint}:
        tokenizer = _tokenizer(folder / TOKENIZER, (folder / TOKENIZER).stat().st_mtime_ns)
        splits = split_counts(sources)
        tokens = out.with_name(f"{out.name}.tmp")
        with tokens.open("wb") as file:
            for split in SPLITS:
                file.write(np.array(tokenizer.eos_id, token_dtype(tokenizer.vocab_size)).tobytes())
                for key in keys:
                    _append(file, folder / f"{key}.{split}")
            file.flush()
            os.fsync(file.fileno())
        meta = describe_store(
            tokens, splits, sources, tokenizer=tokenizer,
            heldout_fraction=config.heldout_fraction, name=out.parent.name,
            provenance={"build": fingerprint},
        )  # fmt: skip
        publish_store(tokens, out, meta)
    open_store(out, verify=False)
    return _report(meta, totals)


def _append(file: BinaryIO, path: Path) -> None:
    with path.open("rb") as reader:
        for block in iter(lambda: reader.read(1 << 24), b""):
            file.write(block)


def _report(meta: dict[str, Any], totals: dict[str, int]) -> dict[str, Any]:
    """Vocabulary, compression, fertility, unknown tokens."""
    rows = [
        {
            "source": name,
            "train documents": splits["train"]["documents"],
            "train tokens": splits["train"]["tokens"],
            "held-out tokens": splits["heldout"]["tokens"],
            "bytes per token": sum(splits[s]["bytes"] for s in SPLITS)
            / sum(splits[s]["tokens"] for s in SPLITS),
        }
        for name, splits in meta["sources"].items()
    ]
    tokens = sum(part["tokens"] for part in meta["splits"].values())
    summary = {
        "vocabulary": meta["vocab_size"],
        "tokens": tokens,
        "fertility (tokens per word)": tokens / max(1, totals["words"]),
        "unknown tokens": totals["unknown"],
        "documents decoded again": totals["tried"],
        "of those, not equal to the text": totals["failed"],
        "sha256": meta["sha256"],
    }
    return {"Tokenizer": summary, "Tokens by source": rows}
