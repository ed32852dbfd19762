"""Batches by number: ``batch_at(step)`` is a pure function, so the state of a run is ``step``.

An epoch visits every window of the train stream exactly once, in the order of a
pseudo-random permutation keyed by (seed, epoch). The permutation is a Feistel network over
``[0, windows)``: any element costs O(1) time and no memory, so resuming at step 10^6 costs
the same as starting. Batches run across the end of an epoch; no window is skipped there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64

from experiments.data.packing import gather_windows, window_count
from experiments.data.store import SplitCounts, TokenStore, open_store
from experiments.data.tokenizer import Tokenizer

FEISTEL_ROUNDS = 6
_MASK32 = np.uint64(0xFFFFFFFF)


def permute(
    indices: Int64[np.ndarray, " n"], *, size: int, key: tuple[int, ...]
) -> Int64[np.ndarray, " n"]:
    """A pseudo-random permutation of ``[0, size)``, evaluated at ``indices``.

    A balanced Feistel network over the next even power of two, walked until the value falls
    inside ``[0, size)`` (cycle walking: at most 4 steps on average, since the domain is less
    than 4 times ``size``). Bijective for every key.

    Args:
      indices: values in ``[0, size)``.
      size: length of the permutation, at most 2**62.
      key: integers; equal keys give equal permutations on every machine.
    """
    values = np.asarray(indices, dtype=np.uint64)
    if size < 1 or (values.size and int(values.max()) >= size):
        raise ValueError(f"indices must lie in [0, size={size}), got up to {values.max(initial=0)}")
    half = np.uint64(max(1, (int(size - 1).bit_length() + 1) // 2))
    round_keys = np.random.SeedSequence(key).generate_state(FEISTEL_ROUNDS, dtype=np.uint64)
    values = _feistel(values, half, round_keys)
    outside = np.flatnonzero(values >= size)
    while outside.size:
        values[outside] = _feistel(values[outside], half, round_keys)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half: np.uint64, round_keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return (left << half) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """A 64-bit finaliser (xor-shift-multiply): every input bit reaches the low output bits."""
    values = (values ^ (values >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    values = (values ^ (values >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return values ^ (values >> np.uint64(32))


@dataclasses.dataclass(frozen=True)
class BatchSchedule:
    """Which windows each step trains on.

    Attributes:
      tokens: the stream, 1-D.
      batch_size: rows of a *global* batch, over all processes.
      seq_len: targets per row; rows hold ``seq_len + 1`` tokens.
      seed: of the permutations.
      process_index: this host; it gets the rows
        ``[process_index * rows, (process_index + 1) * rows)``.
      process_count: hosts; must divide ``batch_size``.

    Raises:
      ValueError: a field is out of range, or the stream is shorter than one window.
    """

    tokens: np.ndarray
    batch_size: int
    seq_len: int
    seed: int
    process_index: int = 0
    process_count: int = 1

    def __post_init__(self) -> None:
        _check_positive(batch_size=self.batch_size, seq_len=self.seq_len)
        _check_positive(process_count=self.process_count)
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if not 0 <= self.process_index < self.process_count:
            raise ValueError(
                f"process_index must lie in [0, {self.process_count}), got {self.process_index}"
            )
        if self.batch_size % self.process_count:
            raise ValueError(
                f"batch_size {self.batch_size} must be a multiple of process_count "
                f"{self.process_count}: every host takes the same number of rows"
            )
        if self.windows_per_epoch < 1:
            raise ValueError(
                f"seq_len {self.seq_len} needs a stream of at least {self.seq_len + 1} tokens, "
                f"got {len(self.tokens)}: use a shorter seq_len or a larger corpus"
            )

    @property
    def windows_per_epoch(self) -> int:
        """Windows in the stream; each is visited once an epoch."""
        return window_count(len(self.tokens), seq_len=self.seq_len)

    def epochs_for(self, tokens: float) -> float:
        """How many times training on ``tokens`` targets visits the stream."""
        return tokens / (self.windows_per_epoch * self.seq_len)

    def windows_at(self, step: int) -> Int64[np.ndarray, " B"]:
        """Indices of the windows of this host's rows at ``step``."""
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        rows = self.batch_size // self.process_count
        first = step * self.batch_size + self.process_index * rows
        visits = np.arange(first, first + rows, dtype=np.int64)
        epochs, offsets = np.divmod(visits, self.windows_per_epoch)
        windows = np.empty_like(visits)
        for epoch in np.unique(epochs):
            rows_of_epoch = epochs == epoch
            windows[rows_of_epoch] = permute(
                offsets[rows_of_epoch], size=self.windows_per_epoch, key=(self.seed, int(epoch))
            )
        return windows

    def batch_at(self, step: int) -> Int32[np.ndarray, "B T+1"]:
        """The batch of ``step``: inputs are ``[:, :-1]``, targets ``[:, 1:]``."""
        return gather_windows(self.tokens, self.windows_at(step), seq_len=self.seq_len)


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


@dataclasses.dataclass(frozen=True)
class TokenDataset:
    """A tokenized corpus with its held-out split; made by ``load_dataset`` or ``open_dataset``.

    Attributes:
      name: for reports.
      train: 1-D memory map, uint16 or uint32; ``EOS doc EOS doc ... EOS``.
      heldout: the same for documents that are never trained on.
      vocab_size: all tokens are below it.
      bytes_per_token: UTF-8 bytes of held-out text per held-out token (the end-of-text tokens
        count as tokens, not as text). A loss of x nats per token is
        ``x / ln(2) / bytes_per_token`` bits per byte, comparable across vocabularies.
      tokenizer: encodes and decodes.
      fingerprint: SHA-256 of tokens and tokenizer; equal fingerprints mean equal batches.
      meta: the store's description: counts per source and split, provenance.
    """

    name: str
    train: np.ndarray
    heldout: np.ndarray
    vocab_size: int
    bytes_per_token: float
    tokenizer: Tokenizer
    fingerprint: str
    meta: dict[str, Any] = dataclasses.field(repr=False)

    def counts(self, split: str) -> SplitCounts:
        """Documents, bytes and tokens of ``"train"`` or ``"heldout"``."""
        return SplitCounts(**self.meta["splits"][split])

    def batches(
        self,
        batch_size: int,
        seq_len: int,
        *,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
    ) -> BatchSchedule:
        """The schedule of training batches; see ``BatchSchedule``."""
        return BatchSchedule(self.train, batch_size, seq_len, seed, process_index, process_count)

    def heldout_batches(
        self, batch_size: int, seq_len: int, max_tokens: int
    ) -> list[Int32[np.ndarray, "B T+1"]]:
        """Fixed evaluation batches: the same windows in every call, spread over all sources.

        ``max_tokens // seq_len`` windows (fewer when the split is smaller), rounded down to
        full batches, evenly spaced over the held-out stream.

        Raises:
          ValueError: fewer than one batch fits.
        """
        _check_positive(batch_size=batch_size, seq_len=seq_len, max_tokens=max_tokens)
        available = window_count(len(self.heldout), seq_len=seq_len)
        batches = min(available, max_tokens // seq_len) // batch_size
        if batches < 1:
            raise ValueError(
                f"a held-out batch of {batch_size} x {seq_len} tokens needs max_tokens >= "
                f"{batch_size * seq_len} (got {max_tokens}) and as many held-out tokens "
                f"(have {len(self.heldout)}): use a smaller batch_size or seq_len"
            )
        chosen = np.arange(batches * batch_size) * available // (batches * batch_size)
        rows = gather_windows(self.heldout, chosen, seq_len=seq_len)
        return list(rows.reshape(batches, batch_size, seq_len + 1))

    def heldout_windows(self, seq_len: int) -> Iterator[Int32[np.ndarray, " T+1"]]:
        """Every held-out window once, in order."""
        for index in range(window_count(len(self.heldout), seq_len=seq_len)):
            yield gather_windows(self.heldout, np.array([index]), seq_len=seq_len)[0]


def dataset_from_store(store: TokenStore) -> TokenDataset:
    """The dataset of an opened store."""
    heldout = store.counts("heldout")
    return TokenDataset(
        name=store.name,
        train=store.train,
        heldout=store.heldout,
        vocab_size=store.tokenizer.vocab_size,
        bytes_per_token=heldout.bytes / heldout.tokens,
        tokenizer=store.tokenizer,
        fingerprint=store.fingerprint,
        meta=store.meta,
    )


def open_dataset(path: Path, *, verify: bool = True) -> TokenDataset:
    """The dataset of a store on disk; raises ``CorpusError`` when it is missing or damaged."""
    return dataset_from_store(open_store(path, verify=verify))
