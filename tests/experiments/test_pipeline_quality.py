"""Perplexity, the quality classifier, and thresholds by quantile."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.data.dataset import SAMPLE_DIR
from experiments.data.documents import read_corpus
from experiments.data.pipeline.classifier import (
    QualityClassifier,
    area_under_curve,
    train_classifier,
)
from experiments.data.pipeline.hashed import buckets, ngram_hashes, word_hashes
from experiments.data.pipeline.ngram_lm import WEIGHTS, NgramModel, train_ngram_model
from experiments.data.pipeline.quality import (
    ClassifierConfig,
    PerplexityConfig,
    QualityConfig,
    prepare_thresholds,
    score_documents,
    select_documents,
)
from experiments.data.pipeline.records import Record, Tally
from experiments.data.pipeline.stages import read_json


@pytest.fixture(scope="module")
def texts():
    """A few hundred documents of the sample, by source."""
    found = {}
    for document in read_corpus(SAMPLE_DIR):
        found.setdefault(document.source, []).append(document.text)
    return {source: items[:250] for source, items in found.items()}


def test_probability_is_the_interpolation_by_hand():
    text = "a b c a b d"
    model = train_ngram_model([text], order=3, bits=20)
    words = text.split()
    grams = [[tuple(words[i : i + n]) for i in range(len(words) - n + 1)] for n in (1, 2, 3)]
    log_sum = 0.0
    for i, word in enumerate(words):
        left, p = 1.0, 0.0
        for n in (3, 2, 1):
            context = tuple(words[i - n + 1 : i]) if i >= n - 1 else None
            if context is None:
                continue
            seen = grams[n - 2].count(context) if n > 1 else len(words)
            share = WEIGHTS[n] / sum(WEIGHTS[: n + 1])
            p += left * share * grams[n - 1].count((*context, word)) / seen
            left *= 1 - share
        p += left / (len(set(words)) + 1)
        log_sum += math.log(p)
    assert model.perplexity(text) == pytest.approx(math.exp(-log_sum / len(words)), rel=1e-12)


def test_unknown_words_are_finite_and_worse_and_no_words_are_nan():
    model = train_ngram_model(["the cat sat on the mat"] * 3, bits=16)
    known, unknown = model.perplexity("the cat sat"), model.perplexity("zyx wvu tsr")
    assert known < 5 < unknown < math.inf
    assert math.isnan(model.perplexity("  "))
    # An unseen context hands its weight down and does not punish twice.
    assert model.perplexity("zyx the") < unknown


def test_order_of_words_matters(texts):
    model = train_ngram_model(texts["austen"][:40], bits=20)
    held = texts["austen"][40:50]
    rng = random.Random(0)
    for text in held:
        words = text.split()
        rng.shuffle(words)
        assert model.perplexity(" ".join(words)) > 1.5 * model.perplexity(text)


def test_the_model_does_not_depend_on_batches_and_survives_a_file(tmp_path, monkeypatch, texts):
    from experiments.data.pipeline import ngram_lm

    one = train_ngram_model(texts["austen"][:10], bits=16)
    monkeypatch.setattr(ngram_lm, "FLUSH", 100)
    two = train_ngram_model(texts["austen"][:10], bits=16)
    np.testing.assert_array_equal(one.counts, two.counts)
    one.save(tmp_path / "m.npz")
    text = texts["austen"][20]
    assert NgramModel.load(tmp_path / "m.npz").perplexity(text) == one.perplexity(text)
    with pytest.raises(ValueError, match="holds no word"):
        train_ngram_model(["", " "])


@given(st.text(max_size=40), st.text(max_size=40))
def test_hashes_are_stable_under_context(left, right):
    words = word_hashes(left + "\n" + right)
    np.testing.assert_array_equal(words[: len(word_hashes(left))], word_hashes(left))
    for order in (1, 2, 3):
        keys = ngram_hashes(words, order)
        assert len(keys) == max(0, len(words) - order + 1)
        assert all(0 <= b < 256 for b in buckets(keys, 8))


def test_hashes_are_the_same_in_every_process():
    assert word_hashes("Hello, World").tolist() == [907060870, 3772416878, 980881731]


def test_the_classifier_separates_two_sources(texts, tmp_path):
    good, bad = texts["austen"], texts["jargon-file"]
    model = train_classifier(good, bad, bits=16)
    assert model.report["test accuracy (classes weigh the same)"] > 0.95
    assert model.report["test AUC"] > 0.98
    again = train_classifier(good, bad, bits=16)
    np.testing.assert_array_equal(model.weights, again.weights)
    model.save(tmp_path / "m.npz")
    loaded = QualityClassifier.load(tmp_path / "m.npz")
    assert loaded.score(good[0]) == model.score(good[0]) > 0.5
    assert 0.0 <= loaded.score("") <= 1.0
    (tmp_path / "bad.npz").write_bytes(b"no")
    with pytest.raises(ValueError, match="train-quality"):
        QualityClassifier.load(tmp_path / "bad.npz")


def test_shuffled_labels_teach_nothing(texts):
    everything = texts["austen"] + texts["jargon-file"]
    random.Random(1).shuffle(everything)
    half = len(everything) // 2
    model = train_classifier(everything[:half], everything[half:], bits=16)
    assert 0.3 < model.report["test AUC"] < 0.7


def test_auc_counts_pairs():
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 5, 40).astype(float), rng.integers(0, 2, 40)
    pairs = [(g > b) + 0.5 * (g == b) for g in scores[labels == 1] for b in scores[labels == 0]]
    assert area_under_curve(scores, labels) == pytest.approx(np.mean(pairs))


def test_too_few_documents():
    with pytest.raises(ValueError, match="the bad set must have at least 20 documents, got 3"):
        train_classifier(["x"] * 20, ["y"] * 3)


def test_quantiles_drop_their_share_of_each_source(tmp_path):
    config = QualityConfig(
        PerplexityConfig(("ref",), quantiles=(0.1, 0.8)),
        ClassifierConfig("m", min_quantile=0.0, exempt=("b",)),
    )
    records = [
        Record(f"{source}{i}", source, "x", {"perplexity": float(scale * i), "quality": 0.5})
        for source, scale in (("a", 1), ("b", 1000))
        for i in range(101)
    ] + [Record("c", "c", "x", {"perplexity": 1e9}), Record("e", "a", "x", {"perplexity": None})]
    prepare_thresholds(tmp_path, records, config)
    bounds = read_json(tmp_path / "thresholds.json")["bounds"]
    tally = Tally()
    kept = [record.id for record in select_documents(records, bounds, tally)]
    assert [i for i in kept if i.startswith("a")] == [f"a{i}" for i in range(10, 81)]
    assert [i for i in kept if i.startswith("b")] == [f"b{i}" for i in range(10, 81)]
    assert kept[-2:] == ["c", "e"]  # too few for quantiles; no score
    assert dict(tally.dropped) == {
        "perplexity below the quantile": 20,
        "perplexity above the quantile": 40,
    }


def test_scores_go_into_the_notes():
    model = train_ngram_model(["the cat sat"], bits=12)
    records = [Record("1", "s", "the cat", {"language": "en"}), Record("2", "s", "…")]
    (first, _) = score_documents(records, model, None)
    assert first.notes == {
        "language": "en",
        "perplexity": float(f"{model.perplexity('the cat'):.6g}"),
    }


def test_the_command_trains_on_two_sets_of_files(tmp_path, texts, capsys):
    from experiments.data.__main__ import main

    for name in ("austen", "jargon-file"):
        (tmp_path / name).mkdir()
        for i, text in enumerate(texts[name][:60]):
            (tmp_path / name / f"{i}.txt").write_text(text)
    good, bad, out = (str(tmp_path / name) for name in ("austen", "jargon-file", "m.npz"))
    command = ["train-quality", "--good", good, "--bad", bad, "--out", out, "--bits", "14"]
    assert main(command) == 0
    assert "test AUC: " in capsys.readouterr().out
    model = QualityClassifier.load(tmp_path / "m.npz")
    assert model.score(texts["austen"][100]) > model.score(texts["jargon-file"][100])
    assert main([*command[:2], str(tmp_path / "none"), *command[3:]]) == 1
    assert "does not exist" in capsys.readouterr().err
