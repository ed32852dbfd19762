"""The loader and the store: determinism, exact epochs, hosts, checksums, clear errors."""

import json
import re
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.data import CorpusError, Document, dataset, load_dataset
from experiments.data.dataset import SAMPLE_DIR
from experiments.data.documents import read_corpus, read_manifest, write_json, write_shard
from experiments.data.loader import BatchSchedule, open_dataset, permute
from experiments.data.store import is_held_out, open_store, write_store
from experiments.data.tokenizer import ByteTokenizer


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def sample(cache):
    return load_dataset("sample", vocab_size=256, cache_dir=cache)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(0, 2**32), st.integers(0, 9))
def test_permute_is_a_bijection(size, seed, epoch):
    values = permute(np.arange(size), size=size, key=(seed, epoch))
    assert sorted(values.tolist()) == list(range(size))


def test_permute_shuffles_and_depends_on_its_key():
    size = 10_000
    first = permute(np.arange(size), size=size, key=(0, 0))
    assert (first != permute(np.arange(size), size=size, key=(0, 1))).mean() > 0.99
    assert (first != permute(np.arange(size), size=size, key=(1, 0))).mean() > 0.99
    # Neighbours are torn apart: rank correlation of a random order has deviation 0.01 here.
    assert abs(np.corrcoef(np.arange(size), first)[0, 1]) < 0.05
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05
    with pytest.raises(ValueError, match=r"indices must lie in \[0, size=3\)"):
        permute(np.array([3]), size=3, key=(0,))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(9, 200), st.integers(1, 8), st.integers(1, 8), st.integers(0, 99), st.integers(1, 2)
)
def test_each_window_once_per_epoch(tokens, seq_len, batch_size, seed, epochs):
    schedule = BatchSchedule(np.arange(tokens), batch_size, seq_len, seed)
    windows = schedule.windows_per_epoch
    steps = -(-windows * epochs // batch_size)
    visits = np.concatenate([schedule.windows_at(step) for step in range(steps)])
    for epoch in range(epochs):
        part = visits[epoch * windows : (epoch + 1) * windows]
        assert sorted(part.tolist()) == list(range(windows))


def test_batches_are_a_function_of_the_step(sample):
    one = sample.batches(4, 64, seed=3)
    two = sample.batches(4, 64, seed=3)
    later = two.batch_at(1000)  # in another order than `one`
    np.testing.assert_array_equal(two.batch_at(0), one.batch_at(0))
    np.testing.assert_array_equal(one.batch_at(1000), later)
    assert later.shape == (4, 65)
    assert later.dtype == np.int32
    other_seed = sample.batches(4, 64, seed=4).batch_at(0)
    assert (one.batch_at(0) != other_seed).any()
    rows = one.windows_at(7)
    np.testing.assert_array_equal(
        one.batch_at(7)[2], sample.train[rows[2] * 64 : rows[2] * 64 + 65].astype(np.int32)
    )


def test_hosts_share_a_batch_without_overlap(sample):
    whole = sample.batches(6, 32, seed=0).batch_at(5)
    parts = [
        sample.batches(6, 32, seed=0, process_index=index, process_count=3).batch_at(5)
        for index in range(3)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_epochs_for_counts_targets():
    schedule = BatchSchedule(np.arange(101), 2, 10, 0)
    assert schedule.windows_per_epoch == 10
    assert schedule.epochs_for(250) == 2.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"seq_len": -1}, "seq_len must be at least 1"),
        ({"seq_len": 100}, "needs a stream of at least 101 tokens, got 100"),
        ({"seed": -1}, "seed must not be negative"),
        ({"process_count": 3}, "must be a multiple of process_count 3"),
        ({"process_index": 1}, r"process_index must lie in \[0, 1\)"),
    ],
)
def test_bad_schedules_are_named(change, message):
    arguments = {"batch_size": 4, "seq_len": 8, "seed": 0, **change}
    with pytest.raises(ValueError, match=message):
        BatchSchedule(np.zeros(100, np.uint16), **arguments)
    with pytest.raises(ValueError, match="step must not be negative"):
        BatchSchedule(np.zeros(100, np.uint16), 4, 8, 0).batch_at(-1)


def test_heldout_batches_are_fixed_and_bounded(sample):
    batches = sample.heldout_batches(4, 128, 10_000)
    assert len(batches) == 10_000 // 128 // 4
    assert all(batch.shape == (4, 129) and batch.dtype == np.int32 for batch in batches)
    again = sample.heldout_batches(4, 128, 10_000)
    np.testing.assert_array_equal(np.stack(batches), np.stack(again))
    rows = np.concatenate(batches)
    assert len(np.unique(rows, axis=0)) == len(rows)
    everything = sample.heldout_batches(4, 128, 10**9)
    assert sum(batch.shape[0] for batch in everything) == (len(sample.heldout) - 1) // 128 // 4 * 4
    with pytest.raises(
        ValueError, match="held-out batch of 4 x 128 tokens needs max_tokens >= 512"
    ):
        sample.heldout_batches(4, 128, 511)


def test_heldout_documents_are_never_trained_on(sample):
    documents = list(read_corpus(SAMPLE_DIR))
    heldout = [document for document in documents if is_held_out(document.id, 0.05)]
    text = sample.train.astype(np.uint8).tobytes()
    held_text = sample.heldout.astype(np.uint8).tobytes()
    assert 0.02 < len(heldout) / len(documents) < 0.08
    for document in heldout:
        assert b"\0" + document.text.encode() + b"\0" in held_text
        assert document.text.encode() not in text
    # Tokens are conserved: all text, one end-of-text per document, one to open each stream.
    size = sum(len(document.text.encode()) for document in documents)
    assert len(sample.train) + len(sample.heldout) == size + len(documents) + 2
    counts = sample.counts("heldout")
    assert sample.bytes_per_token == counts.bytes / counts.tokens


def test_other_documents_do_not_move_a_document_between_splits(tmp_path):
    documents = [Document(f"d{i}", "s", f"text of document {i} " * 3) for i in range(60)]
    splits = []
    for number, part in enumerate((documents, documents[10:][::-1])):
        write_store(
            tmp_path / f"{number}.bin",
            part,
            tokenizer=ByteTokenizer(),
            heldout_fraction=0.3,
            name="x",
            provenance={},
        )
        held = open_store(tmp_path / f"{number}.bin").heldout.astype(np.uint8).tobytes()
        splits.append({d.id for d in documents[10:] if d.text.encode() in held})
    assert splits[0] == splits[1]
    assert splits[0]


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory):
    """Every eighth document of the sample, as a corpus directory of its own."""
    folder = tmp_path_factory.mktemp("small")
    documents = list(read_corpus(SAMPLE_DIR))[::8]
    entry = {"name": "all", "file": "all.jsonl.zst"}
    digest = write_shard(folder / entry["file"], documents)
    entry |= {"bytes": digest.bytes, "sha256": digest.hexdigest()}
    write_json(folder / "manifest.json", {"format": 1, "name": "small", "sources": [entry]})
    return folder


def test_loading_is_cached_and_bpe_matches_the_text(tmp_path, small_corpus, monkeypatch):
    bpe = load_dataset(small_corpus, vocab_size=300, cache_dir=tmp_path, heldout_fraction=0.2)
    assert int(bpe.train.max()) < bpe.vocab_size == 300
    assert bpe.bytes_per_token > 1.2
    documents = [d for d in read_corpus(small_corpus) if is_held_out(d.id, 0.2)]
    decoded = bpe.tokenizer.decode(bpe.heldout).split("<|endoftext|>")
    assert decoded == ["", *(document.text for document in documents), ""]
    assert not list(tmp_path.glob("*.tmp"))
    monkeypatch.setattr(dataset, "build_store", None)  # the second load must not build
    again = load_dataset(small_corpus, vocab_size=300, cache_dir=tmp_path, heldout_fraction=0.2)
    assert again.fingerprint == bpe.fingerprint


def test_fingerprints_follow_text_tokenizer_and_split(tmp_path, small_corpus, sample):
    settings = [(256, 0.2), (256, 0.3), (300, 0.2)]
    fingerprints = {sample.fingerprint} | {
        load_dataset(
            small_corpus, vocab_size=size, heldout_fraction=fraction, cache_dir=tmp_path
        ).fingerprint
        for size, fraction in settings
    }
    assert len(fingerprints) == 4


def test_two_builders_may_race(tmp_path, monkeypatch, sample):
    build = dataset.build_store

    def build_and_lose(directory, out, **arguments):
        meta = build(directory, out, **arguments)
        # Another process finishes between our build and our rename.
        shutil.copytree(out.parent, out.parent.with_name(out.parent.name.split(".")[0]))
        return meta

    monkeypatch.setattr(dataset, "build_store", build_and_lose)
    loaded = load_dataset("sample", vocab_size=256, cache_dir=tmp_path)
    assert loaded.fingerprint == sample.fingerprint
    assert len(list(tmp_path.iterdir())) == 1


def test_a_store_can_be_loaded_by_any_of_its_names(cache):
    (folder,) = cache.glob("sample-v256-*")
    for name in ("tokens", "tokens.bin", "tokens.json"):
        assert load_dataset(folder / name).vocab_size == 256
    with pytest.raises(ValueError, match=r"vocab_size 1024 was asked for.*tokenized with 256"):
        load_dataset(folder / "tokens.bin", vocab_size=1024)


def _small_store(folder):
    documents = [Document(f"d{i}", "s", f"document number {i}") for i in range(40)]
    write_store(
        folder / "t.bin",
        documents,
        tokenizer=ByteTokenizer(),
        heldout_fraction=0.2,
        name="t",
        provenance={},
    )
    return folder / "t.bin"


def test_damage_is_found(tmp_path):
    path = _small_store(tmp_path)
    data = bytearray(path.read_bytes())
    data[37] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorpusError, match="differs from the checksum"):
        open_dataset(path)
    assert open_dataset(path, verify=False).vocab_size == 256
    path.write_bytes(data[:-2])
    with pytest.raises(CorpusError, match=r"bytes, its \.json says"):
        open_dataset(path, verify=False)
    path.unlink()
    with pytest.raises(CorpusError, match=r"missing beside its \.json"):
        open_dataset(path)


def test_unusable_descriptions_are_named(tmp_path):
    path = _small_store(tmp_path)
    described = path.with_suffix(".json")
    meta = json.loads(described.read_text())
    described.write_text(json.dumps({**meta, "format": 99}))
    with pytest.raises(CorpusError, match="want store format"):
        open_dataset(path)
    described.write_text("{")
    with pytest.raises(CorpusError, match="not JSON"):
        open_dataset(path)
    described.unlink()
    with pytest.raises(CorpusError, match="no such token store"):
        open_dataset(path)


def test_a_failed_build_leaves_no_store(tmp_path):
    def documents():
        yield Document("a", "s", "one")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_store(
            tmp_path / "t.bin",
            documents(),
            tokenizer=ByteTokenizer(),
            heldout_fraction=0.5,
            name="t",
            provenance={},
        )
    assert list(tmp_path.iterdir()) == []


def test_bad_stores_are_refused(tmp_path):
    arguments = {"tokenizer": ByteTokenizer(), "name": "t", "provenance": {}}
    twice = [Document("a", "s", "x"), Document("a", "s", "y")]
    with pytest.raises(CorpusError, match="'a' occurs twice"):
        write_store(tmp_path / "t", twice, heldout_fraction=0.5, **arguments)
    with pytest.raises(CorpusError, match="no document fell into the heldout split of 1"):
        write_store(tmp_path / "t", twice[:1], heldout_fraction=0.001, **arguments)
    with pytest.raises(ValueError, match="heldout_fraction must lie between 0 and 1"):
        write_store(tmp_path / "t", twice, heldout_fraction=1.0, **arguments)


def test_unknown_corpora_are_named(tmp_path):
    with pytest.raises(CorpusError, match="no such directory or token store"):
        load_dataset(tmp_path / "nothing")
    with pytest.raises(CorpusError, match=r"no manifest\.json, so this is no corpus"):
        load_dataset(tmp_path)
    with pytest.raises(ValueError, match=r"vocab_size must lie in \[256, 32768\], got 100"):
        load_dataset("sample", vocab_size=100)


def test_sample_manifest_matches_its_shards():
    manifest = read_manifest(SAMPLE_DIR)
    documents = list(read_corpus(SAMPLE_DIR))  # checks every sha256
    ids = [document.id for document in documents]
    assert len(set(ids)) == len(ids)
    assert len(manifest["sources"]) >= 4
    for entry in manifest["sources"]:
        own = [document for document in documents if document.source == entry["name"]]
        assert len(own) == entry["documents"]
        assert sum(len(document.text.encode()) for document in own) == entry["bytes"]
        assert entry["licence"] == "Public domain"
        assert entry["package"]
        assert entry["version"]
    total = sum(entry["bytes"] for entry in manifest["sources"])
    assert 3.5e6 < total < 5e6
    assert sum((SAMPLE_DIR / e["file"]).stat().st_size for e in manifest["sources"]) < 1.6e6


def test_sample_text_is_clean():
    for document in read_corpus(SAMPLE_DIR):
        assert document.text == document.text.strip("\n")
        assert "\n\n\n" not in document.text
        assert "</" not in document.text
        assert not re.search(r"\{[^{}]*\}", document.text)
        assert not set(document.text) & set("\r\0\ufffd\xa0")
