"""Repeated k-byte windows of a text that fits in memory, by its suffix array (libdivsufsort)."""

from __future__ import annotations

import numpy as np
import pydivsufsort
from jaxtyping import Bool, Int32, Int64, UInt8, UInt32

from experiments.data.anchors import windows_inside
from experiments.data.hashing import mix, window_hashes

# Bytes of memory per byte of text at the peak: text 1, suffix array 4, hashes or first
# occurrences 4, flags 1.
BYTES_PER_BYTE = 10
MOST_BYTES = (1 << 31) - 1  # what 32-bit suffixes can number
BLOCK = 1 << 16


def repeated_windows(
    text: UInt8[np.ndarray, " n"], offsets: Int64[np.ndarray, " s_plus_1"], size: int
) -> Int32[np.ndarray, " n"]:
    """For every position whose `size` bytes stand at an earlier position too: the first one.

    Neighbours in the suffix array are compared by a 32-bit hash of their first `size` bytes,
    which takes less memory and time than an LCP array; what it calls equal is then compared
    byte by byte, and another hash is tried if that fails.

    Args:
      text: any bytes; writable, as libdivsufsort wants it.
      offsets: limits of the stretches of the text, from 0 to n; a window lies inside one.
      size: k.

    Returns:
      The first position of an equal window, or -1 where there is no earlier one.

    >>> text = np.frombuffer(bytearray(b"abcd-abcd-bcd"), np.uint8)
    >>> repeated_windows(text, np.array([0, 13]), 3).tolist()
    [-1, -1, -1, -1, -1, 0, 1, 2, -1, -1, 1, -1, -1]
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"text must have at most {MOST_BYTES} bytes, got {len(text)}")
    if len(text) < size:
        return np.full(len(text), -1, np.int32)
    for seed in range(8):
        first = _first_occurrences(text, offsets, size, seed)
        if _same_bytes(text, first, size):
            return first
    raise RuntimeError("eight hashes of 32 bits collided: the memory of this machine is at fault")


def _first_occurrences(
    text: UInt8[np.ndarray, " n"], offsets: Int64[np.ndarray, " s_plus_1"], size: int, seed: int
) -> Int32[np.ndarray, " n"]:
    hashes = _window_hashes(text, offsets, size, seed)
    suffixes = pydivsufsort.divsufsort(text)
    begins = _group(suffixes, hashes)
    del hashes
    return _earliest(suffixes, begins)


def _window_hashes(
    text: UInt8[np.ndarray, " n"], offsets: Int64[np.ndarray, " s_plus_1"], size: int, seed: int
) -> UInt32[np.ndarray, " n"]:
    """32 bits, not 0, for the `size` bytes from each position; 0 where they cross a limit."""
    table = mix(np.arange(256, dtype=np.uint64), seed=100 + seed)
    inside = windows_inside(len(text), offsets, size)
    out = np.zeros(len(text), np.uint32)
    for start in range(0, len(text) - size + 1, BLOCK):
        values = np.take(table, text[start : start + BLOCK + size - 1].astype(np.intp))
        hashes = mix(window_hashes(values, size), seed=seed) >> np.uint64(32)
        block = slice(start, start + len(hashes))
        out[block] = np.maximum(hashes, np.uint64(1)) * inside[block]
    return out


def _group(
    suffixes: Int32[np.ndarray, " n"], hashes: UInt32[np.ndarray, " n"]
) -> Bool[np.ndarray, " m"]:
    """Moves the m suffixes that have a hash to the front; flags those unlike the one before.

    A suffix without a hash may stand between equal ones, if its window crosses a limit.
    """
    begins = np.empty(len(suffixes), bool)
    filled, last = 0, np.uint32(0)
    for start in range(0, len(suffixes), BLOCK):
        part = suffixes[start : start + BLOCK]
        ordered = np.take(hashes, part)
        some = ordered != 0
        part, ordered = part[some], ordered[some]
        end = filled + len(part)
        suffixes[filled:end] = part
        begins[filled:end] = ordered != np.concatenate(([last], ordered[:-1]))[: len(ordered)]
        last = ordered[-1] if len(ordered) else last
        filled = end
    return begins[:filled]


def _earliest(
    suffixes: Int32[np.ndarray, " n"], begins: Bool[np.ndarray, " m"]
) -> Int32[np.ndarray, " n"]:
    """The least position of the group of each suffix, at its place; -1 for the least itself."""
    first = np.full(len(suffixes), -1, np.int32)
    start = 0
    while start < len(begins):
        end = _next_begin(begins, start + BLOCK)
        part = suffixes[start:end]
        groups = np.flatnonzero(begins[start:end])
        least = np.minimum.reduceat(part, groups)
        least = np.repeat(least, np.diff(groups, append=len(part)))
        later = part != least
        first[part[later]] = least[later]
        start = end
    return first


def _next_begin(begins: Bool[np.ndarray, " m"], place: int) -> int:
    """The first flagged place from `place` on, or the end."""
    while place < len(begins):
        block = begins[place : place + BLOCK]
        if block.any():
            return place + int(block.argmax())
        place += len(block)
    return len(begins)


def _same_bytes(text: UInt8[np.ndarray, " n"], first: Int32[np.ndarray, " n"], size: int) -> bool:
    """Whether windows and their first occurrences are equal, byte by byte.

    Of a run of windows that move on together each compares its first byte, the last one all.
    """
    step = max(BLOCK // size, 1)
    window = np.arange(size)
    for start in range(0, len(first), BLOCK):
        block = first[start : start + BLOCK + 1].astype(np.int64)
        repeats = np.flatnonzero(block[:BLOCK] >= 0)
        if not np.array_equal(text[start + repeats], text[block[repeats]]):
            return False
        runs_on = np.zeros(min(BLOCK, len(block)), bool)
        runs_on[: len(block) - 1] = block[1:] == block[:-1] + 1
        ends = repeats[~runs_on[repeats]]
        for some in range(0, len(ends), step):
            last = ends[some : some + step, None]
            if not np.array_equal(text[start + last + window], text[block[last] + window]):
                return False
    return True
