"""Words to numbers without a vocabulary: hashed n-grams, the same on every machine."""

from __future__ import annotations

import functools
import re
import zlib

import numpy as np
from jaxtyping import Int64, UInt64

_WORD = re.compile(r"[^\W_]+|[^\w\s]")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@functools.lru_cache(maxsize=1 << 18)
def _word_hash(word: str) -> int:
    # CRC-32 and not hash(): Python salts that with every start.
    return zlib.crc32(word.encode(errors="replace"))


def word_hashes(text: str) -> UInt64[np.ndarray, " n"]:
    """A 32-bit hash of each lower-cased word and punctuation mark, in order."""
    words = _WORD.findall(text.lower())
    return np.fromiter(map(_word_hash, words), dtype=np.uint64, count=len(words))


def ngram_hashes(words: UInt64[np.ndarray, " n"], order: int) -> UInt64[np.ndarray, " m"]:
    """A 64-bit hash of each run of ``order`` words, ``max(0, n - order + 1)`` of them."""
    if len(words) < order:
        return np.zeros(0, dtype=np.uint64)
    count = len(words) - order + 1
    keys = np.full(count, order, dtype=np.uint64)
    for place in range(order):
        keys = (keys ^ words[place : place + count]) * _MULTIPLIER
        keys ^= keys >> np.uint64(29)
    return keys


def buckets(keys: UInt64[np.ndarray, " n"], bits: int) -> Int64[np.ndarray, " n"]:
    """Buckets ``[0, 2^bits)``: the top bits of a product, which every bit of the key reaches."""
    return ((keys * _MULTIPLIER) >> np.uint64(64 - bits)).astype(np.int64)
