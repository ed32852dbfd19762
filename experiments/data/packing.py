"""Documents to fixed-length rows: concatenate and split, with the limits kept.

A *stream* is ``EOS doc EOS doc EOS ... doc EOS``. A window of ``T + 1`` tokens gives ``T``
inputs and the ``T`` targets one place further; neighbouring windows share that one token, so
over an epoch every token of the stream but the first is a target exactly once and only a
tail shorter than ``T`` is left over (``split_report`` says how much).

The limit between documents: EOS as a *target* belongs to the document that it ends; EOS as
an *input* opens the next document's segment at position 0. The first token of a document is
then predicted from EOS alone, and with segment-masked attention no token sees another
document, no target is wasted and no loss mask is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int, Int32


@dataclasses.dataclass(frozen=True, slots=True)
class SplitReport:
    """What splitting a stream into windows uses and leaves.

    ``tokens == targets + dropped + 1`` (the 1 is the first token, which is only an input),
    or ``tokens == dropped`` when the stream is shorter than one window.
    """

    tokens: int
    windows: int
    targets: int
    dropped: int


def join_documents(documents: Iterable[Int[np.ndarray, " n"]], *, eos_id: int) -> np.ndarray:
    """The stream ``EOS doc EOS ... doc EOS`` as one 1-D int64 array; no documents give no tokens.

    Nothing is lost: the length is ``sum(len(doc)) + number of documents + 1``.

    Raises:
      ValueError: a document holds ``eos_id``, which would split it in two.
    """
    eos = np.array([eos_id], dtype=np.int64)
    parts: list[np.ndarray] = []
    for index, document in enumerate(documents):
        if np.any(document == eos_id):
            raise ValueError(f"document {index} holds the end-of-text id {eos_id}")
        parts += [document.astype(np.int64), eos]
    return np.concatenate([eos, *parts]) if parts else np.zeros(0, dtype=np.int64)


def window_count(tokens: int, *, seq_len: int) -> int:
    """How many windows of ``seq_len`` targets a stream of ``tokens`` holds."""
    if seq_len < 1:
        raise ValueError(f"seq_len must be at least 1, got {seq_len}")
    return max(0, (tokens - 1) // seq_len)


def split_report(tokens: int, *, seq_len: int) -> SplitReport:
    """The counts of a split; see ``SplitReport``."""
    windows = window_count(tokens, seq_len=seq_len)
    used = windows * seq_len + 1 if windows else 0
    return SplitReport(tokens, windows, windows * seq_len, tokens - used)


def gather_windows(
    stream: Int[np.ndarray, " n"], indices: Int[np.ndarray, " B"], *, seq_len: int
) -> Int32[np.ndarray, "B T+1"]:
    """Windows ``indices`` of a stream, ``seq_len + 1`` tokens each."""
    starts = np.asarray(indices, dtype=np.int64)[:, None] * seq_len
    return stream[starts + np.arange(seq_len + 1)].astype(np.int32)


def segments_and_positions(
    tokens: Int[np.ndarray, "B T"], *, eos_id: int
) -> tuple[Int32[np.ndarray, "B T"], Int32[np.ndarray, "B T"]]:
    """Segment ids (from 1; 0 is left for padding) and positions within a document.

    An EOS opens a segment and has position 0. A row that starts inside a document starts
    with segment 1 at position 0: what came before the row is not visible from it.

    >>> s, p = segments_and_positions(np.array([[7, 8, 0, 7, 7, 0]]), eos_id=0)
    >>> s.tolist(), p.tolist()
    ([[1, 1, 2, 2, 2, 3]], [[0, 1, 0, 1, 2, 0]])
    """
    opens = np.asarray(tokens) == eos_id
    opens[:, 0] = True
    index = np.arange(tokens.shape[1])
    last_open = np.maximum.accumulate(np.where(opens, index, 0), axis=1)
    return np.cumsum(opens, axis=1, dtype=np.int32), (index - last_open).astype(np.int32)
