"""Text to integers and back, exactly: plain bytes, or byte-level BPE trained here.

Both tokenizers cover every Unicode string by construction, because their alphabet is the
256 byte values: there is no unknown token, and ``decode(encode(text)) == text``. The end of
a document is one reserved id (``eos_id``) that no text can produce.

Source of byte-level BPE: Sennrich et al. 2016 (1508.07909) for the merges, Radford et al.
2019 (GPT-2) for bytes as the alphabet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from experiments.data.documents import replace_surrogates

END_OF_TEXT = "<|endoftext|>"
BYTE_VOCAB = 256
MAX_VOCAB = 32768


class Tokenizer(Protocol):
    """What the store, the loader and generation need from a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; all ids are below it."""
        ...

    @property
    def eos_id(self) -> int:
        """The id that closes a document; never produced from text."""
        ...

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One 1-D integer array per text, without ``eos_id``; texts are encoded in parallel."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of the ids; a character that was cut in two shows as U+FFFD."""
        ...

    def to_config(self) -> dict[str, Any]:
        """JSON-serialisable description that ``tokenizer_from_config`` reads."""
        ...


class ByteTokenizer:
    """Token id = UTF-8 byte; vocabulary 256, nothing to train.

    ``eos_id`` is 0, the NUL byte. NUL in a text would read as the end of a document, so it is
    encoded as U+FFFD (documents from this project's extractors hold none).

    >>> ByteTokenizer().encode(["hé"])[0].tolist()
    [104, 195, 169]
    """

    vocab_size = BYTE_VOCAB
    eos_id = 0

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        cleaned = (replace_surrogates(text)[0].replace("\0", "\ufffd") for text in texts)
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in cleaned]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        data = np.asarray(ids)
        if data.size and (data.min() < 0 or data.max() >= BYTE_VOCAB):
            raise ValueError(f"ids must lie in [0, 256), got {int(data.min())}..{int(data.max())}")
        return (
            data.astype(np.uint8)
            .tobytes()
            .replace(b"\0", END_OF_TEXT.encode())
            .decode(errors="replace")
        )

    def to_config(self) -> dict[str, Any]:
        return {"kind": "bytes"}


class BPETokenizer:
    """Byte-level BPE over the ``tokenizers`` library; ``eos_id`` is the id of <|endoftext|>.

    The string ``<|endoftext|>`` inside a text is encoded as ordinary text, so that a document
    that mentions it does not end there.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        eos = backend.token_to_id(END_OF_TEXT)
        if eos is None:
            raise ValueError(f"tokenizer has no {END_OF_TEXT} token; train it with train_bpe")
        # Not saved in the backend's JSON, so set on every construction.
        backend.encode_special_tokens = True
        self._backend = backend
        self._eos_id = int(eos)
        self._vocab_size = int(backend.get_vocab_size(with_added_tokens=True))

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_id(self) -> int:
        return self._eos_id

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        cleaned = [replace_surrogates(text)[0] for text in texts]
        encodings = self._backend.encode_batch_fast(cleaned, add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        data = np.asarray(ids, dtype=np.int64)
        if data.size and (data.min() < 0 or data.max() >= self._vocab_size):
            raise ValueError(
                f"ids must lie in [0, {self._vocab_size}), got {data.min()}..{data.max()}"
            )
        return self._backend.decode(data.tolist(), skip_special_tokens=False)

    def to_config(self) -> dict[str, Any]:
        return {"kind": "bpe", "backend": json.loads(self._backend.to_str())}


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> BPETokenizer:
    """Trains byte-level BPE: 1 end-of-text id, 256 bytes, ``vocab_size - 257`` merges.

    The same texts in the same order give the same tokenizer. Words are cut with GPT-2's
    pattern before merging, so no token crosses from one word into the next.

    Raises:
      ValueError: ``vocab_size`` outside [257, 32768], or too little text for that many merges.
    """
    if not BYTE_VOCAB < vocab_size <= MAX_VOCAB:
        raise ValueError(
            f"vocab_size must lie in [{BYTE_VOCAB + 1}, {MAX_VOCAB}] for BPE, got {vocab_size}; "
            f"{BYTE_VOCAB} means plain bytes (ByteTokenizer)"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator((replace_surrogates(text)[0] for text in texts), trainer)
    trained = BPETokenizer(backend)
    if trained.vocab_size != vocab_size:
        raise ValueError(
            f"the text supports a vocabulary of {trained.vocab_size}, less than vocab_size="
            f"{vocab_size}: give more text or ask for a smaller vocabulary"
        )
    return trained


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """``ByteTokenizer`` for 256, trained BPE above it.

    Raises:
      ValueError: ``vocab_size`` below 256 (bytes would be missing) or above 32768.
    """
    if vocab_size < BYTE_VOCAB:
        raise ValueError(
            f"vocab_size must be at least {BYTE_VOCAB} (one id per byte), got {vocab_size}"
        )
    if vocab_size == BYTE_VOCAB:
        return ByteTokenizer()
    return train_bpe(texts, vocab_size=vocab_size)


def tokenizer_from_config(config: dict[str, Any]) -> Tokenizer:
    """The tokenizer that ``to_config`` described."""
    if config.get("kind") == "bytes":
        return ByteTokenizer()
    if config.get("kind") == "bpe":
        return BPETokenizer(tokenizers.Tokenizer.from_str(json.dumps(config["backend"])))
    raise ValueError(f"tokenizer kind must be 'bytes' or 'bpe', got {config.get('kind')!r}")
