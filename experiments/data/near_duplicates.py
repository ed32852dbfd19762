r"""Near duplicates: MinHash finds candidates, the true Jaccard similarity decides.

    documents --shingles--> sets --MinHash, bands--> buckets --verification--> clusters

Documents that share a bucket are candidates, not duplicates: dropping whole connected components
of candidates joins A and C when A resembles B and B resembles C, and has deleted most of a
library of books before. Here documents are taken in the order of the keep rule; each is compared
with the documents *kept so far* in its buckets and dropped only if the Jaccard similarity of the
shingle sets with one of them reaches the threshold. So every dropped document has a kept
representative at or above the threshold, and both ends of such a chain stay.

Each document's candidates that reach similarity s are found with the probability of the
S-curve (`NearDuplicateConfig.curve`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt32, UInt64

from experiments.data import minhash
from experiments.data.clustering import ComponentClustering, VerifiedClustering
from experiments.data.documents import Document
from experiments.data.shingles import UNITS, Unit, shingle_sets
from experiments.data.threads import batches, check_workers, ordered_map, repeatable, text_of

Keep = Literal["longest", "first"]
KEEP: tuple[Keep, ...] = ("longest", "first")
Documents = Iterable[Document | str]


@dataclasses.dataclass(frozen=True)
class NearDuplicateConfig:
    """What counts as a near duplicate, and which one stays.

    Attributes:
      threshold: Jaccard similarity of the shingle sets, in (0, 1], from which on the later
        document in the order of `keep` is dropped.
      unit: shingles of ``word`` or of ``char`` (see `shingles`).
      size: units per shingle. Five words are what FineWeb and RefinedWeb take. Short character
        n-grams are common to unrelated texts: below about 20 they make many candidates.
      permutations: length of a signature.
      bands: and `rows`: both given, or both None for `minhash.fit_bands`.
      rows: hashes per band.
      miss_weight: weight of a missed pair against a false candidate, in (0, 1), for the fit.
      seed: of the permutations.
      verify: compare shingle sets. Without, every candidate counts as a duplicate and all but
        one document of each connected component are dropped: for comparison with other tools.
      keep: ``longest`` takes the most characters first, then the smallest id; ``first`` goes by
        the order of the input.
      prefer: sources to take before all others, in this order, whatever `keep` says.
      most_compared: kept documents of one bucket that are looked at. It bounds the work on
        text made from one template; comparisons that it cut off are counted.
    """

    threshold: float = 0.8
    unit: Unit = "word"
    size: int = 5
    permutations: int = 128
    bands: int | None = None
    rows: int | None = None
    miss_weight: float = 0.95
    seed: int = 0
    verify: bool = True
    keep: Keep = "longest"
    prefer: tuple[str, ...] = ()
    most_compared: int = 64

    def __post_init__(self) -> None:
        if not 0.0 < self.threshold <= 1.0:
            raise ValueError(f"threshold must be in (0, 1], got {self.threshold}")
        if not 0.0 < self.miss_weight < 1.0:
            raise ValueError(f"miss_weight must be in (0, 1), got {self.miss_weight}")
        if self.unit not in UNITS:
            raise ValueError(f"unit must be one of {UNITS}, got {self.unit!r}")
        if self.keep not in KEEP:
            raise ValueError(f"keep must be one of {KEEP}, got {self.keep!r}")
        for name in ("size", "permutations", "most_compared"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed must be in [0, 2^32), got {self.seed}")
        if (self.bands is None) != (self.rows is None):
            raise ValueError(
                f"give both bands and rows or neither, got {self.bands} and {self.rows}"
            )
        if self.bands is not None and self.rows is not None:
            minhash.check_bands(self.bands, self.rows, self.permutations)

    def band_shape(self) -> tuple[int, int]:
        """(bands, rows): those given, or those that fit the threshold."""
        if self.bands is not None and self.rows is not None:
            return self.bands, self.rows
        return minhash.fit_bands(self.threshold, self.permutations, miss_weight=self.miss_weight)

    def curve(self) -> str:
        """The S-curve as text."""
        return minhash.s_curve(*self.band_shape(), self.threshold)


@dataclasses.dataclass(frozen=True)
class NearDuplicates:
    """Which of n documents to keep, and why the others go.

    Attributes:
      keep: (n,) True for documents that stay.
      representative: (n,) the kept document that each resembles, itself if it stays; n + j is
        document j of the held-out set.
      cluster: (n,) number of the representative among all, in order of first appearance.
      dropped: (m,) the documents that go, in input order.
      kept: (m,) their representatives.
      similarity: (m,) Jaccard similarity of each dropped document with its representative;
        without verification, the share of equal signature values.
      counts: what was seen and done, by name.
    """

    keep: Bool[np.ndarray, " n"]
    representative: Int64[np.ndarray, " n"]
    cluster: Int64[np.ndarray, " n"]
    dropped: Int64[np.ndarray, " m"]
    kept: Int64[np.ndarray, " m"]
    similarity: Float64[np.ndarray, " m"]
    counts: dict[str, int]


@dataclasses.dataclass
class _Sketches:
    """What one pass over the documents leaves of them."""

    keys: UInt64[np.ndarray, "b d"]
    signatures: UInt32[np.ndarray, "d p"] | None
    filled: Bool[np.ndarray, " d"]
    lengths: list[int]
    ids: list[str]
    sources: list[str]


def near_duplicates(
    documents: Documents,
    config: NearDuplicateConfig | None = None,
    *,
    held_out: Documents | None = None,
    workers: int = 1,
) -> NearDuplicates:
    """Finds near duplicates among documents, and of held-out ones.

    Two passes over the text: one for the signatures, one for the shingle sets of the
    candidates. Memory: 8 bytes per band and document (128 for the default), and 8 bytes per
    shingle of a candidate; the text itself only if `documents` is an iterator, which is read
    into a list.

    A document of fewer words than a shingle is compared as a whole (see `shingles`). An empty
    one, white space alone, is kept and counted: that it is empty is another rule's matter.

    Args:
      documents: `Document`s or strings of any sources; a string's id is its index.
      config: defaults to `NearDuplicateConfig()`.
      held_out: documents that are always kept; one that resembles any of them is dropped.
      workers: threads; the result is the same for any number.

    Raises:
      RuntimeError: the second pass saw other documents than the first.
      TypeError: an item is neither Document nor str.
      ValueError: `workers` is not positive.

    >>> text = "the quick brown fox jumps over the lazy dog and runs away"
    >>> found = near_duplicates([text, text.upper() + "!", "something else"])
    >>> found.keep.tolist(), found.representative.tolist(), found.similarity.tolist()
    ([False, True, True], [1, 1, 2], [1.0])
    """
    config = config or NearDuplicateConfig()
    check_workers(workers)
    documents, held = repeatable(documents), repeatable(held_out or [])
    both = _Chain(documents, held)
    sketches = _sketch(both, config, workers)
    total = len(sketches.ids)
    n = total - sum(1 for _ in held)
    rank = _ranks(sketches, n, config)
    columns = np.flatnonzero(sketches.filled)
    members, starts = minhash.buckets(sketches.keys[:, columns], columns)
    if config.verify:
        sets = _candidate_sets(both, np.unique(members), total, config, workers)
        cluster = VerifiedClustering(
            sets, rank, n, threshold=config.threshold, most=config.most_compared
        )
        cluster.resolve(members, starts)
    else:
        assert sketches.signatures is not None
        cluster = ComponentClustering(sketches.signatures, rank, n)
        cluster.resolve(members, starts)
    counts = {
        "documents": n,
        "held_out": total - n,
        "empty": int((~sketches.filled[:n]).sum()),
        "buckets": len(starts),
        "candidates": len(np.unique(members)),
        "compared": cluster.compared,
        "not_compared": cluster.cut_off,
    }
    return _result(cluster.representative[:n], cluster.similarity[:n], counts)


class _Chain:
    """Documents, then held-out ones, as often as wanted."""

    def __init__(self, *parts: Documents) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Document | str]:
        for part in self.parts:
            yield from part


def _sketch(documents: _Chain, config: NearDuplicateConfig, workers: int) -> _Sketches:
    bands, rows = config.band_shape()
    # Only an estimate of the similarity needs the permutations that no band uses.
    count = bands * rows if config.verify else config.permutations
    permutations = minhash.Permutations.draw(count, config.seed)

    def sketch(batch: list[Document | str]):
        texts = [text_of(document) for document in batch]
        sets = shingle_sets(texts, unit=config.unit, size=config.size)
        signature = minhash.signatures(sets, permutations)
        keys = minhash.band_keys(signature, bands, rows)
        return batch, keys, None if config.verify else signature, np.diff(sets.offsets) > 0

    keys, kept_signatures, filled = [np.empty((bands, 0), np.uint64)], [], [np.zeros(0, bool)]
    lengths: list[int] = []
    ids: list[str] = []
    sources: list[str] = []
    for batch, key, signature, has in ordered_map(sketch, batches(documents), workers):
        keys.append(key)
        filled.append(has)
        if signature is not None:
            kept_signatures.append(signature)
        for document in batch:
            lengths.append(len(text_of(document)))
            ids.append(document.id if isinstance(document, Document) else f"{len(ids):012d}")
            sources.append(document.source if isinstance(document, Document) else "")
    empty = np.empty((0, config.permutations), np.uint32)
    return _Sketches(
        keys=np.concatenate(keys, axis=1),
        signatures=None if config.verify else np.concatenate([empty, *kept_signatures]),
        filled=np.concatenate(filled),
        lengths=lengths,
        ids=ids,
        sources=sources,
    )


def _ranks(sketches: _Sketches, n: int, config: NearDuplicateConfig) -> list[int]:
    """Place of every document in the order of the keep rule; held-out ones come first."""
    preferred = {source: place for place, source in enumerate(config.prefer)}

    def order(index: int) -> tuple[int | str, ...]:
        if index >= n:
            return (-1, index)
        source = preferred.get(sketches.sources[index], len(preferred))
        if config.keep == "first":
            return (source, index)
        return (source, -sketches.lengths[index], sketches.ids[index], index)

    rank = [0] * len(sketches.ids)
    for place, index in enumerate(sorted(range(len(rank)), key=order)):
        rank[index] = place
    return rank


def _candidate_sets(
    documents: _Chain,
    wanted: Int64[np.ndarray, " c"],
    total: int,
    config: NearDuplicateConfig,
    workers: int,
) -> dict[int, UInt64[np.ndarray, " m"]]:
    """Sorted shingle sets of the candidates, from a second pass over the text."""
    is_wanted = np.zeros(total, bool)
    is_wanted[wanted] = True
    seen = 0

    def chosen() -> Iterator[tuple[list[int], list[str]]]:
        nonlocal seen
        for batch in batches(documents):
            inside = np.flatnonzero(is_wanted[seen : seen + len(batch)])
            yield (inside + seen).tolist(), [text_of(batch[i]) for i in inside]
            seen += len(batch)

    def unique(item: tuple[list[int], list[str]]):
        sets = shingle_sets(item[1], unit=config.unit, size=config.size)
        return [(index, sets.unique(place)) for place, index in enumerate(item[0])]

    found = dict(pair for part in ordered_map(unique, chosen(), workers) for pair in part)
    if seen != total:
        raise RuntimeError(f"documents changed while they were read: {total}, then {seen}")
    return found


def _result(
    representative: Int64[np.ndarray, " n"],
    similarity: Float64[np.ndarray, " n"],
    counts: dict[str, int],
) -> NearDuplicates:
    n = len(representative)
    keep = representative == np.arange(n)
    dropped = np.flatnonzero(~keep)
    _, first, inverse = np.unique(representative, return_index=True, return_inverse=True)
    appearance = np.empty(len(first), np.int64)
    appearance[np.argsort(first)] = np.arange(len(first))
    cluster = appearance[inverse.reshape(-1)] if n else np.zeros(0, np.int64)
    sizes = np.bincount(cluster, minlength=1)
    counts |= {
        "dropped": len(dropped),
        "dropped_held_out": int((representative[dropped] >= n).sum()),
        "clusters": len(np.unique(representative[dropped])),
        "largest_cluster": int(sizes.max(initial=0)),
    }
    return NearDuplicates(
        keep, representative, cluster, dropped, representative[dropped], similarity[dropped], counts
    )
