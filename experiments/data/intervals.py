"""Sets of integers as sorted, disjoint half-open intervals: arrays of starts and of ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool, Int64


@dataclasses.dataclass(frozen=True)
class Intervals:
    """The union of [starts[i], ends[i]), in order, none empty, none touching the next.

    >>> a = Intervals.union([(0, 4), (2, 6), (6, 7), (9, 12)])
    >>> a.pairs()
    [(0, 7), (9, 12)]
    >>> a.minus(Intervals.union([(3, 5), (8, 10)])).pairs()
    [(0, 3), (5, 7), (10, 12)]
    >>> a.minus(a).size()
    0
    """

    starts: Int64[np.ndarray, " n"]
    ends: Int64[np.ndarray, " n"]

    @classmethod
    def union(cls, pairs: Iterable[tuple[int, int]]) -> Intervals:
        """Of any pairs (start, end)."""
        table = np.array(list(pairs), np.int64).reshape(-1, 2)
        return cls.of(table[:, 0], table[:, 1])

    @classmethod
    def of(cls, starts: Int64[np.ndarray, " n"], ends: Int64[np.ndarray, " n"]) -> Intervals:
        """The union of any intervals, in any order; empty ones are left out."""
        some = starts < ends
        starts, ends = starts[some].astype(np.int64), ends[some].astype(np.int64)
        order = np.argsort(starts, kind="stable")
        starts, reach = starts[order], np.maximum.accumulate(ends[order])
        begins = np.ones(len(starts), bool)
        begins[1:] = starts[1:] > reach[:-1]
        return cls(starts[begins], reach[np.append(begins[1:], True)] if len(starts) else starts)

    @classmethod
    def of_mask(cls, mask: Bool[np.ndarray, " n"]) -> Intervals:
        """Where a mask is True.

        >>> Intervals.of_mask(np.array([True, True, False, True])).pairs()
        [(0, 2), (3, 4)]
        """
        if not len(mask):
            return cls.union([])
        turns = np.flatnonzero(mask[1:] != mask[:-1]) + 1
        limits = np.concatenate(([0], turns, [len(mask)]))
        first = 0 if mask[0] else 1
        return cls(limits[first:-1:2], limits[first + 1 :: 2])

    def join(self, other: Intervals) -> Intervals:
        """The union of both."""
        return Intervals.of(
            np.concatenate((self.starts, other.starts)), np.concatenate((self.ends, other.ends))
        )

    def minus(self, other: Intervals) -> Intervals:
        """What is in this set and not in `other`."""
        # A sweep over the limits: inside this set, and inside no interval of the other.
        limits = np.concatenate((self.starts, self.ends, other.starts, other.ends))
        ones, twos = np.ones(len(self.starts), np.int64), np.full(len(other.starts), 2, np.int64)
        order = np.argsort(limits, kind="stable")
        depth = np.cumsum(np.concatenate((ones, -ones, twos, -twos))[order])
        limits = limits[order]
        inside = np.flatnonzero(depth[:-1] == 1)
        return Intervals.of(limits[inside], limits[inside + 1])

    def longer(self, by: int) -> Intervals:
        """Every end moved up by `by`."""
        return Intervals.of(self.starts, self.ends + by)

    def within(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts inside [start, end), as (start, end) pairs."""
        first = int(np.searchsorted(self.ends, start, "right"))
        last = int(np.searchsorted(self.starts, end, "left"))
        pairs = zip(self.starts[first:last].tolist(), self.ends[first:last].tolist(), strict=True)
        return [(max(a, start), min(b, end)) for a, b in pairs]

    def size(self) -> int:
        """How many integers there are."""
        return int((self.ends - self.starts).sum())

    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.starts.tolist(), self.ends.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.starts)
