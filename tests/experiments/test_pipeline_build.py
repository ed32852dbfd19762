"""The build command: configuration errors, equal bytes for any workers, kills, a full disk."""

import errno
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import ClassVar

import pytest
import tokenizers

from experiments.data import documents, load_dataset
from experiments.data.documents import read_corpus
from experiments.data.loader import open_dataset
from experiments.data.pipeline import stages
from experiments.data.pipeline.build import run_build
from experiments.data.pipeline.classifier import train_classifier
from experiments.data.pipeline.config import read_config
from experiments.data.pipeline.records import Record, ShardStream, Tally
from experiments.data.pipeline.stages import BuildError, Unit, WorkerPool, run_stage
from experiments.data.pipeline.tables import ConfigError

ROOT = Path(__file__).parents[2]

CONFIG = """
out = "out"
[[source]]
name = "books"
paths = ["books"]
[[source]]
name = "code"
paths = ["code"]
[read]
shard_mb = 0.01
[clean.length]
min_words = 30
exempt = ["code"]
[clean.personal]
[near_duplicates]
[substrings]
min_bytes = 500
min_rest = 20
[[held_out]]
name = "benchmark"
paths = ["benchmark.txt"]
[quality.perplexity]
reference = ["books/0.jsonl"]
bits = 16
exempt = ["code"]
[quality.classifier]
model = "quality.npz"
[tokenize]
vocab_size = 300
heldout_fraction = 0.2
[mix]
shares = {books = 0.75, code = 0.25}
[pack]
seq_len = 32
method = "best-fit"
"""


@pytest.fixture
def project(tmp_path):
    """A folder with a configuration and 40 kB of text in two sources."""
    (tmp_path / "books").mkdir()
    (tmp_path / "code").mkdir()
    for book in range(3):
        rows = [
            {"text": f"Chapter {i} of book {book}. " + f"It says that the sea of {i} is wide. " * i}
            for i in range(1, 24)
        ]
        rows.append({"text": "short"})
        text = "\n".join(map(json.dumps, rows))
        (tmp_path / "books" / f"{book}.jsonl").write_text(text)
    (tmp_path / "books" / "copy.jsonl").write_text(text)
    (tmp_path / "benchmark.txt").write_text(rows[10]["text"])
    good, bad = ([f"{word} {i} of {word}" for i in range(20)] for word in ("sea", "mud"))
    train_classifier(good, bad, bits=8).save(tmp_path / "quality.npz")
    for i in range(5):
        (tmp_path / "code" / f"{i}.py").write_text(f"x = {i}  # ann{i}@mail.org\n" * 30)
    (tmp_path / "build.toml").write_text(CONFIG)
    return tmp_path


def digests(folder):
    """SHA-256 of all that must not depend on workers or kills."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in {".zst", ".npz", ".npy", ".bin"}:
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    report = json.loads((folder / "report.json").read_text())
    del report["timing"]
    found["report"] = hashlib.sha256(json.dumps(report).encode()).hexdigest()
    return found


def build(project, **changes):
    import dataclasses

    config = dataclasses.replace(read_config(project / "build.toml"), **changes)
    return run_build(config, project, progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("shard_mb", "shard_md"), r"unknown key 'shard_md' in \[read\]: did you mean 'shard_mb'"),
        (("[clean.personal]", "[clean.persnal]"), "did you mean 'personal'"),
        (("0.01", "-1"), r"\[read\] shard_mb must be positive, got -1"),
        (("0.01", '"big"'), "read.shard_mb must be of type float, got 'big'"),
        (("min_words = 30", "min_words = true"), "clean.length.min_words must be of type int"),
        (('["code"]\n[clean.p', '["cod"]\n[clean.p'), "names no source: cod; known: books, code"),
        (('name = "code"', 'name = "books"'), "source names must be unique"),
        (('paths = ["code"]', 'paths = "code"'), r"source\[1\].paths must be an array"),
        (('name = "code"\n', ""), r"source\[1\].name is missing"),
        (("[clean.personal]", "[clean.personal"), "not TOML"),
        (('paths = ["code"]', 'paths = ["code"]\nformat = "xml"'), "must be one of 'auto'"),
    ],
)
def test_a_wrong_configuration_is_named(project, change, message):
    assert change[0] in CONFIG
    (project / "build.toml").write_text(CONFIG.replace(*change))
    with pytest.raises(ConfigError, match=message):
        read_config(project / "build.toml")


def test_counts_add_up_and_the_result_is_a_corpus(project):
    result = build(project, workers=1)
    names = [stage.name for stage in result.results]
    assert names == ["read", "clean", "near_duplicates", "substrings", "score", "select"]
    read, clean, near, cut, score, select = result.results
    for before, after in itertools.pairwise(result.results):
        assert after.documents + sum(after.tally.dropped.values()) == before.documents
    assert set(near.tally.dropped) == {"near duplicate", "resembles held-out text"}
    cleaned, unique = ([r.text for r in ShardStream(result.root, s.shards)] for s in (clean, near))
    assert len(set(cleaned)) <= len(cleaned) - 14  # the book that was copied
    assert len(set(unique)) == len(unique)
    assert score.documents == cut.documents
    assert 0 < cut.tally.changed["bytes of repeats cut"] < near.bytes - cut.bytes + 1
    assert near.bytes - cut.bytes == cut.tally.bytes_dropped
    assert select.tally.dropped
    record = next(iter(result.stream()))
    assert record.notes["perplexity"] > 1
    assert 0 <= record.notes["quality"] <= 1
    assert read.documents == 4 * 24 + 5
    assert clean.tally.dropped["fewer than 30 words"] == 4 * 3
    assert clean.tally.changed["redacted: email"] == 5 * 30
    assert len(clean.shards) > 4
    texts = list(read_corpus(result.root))
    assert len(texts) == select.documents
    assert [d.source for d in texts] == sorted(d.source for d in texts)
    data = load_dataset(result.root, cache_dir=project / "cache")
    assert data.counts("train").documents + data.counts("heldout").documents == len(texts)
    store = open_dataset(result.root / "tokens.bin")
    assert store.counts("train").documents + store.counts("heldout").documents == select.documents
    report = json.loads((result.root / "report.json").read_text())["sections"]
    assert report["Tokenizer"]["unknown tokens"] == 0
    assert report["Tokenizer"]["of those, not equal to the text"] == 0
    assert report["Tokenizer"]["documents decoded again"] > 0
    assert [row["rows per period"] for row in report["Mixture"]] == [3, 1]
    page = (result.root / "report.html").read_text()
    assert "fewer than 30 words" in page
    assert "short" in page


def test_equal_bytes_for_any_number_of_workers_and_after_a_changed_mind(project):
    one = digests(build(project, workers=1, out="one").root)
    assert digests(build(project, workers=3, out="three").root) == one
    # Another configuration in the same folder, then back: no file of the other is left.
    (project / "build.toml").write_text(CONFIG.replace("min_words = 30", "min_words = 90"))
    assert digests(build(project, workers=1, out="one").root) != one
    (project / "build.toml").write_text(CONFIG)
    assert digests(build(project, workers=1, out="one").root) == one


def test_nothing_is_cut_from_exempt_sources(project):
    config = """
out = "cut"
EXEMPT
[[source]]
name = "text"
paths = ["text.txt"]
[[source]]
name = "code"
paths = ["code"]
[substrings]
min_bytes = 100
"""
    shared = "".join(f"line {i} of what both hold\n" for i in range(10))
    (project / "text.txt").write_text("Of the text alone.\n" + shared)
    (project / "code" / "0.py").write_text("# of the code alone\n" + shared)
    kept = {}
    for exempt in ("", 'substrings_exempt = ["code"]'):
        (project / "build.toml").write_text(config.replace("EXEMPT", exempt))
        result = build(project, workers=1)
        kept[exempt] = {r.id: len(r.text) for r in result.stream() if r.id.endswith("0.py:0")}
    without, with_exempt = (next(iter(found.values())) for found in kept.values())
    assert without < 100 < len(shared) < with_exempt


def test_a_finished_build_does_nothing_and_new_input_is_seen(project, monkeypatch):
    first = build(project, workers=1)
    monkeypatch.setattr(stages.WorkerPool, "run", None)  # nothing may run
    again = build(project, workers=1)
    assert all(result.cached for result in again.results)
    assert again.shard_digests() == first.shard_digests()
    monkeypatch.undo()
    lost = next((first.root / "2-clean").glob("*.zst"))
    lost.unlink()
    mended = build(project, workers=1)
    assert lost.is_file()
    assert mended.shard_digests() == first.shard_digests()
    (project / "code" / "9.py").write_text("z = 1\n")
    more = build(project, workers=1)
    assert more.results[0].documents == first.results[0].documents + 1


def test_killed_at_any_write_it_continues_to_the_same_bytes(project, monkeypatch):
    want = digests(build(project, workers=1, out="straight").root)
    replace = Path.replace
    left = 0

    def sometimes(path, target):
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return replace(path, target)

    kills = 0
    for left_at_start in range(1, 200, 7):
        left = left_at_start
        monkeypatch.setattr(Path, "replace", sometimes)
        try:
            result = build(project, workers=1, out="killed")
        except KeyboardInterrupt:
            kills += 1
            continue
        finally:
            monkeypatch.setattr(Path, "replace", replace)
        break
    assert kills >= 3
    assert digests(result.root) == want


def test_a_full_disk_ends_in_one_message_and_continues(project, monkeypatch):
    want = digests(build(project, workers=1, out="straight").root)
    real = os.fsync
    calls = 0

    def full(fd):
        nonlocal calls
        calls += 1
        if calls > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd)

    monkeypatch.setattr(documents.os, "fsync", full)
    with pytest.raises(BuildError, match=r"no space left.*same command to continue"):
        build(project, workers=1, out="full")
    assert not list((project / "full").rglob("*.tmp"))
    monkeypatch.undo()
    assert digests(build(project, workers=1, out="full").root) == want


class _Deadly:
    """A stage whose worker is killed the first time it meets unit 1."""

    name: ClassVar[str] = "deadly"
    version: ClassVar[int] = 1
    settings = None

    def __init__(self, always=False):
        self.always = always

    def records(self, unit, root, folder, tally):
        flag = root / "died"
        if unit.key == "1" and (self.always or not flag.exists()):
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield Record(unit.key, "s", f"text {unit.payload}")


def test_a_killed_worker_is_replaced_and_nothing_lost(tmp_path, caplog):
    units = [Unit(str(i), i) for i in range(4)]
    with WorkerPool(2) as pool:
        result = run_stage(_Deadly(), units, root=tmp_path, folder="x", inputs=None, pool=pool)
    assert result.documents == 4
    assert "a worker died" in caplog.text


def test_workers_that_keep_dying_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "POOL_RETRIES", 0)
    units = [Unit(str(i), i) for i in range(2)]
    message = "workers died 1 times"
    with WorkerPool(2) as pool, pytest.raises(BuildError, match=message):
        run_stage(_Deadly(True), units, root=tmp_path, folder="x", inputs=None, pool=pool)


def test_samples_do_not_depend_on_the_order():
    documents = [Record(str(i), "s", f"text {i}") for i in range(50)]
    one, left, right = Tally(), Tally(), Tally()
    for document in documents:
        one.drop("why", document)
    for document in reversed(documents[:20]):
        left.drop("why", document)
    for document in documents[20:]:
        right.drop("why", document)
    right.merge(left)
    assert right.to_json() == one.to_json()
    assert Tally.from_json(json.loads(json.dumps(one.to_json()))).to_json() == one.to_json()


@pytest.mark.slow
def test_ten_kills_of_the_real_command(project):
    """SIGKILL at random times; then the command runs through to the bytes of a straight run."""
    want = digests(build(project, workers=1, out="straight").root)
    (project / "build.toml").write_text(CONFIG.replace('out = "out"', 'out = "killed"'))
    command = [sys.executable, "-m", "experiments.data", "build", str(project / "build.toml")]
    for number in range(10):
        process = subprocess.Popen([*command, "--workers", str((1, 2, 7)[number % 3])], cwd=ROOT,
                                   stderr=subprocess.DEVNULL)  # fmt: skip
        time.sleep(0.8 + 0.25 * number)
        process.kill()
        process.wait()
    done = subprocess.run([*command, "--workers", "2"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert digests(project / "killed") == want


def test_the_command_prints_a_line_per_stage_and_errors_in_one(project, capsys):
    from experiments.data.__main__ import main

    assert main(["build", str(project / "build.toml"), "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "clean" in out
    assert "report.html" in out
    show = ["build", str(project / "build.toml"), "--show-batch", "1234", "--batch-size", "4"]
    assert main(show) == 0
    batch = capsys.readouterr().out
    assert [f"row {i}: " in batch for i in range(4)] == [True] * 4
    assert batch.count(": books row") == 3
    assert "the sea of" in batch
    assert main(show) == 0
    assert capsys.readouterr().out == batch
    (project / "build.toml").write_text("out = 3")
    assert main(["build", str(project / "build.toml")]) == 1
    error = textwrap.dedent(capsys.readouterr().err)
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_a_given_tokenizer_is_used_and_its_losses_counted(project):
    (project / "small.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in TEXTS))
    config = """
out = "given"
[[source]]
name = "s"
paths = ["small.jsonl"]
[tokenize]
tokenizer = "words.json"
heldout_fraction = 0.5
"""
    (project / "build.toml").write_text(config)
    (project / "words.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer .*words\.json cannot be read"):
        build(project, workers=1)
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "known": 1, "<|endoftext|>": 2}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(project / "words.json"))
    result = build(project, workers=1)
    found = result.sections["Tokenizer"]
    assert found["vocabulary"] == 3
    assert found["unknown tokens"] == len(TEXTS)
    assert found["of those, not equal to the text"] == len(TEXTS)


TEXTS = [f"known strange{i}" for i in range(10)]
