r"""Documents to rows without cutting them where that can be helped: first fit and best fit.

Concatenate-and-split (``packing``) wastes nothing but cuts documents at row ends. Here a row
holds whole documents and padding. A document of n tokens is n + 1 (input, target) pairs,

    inputs  EOS t1 t2 ... tn
    targets t1  t2 ... tn EOS

the same pairs as in ``packing``, so every token and every end of a document is a target
exactly once. One of more than T pairs is cut into pieces of T and a rest; a later piece opens
with the token before it as its input and so loses no target, only its context.

*First fit* puts a piece into the oldest row with room, in the order of the documents. *Best
fit* puts it into the row that it leaves the least room in, longest pieces first (best-fit
decreasing; Ding et al. 2024, 2404.10830): fewer rows, another order. Both need O(n log n).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64

Method = Literal["first-fit", "best-fit"]
Long = Literal["split", "drop"]


@dataclasses.dataclass(frozen=True, slots=True)
class FitReport:
    """What packing used, and what it lost.

    ``pairs == targets + dropped`` and ``rows * T == targets + padding``.

    Attributes:
      documents: given.
      pairs: (input, target) pairs in them, tokens + 1 each.
      rows: made.
      targets: pairs in rows.
      padding: places in rows without a pair.
      split_documents: longer than a row, cut into pieces.
      dropped_documents: longer than a row, left out under ``long="drop"``.
      dropped: pairs in those.
    """

    documents: int
    pairs: int
    rows: int
    targets: int
    padding: int
    split_documents: int
    dropped_documents: int
    dropped: int

    @property
    def padding_share(self) -> float:
        """Of all places in rows."""
        return self.padding / max(1, self.targets + self.padding)

    @property
    def loss_share(self) -> float:
        """Of all pairs that no row holds."""
        return self.dropped / max(1, self.pairs)


@dataclasses.dataclass(frozen=True)
class Packed:
    """Which piece lies where. Pieces are ordered by row, and by place within the row.

    Attributes:
      row_starts: (rows + 1,) row r holds the pieces ``row_starts[r]:row_starts[r + 1]``.
      document: (pieces,) index of the document.
      start: (pieces,) first pair of the document that the piece holds.
      length: (pieces,) pairs in it.
      seq_len: T.
      report: the counts.
    """

    row_starts: Int64[np.ndarray, " R+1"]
    document: Int64[np.ndarray, " p"]
    start: Int64[np.ndarray, " p"]
    length: Int64[np.ndarray, " p"]
    seq_len: int
    report: FitReport

    @property
    def rows(self) -> int:
        return len(self.row_starts) - 1


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """Rows ready for training; every array is (B, T).

    Attributes:
      inputs: token ids; ``eos_id`` in padding.
      targets: the token after each input, of the same document; ``eos_id`` in padding.
      segments: 1, 2, ... per piece; 0 is padding.
      positions: from 0 within the piece.
      mask: True where the target counts.
    """

    inputs: Int32[np.ndarray, "B T"]
    targets: Int32[np.ndarray, "B T"]
    segments: Int32[np.ndarray, "B T"]
    positions: Int32[np.ndarray, "B T"]
    mask: Bool[np.ndarray, "B T"]


def pack_documents(
    lengths: Sequence[int] | Int[np.ndarray, " n"],
    *,
    seq_len: int,
    method: Method = "best-fit",
    long: Long = "split",
) -> Packed:
    """Assigns documents to rows of ``seq_len`` pairs.

    Args:
      lengths: tokens of each document, without end-of-text; 0 is a document of one pair.
      seq_len: T, pairs per row.
      method: ``first-fit`` or ``best-fit``.
      long: documents of more than T pairs are ``split`` into pieces, or dropped (``drop``).

    Raises:
      ValueError: an argument is out of range.

    >>> packed = pack_documents([3, 1, 4, 2], seq_len=6)  # 4, 2, 5 and 3 pairs
    >>> packed.rows, packed.document.tolist(), packed.report.padding
    (3, [2, 0, 1, 3], 4)
    """
    sizes = np.asarray(lengths, dtype=np.int64) + 1
    if seq_len < 1:
        raise ValueError(f"seq_len must be at least 1, got {seq_len}")
    if sizes.ndim != 1 or (sizes.size and sizes.min() < 1):
        raise ValueError("lengths must be a list of non-negative integers")
    if method not in ("first-fit", "best-fit"):
        raise ValueError(f"method must be 'first-fit' or 'best-fit', got {method!r}")
    if long not in ("split", "drop"):
        raise ValueError(f"long must be 'split' or 'drop', got {long!r}")
    document, start, length = _pieces(sizes, seq_len, long)
    if method == "best-fit":
        order = np.argsort(-length, kind="stable")
        row = np.empty(len(length), dtype=np.int64)
        row[order] = _best_fit(length[order].tolist(), seq_len)
    else:
        row = np.array(_first_fit(length.tolist(), seq_len), dtype=np.int64)
    by_row = np.argsort(row, kind="stable")
    rows = int(row.max(initial=-1)) + 1
    row_starts = np.searchsorted(row[by_row], np.arange(rows + 1))
    is_long = sizes > seq_len
    dropped = int(sizes[is_long].sum()) if long == "drop" else 0
    pairs = int(sizes.sum())
    report = FitReport(
        documents=len(sizes),
        pairs=pairs,
        rows=rows,
        targets=pairs - dropped,
        padding=rows * seq_len - (pairs - dropped),
        split_documents=int(is_long.sum()) if long == "split" else 0,
        dropped_documents=int(is_long.sum()) if long == "drop" else 0,
        dropped=dropped,
    )
    return Packed(row_starts, document[by_row], start[by_row], length[by_row], seq_len, report)


def _pieces(sizes: np.ndarray, seq_len: int, long: Long) -> tuple[np.ndarray, ...]:
    """(document, start, length) of every piece, in the order of the documents."""
    count = -(-sizes // seq_len)
    if long == "drop":
        count[sizes > seq_len] = 0
    document = np.repeat(np.arange(len(sizes)), count)
    first = np.cumsum(count) - count
    start = (np.arange(len(document)) - np.repeat(first, count)) * seq_len
    return document, start, np.minimum(seq_len, sizes[document] - start)


def _first_fit(lengths: list[int], capacity: int) -> list[int]:
    """The oldest row with room, found in a tree of maxima over the rows' free places."""
    leaves = 1
    while leaves < max(1, len(lengths)):
        leaves *= 2
    free = [capacity] * (2 * leaves)  # unopened rows are empty rows: the next one is the oldest
    rows = []
    for length in lengths:
        node = 1
        while node < leaves:
            node *= 2
            if free[node] < length:
                node += 1
        rows.append(node - leaves)
        free[node] -= length
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return rows


def _best_fit(lengths: list[int], capacity: int) -> list[int]:
    """The row with the least sufficient room; among equals the newest."""
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by free places
    frees: list[int] = []  # those with a row, sorted
    rows, opened = [], 0
    for length in lengths:
        place = bisect.bisect_left(frees, length)
        if place < len(frees):
            free = frees[place]
            row = open_rows[free].pop()
            if not open_rows[free]:
                del frees[place]
        else:
            free, row = capacity, opened
            opened += 1
        rows.append(row)
        left = free - length
        if left:
            if not open_rows[left]:
                bisect.insort(frees, left)
            open_rows[left].append(row)
    return rows


def gather_rows(
    stream: Int[np.ndarray, " n"],
    document_starts: Int64[np.ndarray, " d"],
    packed: Packed,
    rows: Sequence[int] | Int[np.ndarray, " B"],
    *,
    eos_id: int,
) -> PackedBatch:
    """The rows of a packing as arrays.

    Args:
      stream: ``EOS doc EOS ... doc EOS`` (``packing.join_documents``, or a store's).
      document_starts: where each document's opening EOS stands in it.
      packed: of those documents.
      rows: indices of rows, in any order.
      eos_id: the end-of-text token, which also fills padding.

    Raises:
      ValueError: a row is out of range.
    """
    rows = np.asarray(rows, dtype=np.int64)
    if rows.size and (rows.min() < 0 or rows.max() >= packed.rows):
        raise ValueError(f"rows must lie in [0, {packed.rows}), got {rows.min()}..{rows.max()}")
    shape = (len(rows), packed.seq_len)
    inputs, targets = (np.full(shape, eos_id, dtype=np.int32) for _ in range(2))
    segments, positions = (np.zeros(shape, dtype=np.int32) for _ in range(2))
    for b, row in enumerate(rows.tolist()):
        place = 0
        first, last = packed.row_starts[row], packed.row_starts[row + 1]
        for segment, piece in enumerate(range(int(first), int(last)), start=1):
            length = int(packed.length[piece])
            begin = int(document_starts[packed.document[piece]] + packed.start[piece])
            inside = slice(place, place + length)
            inputs[b, inside] = stream[begin : begin + length]
            targets[b, inside] = stream[begin + 1 : begin + length + 1]
            segments[b, inside] = segment
            positions[b, inside] = np.arange(length)
            place += length
    return PackedBatch(inputs, targets, segments, positions, segments > 0)


def document_limits(
    stream: Int[np.ndarray, " n"], *, eos_id: int
) -> tuple[Int64[np.ndarray, " d"], Int64[np.ndarray, " d"]]:
    """(starts, lengths) of the documents of a stream ``EOS doc EOS ... doc EOS``.

    >>> starts, lengths = document_limits(np.array([0, 5, 6, 0, 0, 7, 0]), eos_id=0)
    >>> starts.tolist(), lengths.tolist()
    ([0, 3, 4], [2, 0, 1])
    """
    ends = np.flatnonzero(np.asarray(stream) == eos_id)
    return ends[:-1], np.diff(ends) - 1
