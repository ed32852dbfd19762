"""Partitions of the candidate text of a search for repeats: the text around some anchors each."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64, UInt8

from experiments.data.anchors import anchor_width
from experiments.data.intervals import Intervals


def around(
    positions: Int64[np.ndarray, " r"], offsets: Int64[np.ndarray, " d_plus_1"], min_bytes: int
) -> Intervals:
    """All windows of `min_bytes` around the anchors, inside their documents.

    Intervals of two documents that touch are joined; `Numbering.limits` tells them apart again.
    """
    document = np.searchsorted(offsets, positions, "right") - 1
    starts = np.maximum(positions + anchor_width(min_bytes) - min_bytes, offsets[document])
    ends = np.minimum(positions + min_bytes, offsets[document + 1])
    return Intervals.of(starts, ends)


def partitions(
    size: int,
    positions: Int64[np.ndarray, " r"],
    groups: Int64[np.ndarray, " g"],
    min_bytes: int,
    partition_bytes: int,
) -> list[slice]:
    """Ranges of `positions`, whole groups each, whose text fits into a partition."""
    if not len(positions):
        return []
    if size <= partition_bytes:
        return [slice(0, len(positions))]
    reach = 2 * min_bytes - anchor_width(min_bytes)
    most = max(partition_bytes // reach, 1)
    parts, start = [], 0
    limits = np.append(groups, len(positions))
    while start < len(positions):
        # The last group that still fits, or the next one whatever its size.
        fits = int(limits[np.searchsorted(limits, start + most, "right") - 1])
        following = int(limits[np.searchsorted(limits, start, "right")])
        end = max(fits, following)
        parts.append(slice(start, end))
        start = end
    return parts


class Numbering:
    """Positions in the joined text of intervals, and in the corpus."""

    def __init__(self, intervals: Intervals) -> None:
        self.intervals = intervals
        self.begins = np.concatenate(([0], np.cumsum(intervals.ends - intervals.starts)))

    def to_corpus(self, found: Intervals) -> Intervals:
        """Intervals of the joined text, none across a limit, where they stand in the corpus."""
        place = np.searchsorted(self.begins, found.starts, "right") - 1
        shift = self.intervals.starts[place] - self.begins[place]
        return Intervals(found.starts + shift, found.ends + shift)

    def from_corpus(self, places: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """For places inside the intervals."""
        interval = np.searchsorted(self.intervals.starts, places, "right") - 1
        return places - self.intervals.starts[interval] + self.begins[interval]

    def limits(self, offsets: Int64[np.ndarray, " d_plus_1"]) -> Int64[np.ndarray, " s_plus_1"]:
        """Where intervals and documents begin and end in the joined text."""
        starts, ends = self.intervals.starts, self.intervals.ends
        interval = np.searchsorted(starts, offsets, "right") - 1
        inside = interval >= 0
        inside[inside] = offsets[inside] < ends[interval[inside]]
        return np.union1d(self.begins, self.from_corpus(offsets[inside]))


def take_text(
    text: UInt8[np.ndarray, " n"], candidates: Intervals, wanted: Intervals
) -> UInt8[np.ndarray, " m"]:
    """The text of a partition, out of that of all candidates."""
    if len(wanted) == len(candidates) and wanted.size() == len(text):
        return text
    begins = Numbering(candidates).from_corpus(wanted.starts)
    sizes = wanted.ends - wanted.starts
    out = bytearray()
    for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True):
        out += text[begin : begin + size].data
    return np.frombuffer(out, np.uint8)
