r"""Perplexity of a document under an interpolated n-gram model with hashed counts.

For word w after the context h_k of the k words before it,

    p(w | h) = l_0 / V + sum_{k=0}^{n-1} l_{k+1} c(h_k w) / c(h_k)

(Jelinek-Mercer), with the counts c in tables of 2^bits buckets instead of a dictionary: no
vocabulary, no unknown word, a fixed size. Colliding n-grams add their counts, so the model is
a score and not exactly normalised; with far fewer n-grams than buckets that does not matter.
A context that was never seen gives its weight to the next shorter one. Perplexity is
exp(-mean log p), and depends on the kind of text: compare within a source only (Wenzek et al.
2020, 1911.00359, take terciles per language).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from jaxtyping import UInt32

from experiments.data.pipeline.hashed import buckets, ngram_hashes, word_hashes

WEIGHTS = (0.02, 0.18, 0.4, 0.4)  # of 1/V, then of orders 1, 2, 3; they sum to 1
FLUSH = 1 << 22  # n-grams collected before they are counted


@dataclasses.dataclass
class NgramModel:
    """Counts of hashed n-grams.

    Attributes:
      counts: per order, one row of 2^bits.
      total: words seen.
      vocabulary: occupied buckets of order 1, the V of the formula.
    """

    counts: UInt32[np.ndarray, "order buckets"]
    total: int = 0

    @property
    def order(self) -> int:
        return len(self.counts)

    @property
    def bits(self) -> int:
        return int(self.counts.shape[1]).bit_length() - 1

    @functools.cached_property
    def vocabulary(self) -> int:
        return int(np.count_nonzero(self.counts[0])) + 1

    def perplexity(self, text: str) -> float:
        """``exp(-mean log p)`` over the words of the text; NaN for a text without any."""
        words = word_hashes(text)
        if not len(words):
            return float("nan")
        weight_left = np.ones(len(words))
        probability = np.zeros(len(words))
        # From the longest context down: what an unseen context would have had stays for later.
        for order in range(self.order, 0, -1):
            share = WEIGHTS[order] / sum(WEIGHTS[: order + 1])
            numerator = self._lookup(words, order)
            denominator = self._lookup(words[:-1], order - 1) if order > 1 else None
            ratio, seen = self._ratio(numerator, denominator, len(words))
            probability += np.where(seen, weight_left * share * ratio, 0.0)
            weight_left = np.where(seen, weight_left * (1 - share), weight_left)
        probability += weight_left / self.vocabulary
        return float(np.exp(-np.mean(np.log(probability))))

    def _lookup(self, words: np.ndarray, order: int) -> np.ndarray:
        return self.counts[order - 1][buckets(ngram_hashes(words, order), self.bits)]

    def _ratio(
        self, numerator: np.ndarray, denominator: np.ndarray | None, length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """c(h w) / c(h), at most 1, per word; words without a full context count as unseen."""
        if denominator is None:
            return numerator / max(1, self.total), np.ones(length, dtype=bool)
        ratio, seen = np.zeros(length), np.zeros(length, dtype=bool)
        start = length - len(numerator)
        denominator = denominator[len(denominator) - len(numerator) :]
        seen[start:] = denominator > 0
        ratio[start:] = np.minimum(1.0, numerator / np.maximum(1, denominator))
        return ratio, seen

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            np.savez_compressed(file, counts=self.counts, total=np.int64(self.total))

    @classmethod
    def load(cls, path: Path) -> NgramModel:
        with np.load(path) as arrays:
            return cls(arrays["counts"], int(arrays["total"]))


def train_ngram_model(texts: Iterable[str], *, order: int = 3, bits: int = 22) -> NgramModel:
    """Counts the n-grams of texts.

    Args:
      texts: what counts as good text; a document's n-grams do not cross into the next.
      order: longest n-gram, 1 to 3.
      bits: log2 of the buckets per order (4 bytes each): some 10 times the distinct words.

    Raises:
      ValueError: ``order`` or ``bits`` out of range, or no word in ``texts``.
    """
    if not 1 <= order < len(WEIGHTS):
        raise ValueError(f"order must lie in [1, {len(WEIGHTS) - 1}], got {order}")
    if not 8 <= bits <= 28:
        raise ValueError(f"bits must lie in [8, 28], got {bits}")
    model = NgramModel(np.zeros((order, 1 << bits), dtype=np.uint32))
    held: list[list[np.ndarray]] = [[] for _ in range(order)]
    waiting = 0
    for text in texts:
        words = word_hashes(text)
        model.total += len(words)
        for place in range(order):
            held[place].append(buckets(ngram_hashes(words, place + 1), bits))
        waiting += len(words)
        if waiting > FLUSH:
            _count(model, held)
            waiting = 0
    _count(model, held)
    if not model.total:
        raise ValueError("the reference text of the n-gram model holds no word")
    return model


def _count(model: NgramModel, held: list[list[np.ndarray]]) -> None:
    for place, parts in enumerate(held):
        if parts:
            found, counts = np.unique(np.concatenate(parts), return_counts=True)
            model.counts[place][found] += counts.astype(np.uint32)
            parts.clear()
