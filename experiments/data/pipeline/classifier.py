r"""A linear quality classifier on hashed word n-grams, as fastText's but in numpy.

The features of a text are the counts of its word 1- and 2-grams in 2^bits buckets, as
log(1 + count) and scaled to length 1; the score is sigma(w . x + b), the probability that it
is of the good set. Logistic regression by AdaGrad (Duchi et al. 2011), whose step per weight
suits features of very different frequencies. The classes weigh the same, whatever their sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Float64, Int64

from experiments.data.pipeline.hashed import buckets, ngram_hashes, word_hashes

ORDERS = (1, 2)
LEARNING_RATE = 0.5
L2 = 1e-6
BATCH = 32
MAX_WORDS = 5000  # of a document; more would not change the verdict and cost time

Features = tuple[Int64[np.ndarray, " n"], Float32[np.ndarray, " n"]]


@dataclasses.dataclass(frozen=True)
class QualityClassifier:
    """Weights of a trained classifier.

    Attributes:
      weights: one per bucket.
      bias: added to every score.
      report: how it was trained and what it reaches on documents it was not trained on.
    """

    weights: Float32[np.ndarray, " buckets"]
    bias: float
    report: dict[str, float]

    def score(self, text: str) -> float:
        """Probability in [0, 1] that the text belongs to the good set."""
        index, value = features(text, len(self.weights).bit_length() - 1)
        logit = float(self.weights[index] @ value) + self.bias
        return float(_sigmoid(np.array([logit]))[0])

    def save(self, path: Path) -> None:
        names = np.array(sorted(self.report))
        values = np.array([self.report[name] for name in sorted(self.report)])
        with path.open("wb") as file:
            np.savez_compressed(
                file, weights=self.weights, bias=self.bias, names=names, values=values
            )

    @classmethod
    def load(cls, path: Path) -> QualityClassifier:
        """Reads what ``save`` wrote; raises ValueError for anything else."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                report = dict(zip(arrays["names"].tolist(), arrays["values"].tolist(), strict=True))
                return cls(arrays["weights"], float(arrays["bias"]), report)
        except (OSError, KeyError, ValueError) as error:
            raise ValueError(
                f"{path}: no quality classifier ({error}); make one with `python -m "
                "experiments.data train-quality`"
            ) from None


def features(text: str, bits: int) -> Features:
    """Buckets and values of a text: log(1 + count), scaled to Euclidean length 1."""
    words = word_hashes(text)[:MAX_WORDS]
    keys = np.concatenate([ngram_hashes(words, order) for order in ORDERS])
    index, counts = np.unique(buckets(keys, bits), return_counts=True)
    value = np.log1p(counts).astype(np.float32)
    return index, value / max(1e-12, float(np.linalg.norm(value)))


def train_classifier(
    good: Sequence[str],
    bad: Sequence[str],
    *,
    bits: int = 18,
    epochs: int = 5,
    seed: int = 0,
    test_fraction: float = 0.1,
) -> QualityClassifier:
    """Trains on two sets of texts and tests on a part of them that is held out.

    Args:
      good: texts whose kind is wanted.
      bad: texts whose kind is not; random web text is the usual choice.
      bits: log2 of the number of weights.
      epochs: passes over the texts.
      seed: of the order and of the held-out part.
      test_fraction: share of each set that is only tested on.

    Raises:
      ValueError: a set has fewer than 20 texts, or an argument is out of range.
    """
    for name, texts in (("good", good), ("bad", bad)):
        if len(texts) < 20:
            raise ValueError(f"the {name} set must have at least 20 documents, got {len(texts)}")
    if not 8 <= bits <= 26 or epochs < 1 or not 0 < test_fraction < 1:
        raise ValueError(
            "want 8 <= bits <= 26, epochs >= 1 and 0 < test_fraction < 1, got "
            f"bits={bits}, epochs={epochs}, test_fraction={test_fraction}"
        )
    rng = np.random.default_rng(seed)
    labels = np.repeat([1.0, 0.0], [len(good), len(bad)])
    inputs = [features(text, bits) for texts in (good, bad) for text in texts]
    test = np.zeros(len(labels), dtype=bool)
    for label in (0.0, 1.0):
        members = rng.permutation(np.flatnonzero(labels == label))
        test[members[: max(1, int(test_fraction * len(members)))]] = True
    weights, bias = _fit(inputs, labels, np.flatnonzero(~test), bits, epochs, rng)
    logits = np.array([weights[index] @ value + bias for index, value in inputs])
    report = {
        "good documents": float(len(good)),
        "bad documents": float(len(bad)),
        "test documents": float(test.sum()),
        "test accuracy (classes weigh the same)": _accuracy(logits[test], labels[test]),
        "test AUC": area_under_curve(logits[test], labels[test]),
    }
    return QualityClassifier(weights, bias, report)


def _fit(
    inputs: list[Features],
    labels: np.ndarray,
    train: np.ndarray,
    bits: int,
    epochs: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, float]:
    size = 1 << bits
    weights, squares = np.zeros(size + 1), np.full(size + 1, 1e-8)  # the last one is the bias
    share = labels[train].mean()
    for _ in range(epochs):
        order = rng.permutation(train)
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            index = np.concatenate([np.append(inputs[i][0], size) for i in batch])
            value = np.concatenate([np.append(inputs[i][1], 1.0) for i in batch])
            rows = np.repeat(np.arange(len(batch)), [len(inputs[i][0]) + 1 for i in batch])
            logits = np.bincount(rows, weights[index] * value, minlength=len(batch))
            balance = np.where(labels[batch] == 1, 0.5 / share, 0.5 / (1 - share))
            slope = balance * (_sigmoid(logits) - labels[batch])
            touched, inverse = np.unique(index, return_inverse=True)
            gradient = np.bincount(inverse, slope[rows] * value) / len(batch)
            gradient += L2 * weights[touched]
            squares[touched] += gradient**2
            weights[touched] -= LEARNING_RATE * gradient / np.sqrt(squares[touched])
    return weights[:size].astype(np.float32), float(weights[size])


def _sigmoid(logits: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    return np.exp(-np.logaddexp(0.0, -logits))


def _accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    good, bad = logits[labels == 1], logits[labels == 0]
    return float(((good > 0).mean() + (bad <= 0).mean()) / 2)


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    """Chance that a random good document scores above a random bad one; ties count half."""
    good, bad = scores[labels == 1], np.sort(scores[labels == 0])
    below = np.searchsorted(bad, good, side="left")
    through = np.searchsorted(bad, good, side="right")
    return float((below + through).mean() / (2 * len(bad)))
