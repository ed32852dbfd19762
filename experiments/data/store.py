"""A token store: one memory-mapped file of tokens and a JSON file that describes it.

``NAME.bin`` holds little-endian unsigned integers (2 bytes up to a vocabulary of 65536, else
4): the train stream, then the held-out stream, each in the form of ``packing``. ``NAME.json``
holds the tokenizer, counts per source and split, and the SHA-256 of the .bin.

Which documents are held out depends on nothing but their ids (``is_held_out``), so a document
stays on its side when others are added, whatever the tokenizer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from experiments.data.documents import CorpusError, Document, write_json
from experiments.data.tokenizer import Tokenizer, tokenizer_from_config

STORE_FORMAT = 1
BATCH_BYTES = 1 << 23  # text encoded at once: enough to keep all cores busy, little memory


@dataclasses.dataclass(frozen=True)
class SplitCounts:
    """Size of one split. ``bytes`` is UTF-8 text without end-of-text; ``tokens`` includes it."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0


@dataclasses.dataclass(frozen=True)
class TokenStore:
    """An opened store. ``train`` and ``heldout`` are read-only memory maps, 1-D."""

    name: str
    train: np.ndarray
    heldout: np.ndarray
    tokenizer: Tokenizer
    meta: dict[str, Any]

    def counts(self, split: str) -> SplitCounts:
        return SplitCounts(**self.meta["splits"][split])

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the tokens' checksum, where they are split, and the tokenizer."""
        keys = ("sha256", "dtype", "splits", "tokenizer")
        named = json.dumps({key: self.meta[key] for key in keys}, sort_keys=True)
        return hashlib.sha256(named.encode()).hexdigest()


def is_held_out(document_id: str, fraction: float) -> bool:
    """True for about ``fraction`` of all ids: SHA-256 of the id, read as a number in [0, 1)."""
    head = hashlib.sha256(document_id.encode()).digest()[:8]
    return int.from_bytes(head, "big") < fraction * 2.0**64


def check_heldout_fraction(fraction: float) -> None:
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"heldout_fraction must lie between 0 and 1 (exclusive), got {fraction}")


def store_paths(path: Path) -> tuple[Path, Path]:
    """(.bin, .json) of a store named by either file or by their common stem."""
    if path.suffix in {".bin", ".json"}:
        path = path.with_suffix("")
    return path.with_name(path.name + ".bin"), path.with_name(path.name + ".json")


def write_store(
    path: Path,
    documents: Iterable[Document],
    *,
    tokenizer: Tokenizer,
    heldout_fraction: float,
    name: str,
    provenance: dict[str, Any],
    progress: Callable[[int], object] = lambda _: None,
) -> dict[str, Any]:
    """Encodes documents into a store and returns its description.

    Both files appear under temporary names first; the .json, which makes the store valid, is
    renamed last, so a killed build leaves no store that opens.

    Args:
      path: ``NAME.bin`` (or NAME).
      documents: with unique ids, grouped by source.
      tokenizer: encodes the text.
      heldout_fraction: share of documents, between 0 and 1.
      name: what reports call the data.
      provenance: anything JSON that says where the text came from.
      progress: called with the number of text bytes done since the last call.

    Raises:
      CorpusError: a document id occurs twice, or a split stays empty.
    """
    check_heldout_fraction(heldout_fraction)
    bin_path, _ = store_paths(path)
    bin_path.parent.mkdir(parents=True, exist_ok=True)
    parts = {
        split: bin_path.with_name(f"{bin_path.name}.{os.getpid()}.{split}.tmp")
        for split in ("train", "heldout")
    }
    try:
        with parts["train"].open("wb") as train, parts["heldout"].open("wb") as heldout:
            writer = _SplitWriter({"train": train, "heldout": heldout}, tokenizer)
            for batch in _batches(documents):
                writer.write(batch, heldout_fraction)
                progress(sum(len(document.text.encode()) for document in batch))
            splits = split_counts(writer.sources)
            heldout.flush()
            _append(train, parts["heldout"])
        meta = describe_store(
            parts["train"],
            splits,
            writer.sources,
            tokenizer=tokenizer,
            heldout_fraction=heldout_fraction,
            name=name,
            provenance=provenance,
        )
        publish_store(parts["train"], path, meta)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    return meta


def token_dtype(vocab_size: int) -> np.dtype:
    """Two bytes where they hold every id, else four; little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def describe_store(
    tokens: Path,
    splits: dict[str, SplitCounts],
    sources: dict[str, dict[str, dict[str, int]]],
    *,
    tokenizer: Tokenizer,
    heldout_fraction: float,
    name: str,
    provenance: dict[str, Any],
) -> dict[str, Any]:
    """The description of a file of tokens, train stream first; reads it for its checksum."""
    return {
        "format": STORE_FORMAT,
        "name": name,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "heldout_fraction": heldout_fraction,
        "splits": {split: dataclasses.asdict(count) for split, count in splits.items()},
        "sources": sources,
        "sha256": _file_sha256(tokens),
        "provenance": provenance,
        "tokenizer": tokenizer.to_config(),
    }


def publish_store(tokens: Path, path: Path, meta: dict[str, Any]) -> None:
    """Moves a file of tokens and its description to where a store is opened."""
    bin_path, json_path = store_paths(path)
    json_path.unlink(missing_ok=True)  # an older description must not meet the new tokens
    tokens.replace(bin_path)
    write_json(json_path, meta)


def split_counts(sources: dict[str, dict[str, dict[str, int]]]) -> dict[str, SplitCounts]:
    """The totals of each split over its sources.

    Raises:
      CorpusError: a split is empty.
    """
    splits = {}
    documents = sum(part["documents"] for source in sources.values() for part in source.values())
    for split in ("train", "heldout"):
        rows = [source[split] for source in sources.values()]
        total = {key: sum(row[key] for row in rows) for key in ("documents", "bytes", "tokens")}
        if not total["documents"]:
            raise CorpusError(
                f"no document fell into the {split} split of {documents}: give more "
                "documents or another heldout_fraction"
            )
        total["tokens"] += 1  # the end-of-text that opens the stream
        splits[split] = SplitCounts(**total)
    return splits


class _SplitWriter:
    """Encodes batches, appends them to the two streams and counts."""

    def __init__(self, files: dict[str, BinaryIO], tokenizer: Tokenizer) -> None:
        self.dtype = token_dtype(tokenizer.vocab_size)
        self._files = files
        self._tokenizer = tokenizer
        self._seen: set[str] = set()
        self._eos = np.array([tokenizer.eos_id], dtype=self.dtype).tobytes()
        self.sources: dict[str, dict[str, dict[str, int]]] = {}

    def write(self, batch: list[Document], heldout_fraction: float) -> None:
        encoded = self._tokenizer.encode([document.text for document in batch])
        for document, ids in zip(batch, encoded, strict=True):
            if document.id in self._seen:
                raise CorpusError(f"document id {document.id!r} occurs twice: ids must be unique")
            self._seen.add(document.id)
            split = "heldout" if is_held_out(document.id, heldout_fraction) else "train"
            file = self._files[split]
            if file.tell() == 0:
                file.write(self._eos)
            file.write(ids.astype(self.dtype).tobytes() + self._eos)
            self._count(document, split, len(ids) + 1)

    def _count(self, document: Document, split: str, tokens: int) -> None:
        empty = {"documents": 0, "bytes": 0, "tokens": 0}
        source = self.sources.setdefault(
            document.source, {"train": dict(empty), "heldout": dict(empty)}
        )
        source[split]["documents"] += 1
        source[split]["bytes"] += len(document.text.encode())
        source[split]["tokens"] += tokens


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _append(target: BinaryIO, source: Path) -> None:
    target.flush()
    with source.open("rb") as reader:
        for block in iter(lambda: reader.read(1 << 24), b""):
            target.write(block)
    target.flush()
    os.fsync(target.fileno())


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_store(path: Path, *, verify: bool = True) -> TokenStore:
    """Opens a store; ``verify`` reads it once and compares its SHA-256 (about 1 s per GB).

    Raises:
      CorpusError: a file is missing, cut short, changed, or of another format.
    """
    bin_path, json_path = store_paths(path)
    try:
        meta = json.loads(json_path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorpusError(
            f"{json_path}: no such token store; make one with `python -m experiments.data tokenize`"
        ) from None
    except ValueError as error:
        raise CorpusError(f"{json_path}: not JSON ({error})") from None
    if not isinstance(meta, dict) or meta.get("format") != STORE_FORMAT:
        raise CorpusError(f"{json_path}: want store format {STORE_FORMAT}: tokenize again")
    train, heldout = (meta["splits"][split]["tokens"] for split in ("train", "heldout"))
    dtype = np.dtype(meta["dtype"]).newbyteorder("<")
    _check_file(bin_path, (train + heldout) * dtype.itemsize, meta["sha256"] if verify else None)
    tokens = np.memmap(bin_path, dtype=dtype, mode="r")
    return TokenStore(
        name=meta["name"],
        train=tokens[:train],
        heldout=tokens[train:],
        tokenizer=tokenizer_from_config(meta["tokenizer"]),
        meta=meta,
    )


def _check_file(path: Path, size: int, sha256: str | None) -> None:
    if not path.exists():
        raise CorpusError(f"{path}: missing beside its .json: tokenize again")
    actual = path.stat().st_size
    if actual != size:
        raise CorpusError(f"{path}: {actual} bytes, its .json says {size}: tokenize again")
    if sha256 is not None and _file_sha256(path) != sha256:
        raise CorpusError(f"{path}: differs from the checksum in its .json: tokenize again")


def training_sample(
    documents: Iterable[Document], *, heldout_fraction: float, rate: float
) -> Iterator[str]:
    """Texts to train a tokenizer on: a share ``rate`` of the train split, from all over it.

    Held-out text is never among them, so that held-out bits per byte stay honest.
    """
    for document in documents:
        wanted = rate >= 1.0 or is_held_out(f"tokenizer-sample {document.id}", rate)
        if wanted and not is_held_out(document.id, heldout_fraction):
            yield document.text
