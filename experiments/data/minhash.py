r"""MinHash signatures and locality-sensitive hashing (Broder 1997; Indyk and Motwani 1998).

For a random permutation pi of the universe of shingles,

    P(min pi(A) = min pi(B)) = |A n B| / |A u B| = s,

the Jaccard similarity. A signature holds the minima of p permutations; cut into b bands of r
rows, two documents share at least one whole band with probability

    P(candidate | s) = 1 - (1 - s^r)^b,

the S-curve. `fit_bands` chooses b and r for a threshold t: it minimises

    w int_t^1 (1 - P(s)) ds + (1 - w) int_0^t P(s) ds,   b r <= p,

over w = `miss_weight`. Candidates are verified afterwards, so that a false one only costs time
and a missed one is lost: w is above one half by default.

The permutations are x -> a x + c modulo 2^32 with odd a, of the upper half of 64-bit hashes.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float64, Int64, UInt32, UInt64

from experiments.data.hashing import mix
from experiments.data.shingles import ShingleSets

# No document: larger than, or equal to, any minimum.
EMPTY = np.uint32(0xFFFFFFFF)
# Shingles permuted at once: they stay in the second-level cache over all permutations.
BLOCK = 1 << 16


def check_bands(bands: int, rows: int, permutations: int) -> None:
    """Raises ValueError unless `bands` bands of `rows` rows fit into a signature."""
    if bands < 1 or rows < 1:
        raise ValueError(f"bands and rows must be at least 1, got {bands} and {rows}")
    if bands * rows > permutations:
        raise ValueError(
            f"bands * rows must be at most permutations, got {bands} * {rows} = {bands * rows} > "
            f"{permutations}: use fewer bands or rows, or more permutations"
        )


def candidate_probability(
    similarity: Float64[np.ndarray, "*s"] | float, bands: int, rows: int
) -> Float64[np.ndarray, "*s"]:
    """P(candidate | s) = 1 - (1 - s^r)^b.

    >>> round(float(candidate_probability(0.8, 14, 8)), 3)
    0.924
    """
    return 1.0 - (1.0 - np.asarray(similarity, np.float64) ** rows) ** bands


def fit_bands(threshold: float, permutations: int, *, miss_weight: float = 0.5) -> tuple[int, int]:
    """(bands, rows) that minimise the weighted area of misses and false candidates.

    >>> fit_bands(0.8, 128)  # equal weights
    (9, 13)
    """
    steps = 400
    low = (np.arange(steps) + 0.5) / steps * threshold
    high = threshold + (np.arange(steps) + 0.5) / steps * (1.0 - threshold)
    best, least = (1, 1), np.inf
    for rows in range(1, permutations + 1):
        for bands in range(1, permutations // rows + 1):
            misses = (1.0 - candidate_probability(high, bands, rows)).mean() * (1.0 - threshold)
            false = candidate_probability(low, bands, rows).mean() * threshold
            cost = miss_weight * misses + (1.0 - miss_weight) * false
            if cost < least:
                best, least = (bands, rows), cost
    return best


@dataclasses.dataclass(frozen=True)
class Permutations:
    """x -> factor x + shift modulo 2^32, `count` of them from a seed."""

    factors: UInt32[np.ndarray, " p"]
    shifts: UInt32[np.ndarray, " p"]

    @classmethod
    def draw(cls, count: int, seed: int) -> Permutations:
        words = mix(np.arange(count, dtype=np.uint64) + np.uint64(seed << 20), seed=2)
        return cls(
            factors=(words >> np.uint64(32)).astype(np.uint32) | np.uint32(1),
            shifts=words.astype(np.uint32),
        )


def signatures(sets: ShingleSets, permutations: Permutations) -> UInt32[np.ndarray, "d p"]:
    """Minima of each document under each permutation; `EMPTY` for one without shingles."""
    out = np.full((len(permutations.factors), len(sets)), EMPTY, np.uint32)
    counts = np.diff(sets.offsets)
    # reduceat takes the value at the start of an empty segment, so these are left out.
    filled = np.flatnonzero(counts)
    starts = sets.offsets[:-1][filled]
    values = (sets.hashes >> np.uint64(32)).astype(np.uint32)
    first = 0
    while first < len(filled):
        begin = starts[first]
        last = max(first + 1, int(np.searchsorted(starts, begin + BLOCK)) - 1)
        last = len(filled) if last >= len(filled) - 1 else last
        end = len(values) if last == len(filled) else starts[last]
        block = values[begin:end]
        image = np.empty_like(block)
        minima = np.empty(last - first, np.uint32)
        for row, (factor, shift) in enumerate(
            zip(permutations.factors, permutations.shifts, strict=True)
        ):
            np.multiply(block, factor, out=image)
            np.add(image, shift, out=image)
            np.minimum.reduceat(image, starts[first:last] - begin, out=minima)
            out[row, filled[first:last]] = minima
        first = last
    return np.ascontiguousarray(out.T)


def band_keys(
    signature: UInt32[np.ndarray, "d p"], bands: int, rows: int
) -> UInt64[np.ndarray, "b d"]:
    """One 64-bit key for each band of each document.

    Keys of different bands differ in meaning: they are compared band by band.
    """
    values = signature[:, : bands * rows].reshape(len(signature), bands, rows).astype(np.uint64)
    keys = np.zeros(values.shape[:2], np.uint64)
    for row in range(rows):
        keys = mix(keys ^ values[:, :, row], seed=3)
    return np.ascontiguousarray(keys.T)


def buckets(
    keys: UInt64[np.ndarray, "b d"], documents: Int64[np.ndarray, " d"]
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " k"]]:
    """Groups of two or more documents that share a band.

    Args:
      keys: of `band_keys`.
      documents: the number of each column.

    Returns:
      Members, bucket after bucket, and where each bucket starts; members in column order.
    """
    members, starts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    total = 0
    for band in keys if len(documents) else ():
        order = np.argsort(band, kind="stable")
        same = band[order][1:] == band[order][:-1]
        begins = np.flatnonzero(same & ~np.concatenate(([False], same[:-1])))
        inside = np.concatenate((same, [False])) | np.concatenate(([False], same))
        positions = np.cumsum(inside) - 1
        starts.append(total + positions[begins])
        members.append(documents[order[inside]])
        total += int(inside.sum())
    return np.concatenate(members), np.concatenate(starts)


def s_curve(bands: int, rows: int, threshold: float) -> str:
    """The S-curve as lines of text: similarity, probability of being a candidate, a bar.

    >>> print(s_curve(14, 8, 0.8).splitlines()[0])
    14 bands x 8 rows = 112 permutations; half of the pairs at similarity 0.685 are candidates
    """
    half = (1.0 - 0.5 ** (1.0 / bands)) ** (1.0 / rows)
    lines = [
        f"{bands} bands x {rows} rows = {bands * rows} permutations; "
        f"half of the pairs at similarity {half:.3f} are candidates"
    ]
    grid = sorted({round(0.3 + 0.05 * step, 2) for step in range(15)} | {round(threshold, 4)})
    for similarity in grid:
        chance = float(candidate_probability(similarity, bands, rows))
        mark = " < threshold" if abs(similarity - threshold) < 1e-9 else ""
        lines.append(f"{similarity:7.2f} {chance:8.4f} {'#' * round(40 * chance)}{mark}")
    return "\n".join(lines)
