r"""Hashes of numbers and of sliding windows, vectorised over numpy arrays of uint64.

A window of n values x_i is hashed by a polynomial modulo 2^64,

    H_n[i] = sum_j x_{i+j} m^{n-1-j},      H_{a+b}[i] = H_a[i] m^b + H_b[i+a],

so that n values cost about 2 log2(n) passes over the array instead of n. Values go through
`mix` first, whose output bits each depend on all input bits.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt64

_MASK = (1 << 64) - 1
# Odd, with bits spread evenly: 2^64 over the golden ratio, and two random odd numbers.
_STEP = 0x9E3779B97F4A7C15
_MIX_1 = 0xD6E8FEB86659FD93
_MIX_2 = 0xA0761D6478BD642F
_WINDOW = 0xC2B2AE3D27D4EB4F

Hashes = UInt64[np.ndarray, " n"]


def mix(values: Hashes, *, seed: int = 0) -> Hashes:
    """Two rounds of xor-shift and multiplication: a one-to-one map of 64-bit numbers.

    >>> a, b = mix(np.arange(2, dtype=np.uint64))
    >>> 20 < int(a ^ b).bit_count() < 44  # one input bit turns over about half of the output
    True
    """
    out = values + np.uint64((seed * _STEP + _STEP) & _MASK)
    out ^= out >> np.uint64(32)
    out *= np.uint64(_MIX_1)
    out ^= out >> np.uint64(29)
    out *= np.uint64(_MIX_2)
    out ^= out >> np.uint64(32)
    return out


def window_hashes(values: Hashes, size: int) -> Hashes:
    """Polynomial hashes of all windows of `size` consecutive values.

    Returns:
      max(n - size + 1, 0) hashes; equal windows have equal hashes wherever they stand.

    >>> h = window_hashes(mix(np.array([1, 2, 3, 9, 1, 2, 3], np.uint64)), 3)
    >>> len(h), bool(h[0] == h[4]), len(set(h.tolist()))
    (5, True, 4)
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if len(values) < size:
        return np.empty(0, np.uint64)
    total: Hashes | None = None
    done, power, width = 0, values, 1
    rest = size
    while rest:
        if rest & 1:
            total = power if total is None else _join(total, power, done, width)
            done += width
        rest >>= 1
        if rest:
            power = _join(power, power, width, width)
            width *= 2
    assert total is not None
    return total


def _join(left: Hashes, right: Hashes, left_size: int, right_size: int) -> Hashes:
    """Hashes of windows of left_size + right_size values from those of their two parts."""
    count = min(len(left), len(right) - left_size)
    out = left[:count] * np.uint64(pow(_WINDOW, right_size, 1 << 64))
    out += right[left_size : left_size + count]
    return out
