r"""Exact substrings: text of k bytes or more that occurs again is cut, but for its first time.

    documents --anchors--> candidate text --suffix arrays, by partition--> repeats --> cuts

A corpus is searched in three passes over its text, of which none holds it whole:

1. Anchors (see `anchors`) of every document. Text around an anchor that occurs once has no
   repeat, and is left aside: usually most of the corpus.
2. The rest, the *candidate text*, is collected. If it is larger than a partition, anchors are
   dealt to partitions by hash, each partition takes the text around its anchors, and one suffix
   array at a time is built. All occurrences of a k-byte string share an anchor, so that they
   meet in one partition wherever in the corpus they stand: no repeat is lost between partitions,
   and the outcome is the same for any partition size.
3. The cuts, document by document.

What is cut, for ``keep="first"``: every byte of a k-byte window that has an earlier occurrence,
except bytes of a window that is the first occurrence of a repeated one. The exception is what
keeps the last copy of text that repeats in two overlapping ways: no repeated k-byte string
disappears from the corpus. Cuts shrink to character boundaries and never cross documents.

Lee et al. 2021 (arXiv 2107.06499) cut repeats of 50 tokens; this is 200 bytes at 4 bytes a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
from jaxtyping import Int64, UInt8, UInt64

from experiments.data.anchors import find_anchors
from experiments.data.documents import Document
from experiments.data.intervals import Intervals
from experiments.data.partitions import Numbering, around, partitions, take_text
from experiments.data.suffixes import MOST_BYTES, repeated_windows
from experiments.data.threads import batches, check_workers, ordered_map, repeatable, text_of

Keep = Literal["first", "none"]
KEEP: tuple[Keep, ...] = ("first", "none")
Documents = Iterable[Document | str]


@dataclasses.dataclass(frozen=True)
class SubstringConfig:
    """Which repeats are cut.

    Attributes:
      min_bytes: k, the length of UTF-8 text from which on a repeat counts, at least 2.
      keep: ``first`` keeps the first occurrence in the order of the input, ``none`` cuts all.
      partition_bytes: largest text of one suffix array, which takes 10 times this in memory.
        A string that fills more than a partition by itself gets a larger one.
      joint: text put where something was cut out.
      min_rest: characters other than white space that a document must keep after a cut; one
        with fewer is dropped whole and counted.
    """

    min_bytes: int = 200
    keep: Keep = "first"
    partition_bytes: int = 128 << 20
    joint: str = ""
    min_rest: int = 1

    def __post_init__(self) -> None:
        if self.min_bytes < 2:
            raise ValueError(f"min_bytes must be at least 2, got {self.min_bytes}")
        if self.keep not in KEEP:
            raise ValueError(f"keep must be one of {KEEP}, got {self.keep!r}")
        if not 2 * self.min_bytes <= self.partition_bytes <= MOST_BYTES:
            raise ValueError(
                f"partition_bytes must be between 2 * min_bytes = {2 * self.min_bytes} and "
                f"{MOST_BYTES}, got {self.partition_bytes}"
            )
        if self.min_rest < 0:
            raise ValueError(f"min_rest must not be negative, got {self.min_rest}")

    @classmethod
    def of_tokens(cls, tokens: int, *, bytes_per_token: float = 4.0, **others) -> SubstringConfig:
        """Repeats of so many tokens, at the mean length of a token of one's tokenizer.

        >>> SubstringConfig.of_tokens(50).min_bytes
        200
        """
        if tokens < 1 or not bytes_per_token > 0:
            raise ValueError(
                f"tokens and bytes_per_token must be positive, got {tokens}, {bytes_per_token}"
            )
        return cls(min_bytes=max(2, round(tokens * bytes_per_token)), **others)


@dataclasses.dataclass
class SubstringStats:
    """What was found; the last four fields count while `cut_repeats` is read."""

    documents: int = 0
    bytes: int = 0
    anchors: int = 0
    repeated_anchors: int = 0
    candidate_bytes: int = 0
    partitions: int = 0
    largest_partition: int = 0
    repeated_windows: int = 0
    documents_cut: int = 0
    documents_dropped: int = 0
    spans_cut: int = 0
    bytes_cut: int = 0


@dataclasses.dataclass(frozen=True)
class Repeats:
    """Where a corpus repeats itself.

    Attributes:
      cuts: bytes to cut, numbered through the corpus (held-out documents first).
      offsets: (d + 1,) the first byte of each document in that numbering.
      stats: counts.
    """

    cuts: Intervals
    offsets: Int64[np.ndarray, " d_plus_1"]
    stats: SubstringStats

    def touches(self, index: int) -> bool:
        """Whether anything is cut from document `index`."""
        start, end = self.offsets[index : index + 2].tolist()
        return bool(self.cuts.within(start, end))

    def spans(self, index: int, data: bytes) -> list[tuple[int, int]]:
        """Bytes to cut of document `index`, whose UTF-8 text is `data`, at character boundaries.

        Raises:
          RuntimeError: `data` is of another length than the text that was searched.
        """
        start, end = self.offsets[index : index + 2].tolist()
        if end - start != len(data):
            raise RuntimeError(
                f"document {index} had {end - start} bytes when it was searched, now {len(data)}"
            )
        inner = ((a - start, b - start) for a, b in self.cuts.within(start, end))
        return [span for a, b in inner if (span := shrink(data, a, b))[0] < span[1]]


def shrink(data: bytes, start: int, end: int) -> tuple[int, int]:
    """The part of [start, end) of UTF-8 text that holds whole characters; start = end if none.

    >>> shrink("aéb".encode(), 2, 4), shrink("aéb".encode(), 1, 3), shrink("é".encode(), 0, 1)
    ((3, 4), (1, 3), (0, 0))
    """
    while start < end and data[start] & 0xC0 == 0x80:
        start += 1
    while start < end < len(data) and data[end] & 0xC0 == 0x80:
        end -= 1
    return start, end


def repeated_substrings(
    documents: Documents,
    config: SubstringConfig | None = None,
    *,
    held_out: Documents | None = None,
    workers: int = 1,
) -> Repeats:
    """Finds the repeats of a corpus, inside and across documents, in two passes over its text.

    Memory in bytes per byte of the corpus: 24 for each anchor, about 0.6 in all at k = 200, and
    the candidate text; beyond that 10 times `partition_bytes` for each of the partitions that
    are worked on at once. An iterator is read into a list.

    Args:
      documents: `Document`s or strings, in the order that decides which occurrence is first.
      config: defaults to `SubstringConfig()`.
      held_out: documents that stand before all others and are never cut, so that what they hold
        is cut from the others (decontamination).
      workers: threads, and suffix arrays at once; the result is the same for any number.

    Raises:
      TypeError: an item is neither Document nor str.
      RuntimeError: the second pass saw other documents than the first.
    """
    config = config or SubstringConfig()
    check_workers(workers)
    held = repeatable(held_out or [])
    chain = _Chain(held, repeatable(documents))
    hashes, positions, offsets = _all_anchors(chain, config, workers)
    stats = SubstringStats(documents=len(offsets) - 1, bytes=int(offsets[-1]), anchors=len(hashes))
    positions, starts = _repeated(hashes, positions)
    del hashes
    stats.repeated_anchors = len(positions)
    candidates = around(positions, offsets, config.min_bytes)
    stats.candidate_bytes = candidates.size()
    text = _collect(chain, candidates, offsets)
    repeats, firsts = _search(text, candidates, positions, starts, offsets, config, workers, stats)
    stats.repeated_windows = repeats.size()
    longer = config.min_bytes - 1
    cuts = repeats.longer(longer)
    originals = firsts.minus(repeats).longer(longer)
    cuts = cuts.minus(originals) if config.keep == "first" else cuts.join(originals)
    held_bytes = int(offsets[sum(1 for _ in held)])
    return Repeats(cuts.minus(Intervals.union([(0, held_bytes)])), offsets, stats)


def cut_repeats(
    documents: Documents,
    config: SubstringConfig | None = None,
    *,
    held_out: Documents | None = None,
    workers: int = 1,
) -> tuple[Iterator[Document], SubstringStats]:
    """Documents without their repeats, in order, and the counts.

    The repeats are found before the function returns; the stream then reads the documents once
    more and counts what it cuts. The arguments are those of `repeated_substrings`; a string
    becomes a document with its index as its id.

    >>> poem = "I wandered lonely as a cloud. " * 2
    >>> stream, stats = cut_repeats(["A" + poem, "B" + poem], SubstringConfig(min_bytes=40))
    >>> [document.text for document in stream], stats.bytes_cut
    (['AI wandered lonely as a cloud. I wandered lonely as a cloud. ', 'B'], 60)
    """
    config = config or SubstringConfig()
    documents, held = repeatable(documents), repeatable(held_out or [])
    found = repeated_substrings(documents, config, held_out=held, workers=workers)
    first = sum(1 for _ in held)
    return _cut_all(documents, found, first, config), found.stats


def _cut_all(
    documents: Documents, found: Repeats, first: int, config: SubstringConfig
) -> Iterator[Document]:
    stats = found.stats
    for index, item in enumerate(documents):
        document = item if isinstance(item, Document) else Document(f"{index}", "", item)
        if not found.touches(first + index):
            yield document
            continue
        data = _encode(document.text)
        spans = found.spans(first + index, data)
        if not spans:
            yield document
            continue
        stats.documents_cut += 1
        stats.spans_cut += len(spans)
        stats.bytes_cut += sum(end - start for start, end in spans)
        text = _without(data, spans, config.joint)
        if sum(map(len, text.split())) < config.min_rest:
            stats.documents_dropped += 1
        else:
            yield dataclasses.replace(document, text=text)


def _without(data: bytes, spans: list[tuple[int, int]], joint: str) -> str:
    limits = [0, *(limit for span in spans for limit in span), len(data)]
    pairs = zip(limits[::2], limits[1::2], strict=True)
    # A joint stands between two pieces, not at the ends of the text.
    pieces = [data[a:b].decode("utf-8", "surrogatepass") for a, b in pairs if a < b]
    return joint.join(pieces)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class _Chain:
    """Several collections one after the other, as often as wanted."""

    def __init__(self, *parts: Documents) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Document | str]:
        for part in self.parts:
            yield from part


# --- the passes -----------------------------------------------------------------------------------


def _all_anchors(
    documents: _Chain, config: SubstringConfig, workers: int
) -> tuple[UInt64[np.ndarray, " a"], Int64[np.ndarray, " a"], Int64[np.ndarray, " d_plus_1"]]:
    """Hashes and positions of all anchors, and where each document starts."""

    def anchors(batch: list[Document | str]):
        texts = [_encode(text_of(document)) for document in batch]
        offsets = np.concatenate(([0], np.cumsum([len(text) for text in texts])))
        data = np.frombuffer(b"".join(texts), np.uint8)
        return *find_anchors(data, offsets, config.min_bytes), offsets

    hashes, positions = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    ends, total = [np.zeros(1, np.int64)], 0
    for found, where, offsets in ordered_map(anchors, batches(documents), workers):
        hashes.append(found)
        positions.append(where + total)
        ends.append(offsets[1:] + total)
        total += int(offsets[-1])
    return np.concatenate(hashes), np.concatenate(positions), np.concatenate(ends)


def _repeated(
    hashes: UInt64[np.ndarray, " a"], positions: Int64[np.ndarray, " a"]
) -> tuple[Int64[np.ndarray, " r"], Int64[np.ndarray, " g"]]:
    """Positions of anchors that occur twice or more, group by group, and where groups start."""
    order = np.argsort(hashes)
    hashes = hashes[order]
    follows = np.zeros(len(hashes), bool)
    follows[1:] = hashes[1:] == hashes[:-1]
    repeated = follows.copy()
    repeated[:-1] |= follows[1:]
    return positions[order[repeated]], np.flatnonzero(~follows[repeated])


def _collect(
    documents: _Chain, wanted: Intervals, offsets: Int64[np.ndarray, " d_plus_1"]
) -> UInt8[np.ndarray, " n"]:
    """The bytes of the intervals, one after the other, from a pass over the text."""
    out = bytearray(wanted.size())
    filled = seen = 0
    for seen, document in enumerate(documents, 1):
        if seen >= len(offsets):
            break
        start, end = offsets[seen - 1 : seen + 1].tolist()
        pieces = wanted.within(start, end)
        if pieces:
            data = _encode(text_of(document))
            if len(data) != end - start:
                seen = -1
                break
            for a, b in pieces:
                out[filled : filled + b - a] = data[a - start : b - start]
                filled += b - a
    if seen != len(offsets) - 1:
        raise RuntimeError("documents changed while they were read")
    return np.frombuffer(out, np.uint8)


def _search(
    text: UInt8[np.ndarray, " n"],
    candidates: Intervals,
    positions: Int64[np.ndarray, " r"],
    groups: Int64[np.ndarray, " g"],
    offsets: Int64[np.ndarray, " d_plus_1"],
    config: SubstringConfig,
    workers: int,
    stats: SubstringStats,
) -> tuple[Intervals, Intervals]:
    """Starts of windows with an earlier occurrence, and of windows that some repeat."""

    def search(part: slice) -> tuple[int, Intervals, Intervals]:
        wanted = around(positions[part], offsets, config.min_bytes)
        numbers = Numbering(wanted)
        piece = take_text(text, candidates, wanted)
        limits = numbers.limits(offsets)
        first = repeated_windows(piece, limits, config.min_bytes)
        is_repeat = first >= 0
        is_first = np.zeros(len(piece), bool)
        is_first[first[is_repeat]] = True
        repeats, firsts = Intervals.of_mask(is_repeat), Intervals.of_mask(is_first)
        return len(piece), numbers.to_corpus(repeats), numbers.to_corpus(firsts)

    none = Intervals.union([])
    repeats, firsts = [none], [none]
    parts = partitions(len(text), positions, groups, config.min_bytes, config.partition_bytes)
    for size, repeat, first in ordered_map(search, parts, workers):
        stats.partitions += 1
        stats.largest_partition = max(stats.largest_partition, size)
        repeats.append(repeat)
        firsts.append(first)
    return _union(repeats), _union(firsts)


def _union(parts: list[Intervals]) -> Intervals:
    return Intervals.of(
        np.concatenate([part.starts for part in parts]), np.concatenate([p.ends for p in parts])
    )
