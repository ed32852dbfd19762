"""``load_dataset``: from the name of a corpus to token streams, built once and cached."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.data.documents import (
    MANIFEST_NAME,
    CorpusError,
    manifest_digest,
    read_corpus,
    read_manifest,
)
from experiments.data.loader import TokenDataset, open_dataset
from experiments.data.store import (
    STORE_FORMAT,
    check_heldout_fraction,
    store_paths,
    training_sample,
    write_store,
)
from experiments.data.tokenizer import BYTE_VOCAB, MAX_VOCAB, Tokenizer, train_tokenizer

SAMPLE_DIR = Path(__file__).parent / "sample"
# Merges of a 32k vocabulary settle well below this; more text only costs time.
TOKENIZER_TRAINING_BYTES = 64 << 20


def load_dataset(
    corpus: str | Path = "sample",
    *,
    vocab_size: int = 256,
    cache_dir: Path | str = "runs/.data",
    heldout_fraction: float = 0.05,
) -> TokenDataset:
    """Token streams of a corpus; trains the tokenizer and encodes on first use.

    Args:
      corpus: ``"sample"`` (in the repository), a directory made by
        ``python -m experiments.data corpus``, or a token store made by ``... tokenize``
        (its ``.bin``, its ``.json`` or their stem).
      vocab_size: 256 means plain bytes, up to 32768 byte-level BPE. A store has its own:
        pass that, or leave the default.
      cache_dir: where built stores are kept, one folder per (corpus text, vocab_size,
        heldout_fraction); a changed corpus gets a new folder.
      heldout_fraction: share of documents that are held out, chosen by hash of their id.
        Ignored for a store, which has its own.

    Raises:
      CorpusError: there is no such corpus, or it is damaged.
      ValueError: ``vocab_size`` or ``heldout_fraction`` is out of range, or ``vocab_size``
        differs from the store's.
    """
    _check_vocab_size(vocab_size)
    check_heldout_fraction(heldout_fraction)
    directory = SAMPLE_DIR if str(corpus) == "sample" else Path(corpus)
    if not (directory / MANIFEST_NAME).is_file() and store_paths(directory)[1].is_file():
        return _open_given_store(directory, vocab_size)
    if not directory.exists():
        raise CorpusError(
            f"corpus {str(corpus)!r}: no such directory or token store; use 'sample', or make "
            "one with `make corpus`"
        )
    manifest = read_manifest(directory)
    settings = {
        "corpus": manifest_digest(manifest),
        "format": STORE_FORMAT,
        "heldout_fraction": heldout_fraction,
        "vocab_size": vocab_size,
    }
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]
    folder = Path(cache_dir) / f"{manifest['name']}-v{vocab_size}-{key}"
    if not folder.is_dir():
        _build_cached(folder, directory, vocab_size, heldout_fraction)
    try:
        return open_dataset(folder / "tokens.bin")
    except CorpusError as error:
        raise CorpusError(f"{error} (a cached copy: delete {folder} to build it again)") from error


def _check_vocab_size(vocab_size: int) -> None:
    if not BYTE_VOCAB <= vocab_size <= MAX_VOCAB:
        raise ValueError(
            f"vocab_size must lie in [{BYTE_VOCAB}, {MAX_VOCAB}], got {vocab_size} "
            f"({BYTE_VOCAB} means plain bytes)"
        )


def _open_given_store(path: Path, vocab_size: int) -> TokenDataset:
    dataset = open_dataset(path)
    if vocab_size not in (BYTE_VOCAB, dataset.vocab_size):
        raise ValueError(
            f"vocab_size {vocab_size} was asked for, but {path} was tokenized with "
            f"{dataset.vocab_size}: pass vocab_size={dataset.vocab_size} or leave it out"
        )
    return dataset


def _build_cached(folder: Path, directory: Path, vocab_size: int, fraction: float) -> None:
    """Builds beside the final name and renames, so that two processes may race."""
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        build_store(
            directory, temporary / "tokens.bin", vocab_size=vocab_size, heldout_fraction=fraction
        )
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process finished first: its store is the same
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def build_store(
    directory: Path,
    out: Path,
    *,
    vocab_size: int,
    heldout_fraction: float,
    progress: Callable[[int], object] = lambda _: None,
) -> dict[str, Any]:
    """Trains a tokenizer on a corpus directory, encodes all of it into a store at ``out``.

    Returns:
      The store's description. ``progress`` is called with bytes of text as they are encoded.
    """
    manifest = read_manifest(directory)
    tokenizer = _tokenizer_for(directory, manifest, vocab_size, heldout_fraction)
    return write_store(
        out,
        read_corpus(directory),
        tokenizer=tokenizer,
        heldout_fraction=heldout_fraction,
        name=manifest["name"],
        provenance={"corpus_sha256": manifest_digest(manifest)},
        progress=progress,
    )


def _tokenizer_for(
    directory: Path, manifest: dict[str, Any], vocab_size: int, heldout_fraction: float
) -> Tokenizer:
    size = sum(entry["bytes"] for entry in manifest["sources"])
    rate = min(1.0, TOKENIZER_TRAINING_BYTES / max(1, size))
    texts = training_sample(read_corpus(directory), heldout_fraction=heldout_fraction, rate=rate)
    return train_tokenizer(texts, vocab_size=vocab_size)
