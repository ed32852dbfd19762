r"""Anchors: positions that depend on the text around them alone (winnowing, Schleimer 2003).

Of the hashes of all q-byte windows, an anchor is one that is the least of some w = k - q + 1
consecutive ones. Every k-byte string has exactly w such windows inside, so that it holds an
anchor at the same place wherever it occurs: two equal k-byte strings always share one. About
2 / (w + 1) of the positions are anchors, and text without a repeated anchor has no repeat of k
bytes at all. That is what lets a corpus be searched for repeats in a part of its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64, UInt, UInt8, UInt64

from experiments.data.hashing import mix, window_hashes

_BYTES = mix(np.arange(256, dtype=np.uint64), seed=4)
_LARGEST = np.uint64(0xFFFFFFFFFFFFFFFF)
# Positions at once: eight arrays of them stay in the second-level cache.
BLOCK = 1 << 16


def anchor_width(min_bytes: int) -> int:
    """q for repeats of k = `min_bytes`: the largest power of two up to 0.7 k.

    A long q makes fewer anchors of shorter repeats, a short one fewer anchors.

    >>> anchor_width(100), anchor_width(200), anchor_width(2)
    (64, 128, 1)
    """
    return 1 << (max(int(0.7 * min_bytes), 1).bit_length() - 1)


def sliding(
    values: UInt[np.ndarray, " n"], size: int, pick: Callable[[Any, Any], Any]
) -> UInt[np.ndarray, " n_minus_size_plus_1"]:
    """`pick` (minimum or maximum) over all windows of `size` values, in log2(size) passes.

    >>> sliding(np.array([5, 3, 4, 1, 2], np.uint64), 3, np.minimum).tolist()
    [3, 1, 1]
    """
    width = 1
    while 2 * width <= size:
        values = pick(values[:-width], values[width:])
        width *= 2
    return values if width == size else pick(values[: width - size], values[size - width :])


def windows_inside(
    length: int, offsets: Int64[np.ndarray, " d_plus_1"], size: int
) -> Bool[np.ndarray, " n"]:
    """Whether the `size` bytes from each position lie inside one stretch between offsets.

    >>> windows_inside(6, np.array([0, 4, 6]), 3).tolist()
    [True, True, False, False, False, False]
    """
    # At most one stretch is counted at a position, so that a byte holds every sum.
    change = np.zeros(length + 1, np.int8)
    np.add.at(change, np.maximum(offsets[:-1], offsets[1:] - size + 1), 1)
    np.add.at(change, offsets[1:], -1)
    return np.cumsum(change[:-1], dtype=np.int8) == 0


def find_anchors(
    data: UInt8[np.ndarray, " n"], offsets: Int64[np.ndarray, " d_plus_1"], min_bytes: int
) -> tuple[UInt64[np.ndarray, " a"], Int64[np.ndarray, " a"]]:
    """Hashes and positions of the anchors of documents.

    Args:
      data: the bytes of the documents, one after the other.
      offsets: document d is data[offsets[d] : offsets[d + 1]].
      min_bytes: k. Every k-byte window of a document holds an anchor, and equal windows
        share the hash of one.
    """
    q = anchor_width(min_bytes)
    w = min_bytes - q + 1
    valid = windows_inside(len(data), offsets, q)
    hashes, positions = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for start in range(0, len(data), BLOCK):
        found, where = _block(data, valid, start, min(start + BLOCK, len(data)), q, w)
        hashes.append(found)
        positions.append(where)
    return np.concatenate(hashes), np.concatenate(positions)


def _block(
    data: UInt8[np.ndarray, " n"],
    valid: Bool[np.ndarray, " n"],
    start: int,
    end: int,
    q: int,
    w: int,
) -> tuple[UInt64[np.ndarray, " a"], Int64[np.ndarray, " a"]]:
    """Anchors at positions [start, end)."""
    low, high = start - w, end + w
    first, last = max(low, 0), min(high, len(data))
    values = np.take(_BYTES, data[first : min(last + q - 1, len(data))].astype(np.intp))
    hashes = np.full(high - low, _LARGEST)
    inner = mix(window_hashes(values, q), seed=5)[: last - first]
    hashes[first - low : first - low + len(inner)] = inner
    hashes[first - low : last - low][~valid[first:last]] = _LARGEST
    # An opening: the largest of the minima of all windows with a position is its own value
    # exactly where it is the least of one of them. Half of the bits order as well in half the
    # time; a tie makes one anchor more.
    halves = (hashes[1:-1] >> np.uint64(32)).astype(np.uint32)
    opened = sliding(sliding(halves, w, np.minimum), w, np.maximum)
    core = hashes[w : w + end - start]
    chosen = (opened == halves[w - 1 : w - 1 + end - start]) & valid[start:end]
    # In a run of one byte every position is the least; its ends and every w-th place will do.
    before, after = hashes[w - 1 : w - 1 + end - start], hashes[w + 1 : w + 1 + end - start]
    chosen &= (before != core) | (after != core) | (np.arange(start, end) % w == 0)
    places = np.flatnonzero(chosen)
    return core[places], places + start
