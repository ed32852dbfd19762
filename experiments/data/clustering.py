"""From buckets of candidates to clusters, each with the one document that stays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64, UInt32, UInt64
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components


def jaccard(a: UInt64[np.ndarray, " n"], b: UInt64[np.ndarray, " m"]) -> float:
    """|A n B| / |A u B| of two sorted arrays without repeats; 0 for two empty ones.

    >>> jaccard(np.array([1, 2, 3], np.uint64), np.array([2, 3, 4], np.uint64))
    0.5
    """
    merged = np.concatenate((a, b))
    merged.sort()
    common = int(np.count_nonzero(merged[1:] == merged[:-1]))
    return common / max(len(merged) - common, 1)


class VerifiedClustering:
    """Keeps or drops candidates one by one, in the order of the keep rule.

    Attributes:
      representative: for each document the kept one that it resembles, or itself.
      similarity: with its representative.
      compared: pairs whose sets were compared.
      cut_off: pairs that `most` left out.
    """

    def __init__(
        self,
        sets: dict[int, UInt64[np.ndarray, " m"]],
        rank: Sequence[int],
        n: int,
        *,
        threshold: float,
        most: int,
    ) -> None:
        self.sets, self.rank, self.n = sets, rank, n
        self.threshold, self.most = threshold, most
        self.representative = np.arange(len(rank))
        self.similarity = np.ones(len(rank))
        self.compared = self.cut_off = 0

    def resolve(self, members: Int64[np.ndarray, " e"], starts: Int64[np.ndarray, " k"]) -> None:
        sizes = np.diff(starts, append=len(members))
        bucket_of = np.repeat(np.arange(len(starts)), sizes)
        order = np.argsort(members, kind="stable")
        candidates, first = np.unique(members[order], return_index=True)
        of_candidate = np.split(bucket_of[order], first[1:]) if len(candidates) else []
        kept_in: list[list[int]] = [[] for _ in starts]
        held_in: list[list[int]] = [[] for _ in starts]
        for place in sorted(range(len(candidates)), key=lambda i: self.rank[candidates[i]]):
            index = int(candidates[place])
            places = of_candidate[place].tolist()
            if index >= self.n:
                for bucket in places:
                    held_in[bucket].append(index)
            elif not self._drop(index, places, kept_in, held_in):
                for bucket in places:
                    kept_in[bucket].append(index)

    def _drop(
        self, index: int, places: list[int], kept_in: list[list[int]], held_in: list[list[int]]
    ) -> bool:
        shared: dict[int, int] = {}
        for bucket in places:
            self.cut_off += max(0, len(kept_in[bucket]) - self.most)
            for other in (*held_in[bucket], *kept_in[bucket][: self.most]):
                shared[other] = shared.get(other, 0) + 1
        mine = self.sets[index]
        # Those that share most bands first: the most similar one is likely among them.
        for other in sorted(shared, key=lambda o: (o < self.n, -shared[o], self.rank[o])):
            theirs = self.sets[other]
            smaller, larger = sorted((len(mine), len(theirs)))
            if smaller < self.threshold * larger:  # then the similarity is below it too
                continue
            self.compared += 1
            similarity = jaccard(mine, theirs)
            if similarity >= self.threshold:
                self.representative[index] = other
                self.similarity[index] = similarity
                return True
        return False


class ComponentClustering:
    """Without verification: one document of each connected component of candidates stays.

    The attributes are those of `VerifiedClustering`; similarities are estimates.
    """

    def __init__(self, signatures: UInt32[np.ndarray, "d p"], rank: Sequence[int], n: int) -> None:
        self.signatures, self.rank, self.n = signatures, np.asarray(rank), n
        self.representative = np.arange(len(rank))
        self.similarity = np.ones(len(rank))
        self.compared = self.cut_off = 0

    def resolve(self, members: Int64[np.ndarray, " e"], starts: Int64[np.ndarray, " k"]) -> None:
        """Joins the buckets of `minhash.buckets` that share a document."""
        hubs = np.repeat(members[starts], np.diff(starts, append=len(members)))
        graph = coo_matrix(
            (np.ones(len(members), bool), (hubs, members)), shape=(len(self.rank), len(self.rank))
        )
        component = connected_components(graph, directed=False)[1]
        best = np.full(component.max(initial=-1) + 1, len(self.rank))
        np.minimum.at(best, component, self.rank)
        by_rank = np.argsort(self.rank)
        chosen = by_rank[best[component]]
        gone = np.flatnonzero(
            (chosen != np.arange(len(self.rank))) & (np.arange(len(self.rank)) < self.n)
        )
        self.representative[gone] = chosen[gone]
        equal = self.signatures[gone] == self.signatures[chosen[gone]]
        self.similarity[gone] = equal.mean(axis=1) if len(gone) else 1.0
