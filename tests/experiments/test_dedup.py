"""The dedup command, and the benchmark that compares deduplicators."""

import itertools
import json
import random
from pathlib import Path

import pytest

from experiments.benchmarks import dedup as benchmark
from experiments.benchmarks.dedup_peers import shingles
from experiments.data.__main__ import main
from experiments.data.documents import read_shard
from experiments.data.near_duplicates import NearDuplicateConfig, near_duplicates
from experiments.data.pipeline.records import read_records

WORDS = ["".join(p) for p in itertools.product("bdfgklmnprst", "aeiou", "bdgklmnprst")]


def prose(seed, words=150):
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def test_command_drops_cuts_and_leaves_evidence(tmp_path, capsys):
    licence = "<<" + prose(99, 60) + ">>"
    web = [prose(1), prose(2) + licence, prose(3).upper(), ""]
    books = [prose(3) + " end", licence + prose(4), prose(5), prose(1)]
    inputs = [write(tmp_path / "web.jsonl", web), write(tmp_path / "books.jsonl", books)]
    exam = write(tmp_path / "exam.jsonl", [prose(5)])
    outputs = []
    for workers in ("1", "2", "7"):
        out = tmp_path / workers
        options = ["--held-out", exam, "--workers", workers, "--near.keep", "first"]
        assert main(["dedup", *inputs, "--out", str(out), *options]) == 0
        files = [out / name for name in ("documents.jsonl.zst", "dropped.jsonl.zst", "dedup.json")]
        outputs.append([file.read_bytes() for file in files])
    assert outputs[0] == outputs[1] == outputs[2]
    assert "16 bands x 8 rows" in capsys.readouterr().err
    kept = {document.text for document in read_shard(out / "documents.jsonl.zst")}
    assert kept == {web[0], web[1], web[2], prose(4)}
    dropped = {r.text: r.notes for r in read_records(out / "dropped.jsonl.zst")}
    assert set(dropped) == {books[0], books[2], books[3]}
    assert dropped[books[2]]["like"].startswith("held-out exam/")
    assert dropped[books[0]]["like"].endswith("web.jsonl:3")
    assert 0.8 <= dropped[books[0]]["similarity"] < 1 == dropped[books[3]]["similarity"]
    report = json.loads((out / "dedup.json").read_text())
    assert report["near_duplicates"]["dropped"] == 3
    assert report["substrings"]["bytes_cut"] == len(licence)
    assert report["faults"] == {"empty document": 1}
    assert main(["dedup", *inputs, "--out", str(out), "--stages", "substrings"]) == 0
    assert not (out / "dropped.jsonl.zst").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl", "--out", "out"], "missing.jsonl does not exist"),
        (["--out", "out"], "name at least one file or folder"),
    ],
)
def test_command_names_bad_input(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["dedup", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_brute_force_of_the_benchmark():
    texts = benchmark.plant([prose(i, 60) for i in range(60)], 0.5, seed=1)
    pairs = {(a, b): s for a, b, s in benchmark.true_pairs(texts, 5, 0.6)}
    sets = [shingles(text, 5) for text in texts]
    for a, b in itertools.combinations(range(60), 2):
        similarity = len(sets[a] & sets[b]) / len(sets[a] | sets[b])
        assert pairs.get((a, b), 0) == pytest.approx(similarity if similarity >= 0.6 else 0)
    assert len(pairs) > 5
    dropped = near_duplicates(texts, NearDuplicateConfig(threshold=0.7)).dropped.tolist()
    good = benchmark.quality(texts, dropped, 0.7)
    assert good["recall"] == 1
    assert good["false_drops"] == 0
    assert good["dropped"] >= 5
    assert benchmark.quality(texts, [], 0.7)["recall"] == 0
    assert benchmark.quality(texts, list(range(60)), 0.7)["false_drops"] == 1


def test_peers_run_in_their_own_process(tmp_path):
    texts = [prose(i) for i in range(20)] + [prose(3)]
    path = write(tmp_path / "texts.jsonl", texts)
    options = benchmark.Options(workers=1, peer_python="no such python")
    row = benchmark.run_peer(options, "ours", Path(path), benchmark.near_settings(options, 0.8))
    assert row["dropped"] == [20]
    assert row["peak_mb"] > row["texts_mb"] > 0
    settings = {"min_bytes": 200, "partition_bytes": 1 << 20, "workers": 1}
    row = benchmark.run_peer(options, "substrings", Path(path), settings)
    assert row["bytes_cut"] == len(texts[20])
    assert "error" in benchmark.run_peer(options, "lcp", Path("missing"), settings)
