"""Mixed batches: proportions, exact epochs, hosts, resume by step, windows and packed rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.data import load_dataset
from experiments.data.documents import Document
from experiments.data.loader import dataset_from_store
from experiments.data.mixing import MixtureSchedule
from experiments.data.mixture_loader import (
    BatchSource,
    RowOrder,
    mixture_batches,
    packed_batches,
    source_streams,
)
from experiments.data.store import open_store, write_store
from experiments.data.tokenizer import ByteTokenizer


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Three sources whose text is one letter each, of different sizes."""
    path = tmp_path_factory.mktemp("store") / "tokens.bin"
    sizes = {"a": 400, "b": 90, "c": 30}
    documents = [
        Document(f"{name}/{i}", name, name * (20 + i % 30))
        for name, count in sizes.items()
        for i in range(count)
    ]
    write_store(
        path, documents, tokenizer=ByteTokenizer(), heldout_fraction=0.1, name="n", provenance={}
    )
    return dataset_from_store(open_store(path))


@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 15)), min_size=1, max_size=4),
    st.integers(1, 6),
    st.integers(0, 99),
)
def test_each_row_once_per_epoch_of_its_source(pairs, batch_size, seed):
    counts, rows = zip(*pairs, strict=True)
    order = RowOrder(MixtureSchedule(counts), rows, batch_size, seed)
    steps = 2 * sum(counts) * max(rows) // batch_size + 1
    seen = [order.at(step) for step in range(steps)]
    sources = np.concatenate([source for source, _ in seen])
    visited = np.concatenate([row for _, row in seen])
    for source, size in enumerate(rows):
        own = visited[sources == source]
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))
    epochs = order.epochs_at(steps)
    np.testing.assert_allclose(epochs, [(sources == s).sum() / n for s, n in enumerate(rows)])


def test_hosts_share_a_batch_and_a_step_far_away_is_as_near(dataset):
    streams = list(source_streams(dataset).values())
    options = {"batch_size": 12, "seq_len": 32, "seed": 5}
    whole = mixture_batches(streams, (8, 3, 1), **options)
    for step in (0, 7, 10**12):
        hosts = [
            mixture_batches(streams, (8, 3, 1), **options, process_index=i, process_count=3)
            for i in range(3)
        ]
        parts = [host.batch_at(step) for host in hosts]
        np.testing.assert_array_equal(np.concatenate(parts), whole.batch_at(step))


def test_windows_come_from_their_source_in_proportion(dataset):
    streams = source_streams(dataset)
    assert sum(len(s) - 1 for s in streams.values()) == len(dataset.train) - 1
    batches = mixture_batches(list(streams.values()), (8, 3, 1), batch_size=12, seq_len=32, seed=0)
    letters = [ord(name) for name in streams]
    for step in range(20):
        batch = batches.batch_at(step)
        assert batch.shape == (12, 33)
        assert batch.dtype == np.int32
        found = [set(row.tolist()) - {0} for row in batch]
        assert all(len(names) == 1 for names in found)
        counts = [sum({letter} == names for names in found) for letter in letters]
        assert counts == [8, 3, 1]  # a batch is one period here


@pytest.mark.parametrize("method", ["first-fit", "best-fit"])
def test_packed_batches_mix_whole_documents(dataset, method):
    streams = list(source_streams(dataset).values())
    batches = packed_batches(
        streams, (2, 1, 1), batch_size=8, seq_len=64, eos_id=0, seed=3, method=method
    )
    batch = batches.batch_at(11)
    sources, _ = batches.order.at(11)
    assert np.bincount(sources).tolist() == [4, 2, 2]
    for row, source in enumerate(sources):
        inside = batch.mask[row]
        assert set(batch.inputs[row, inside].tolist()) == {0, ord("abc"[source])}
        # Every segment opens with an end-of-text: no document of 21 to 50 pairs was cut.
        opens = batch.positions[row, inside] == 0
        assert (batch.inputs[row, inside][opens] == 0).all()
    again = packed_batches(
        streams, (2, 1, 1), batch_size=8, seq_len=64, eos_id=0, seed=3, method=method,
        process_index=1, process_count=2,
    ).batch_at(11)  # fmt: skip
    np.testing.assert_array_equal(again.inputs, batch.inputs[4:])
    np.testing.assert_array_equal(again.segments, batch.segments[4:])


def test_the_sample_has_its_sources(tmp_path):
    dataset = load_dataset("sample", vocab_size=256, cache_dir=tmp_path)
    streams = source_streams(dataset)
    assert list(streams) == list(dataset.meta["sources"])
    text = dataset.tokenizer.decode(streams["austen"][:4000])
    assert "the" in text.split()


def test_wrong_arguments_are_named(dataset):
    streams = list(source_streams(dataset).values())
    with pytest.raises(ValueError, match="source 2 has a share of the mixture but not one row"):
        mixture_batches(streams, (1, 1, 1), batch_size=3, seq_len=2000, seed=0)
    with pytest.raises(ValueError, match="multiple of process_count 2"):
        mixture_batches(streams, (1, 1, 1), batch_size=3, seq_len=8, seed=0, process_count=2)
    with pytest.raises(ValueError, match=r"rows must have one entry per source \(2\), got 3"):
        mixture_batches(streams, (1, 1), batch_size=3, seq_len=8, seed=0)
    good = mixture_batches(streams, (1, 1, 1), batch_size=3, seq_len=8, seed=0)
    with pytest.raises(ValueError, match="step must not be negative"):
        good.batch_at(-1)


def test_batches_are_a_sequence(dataset):
    streams = list(source_streams(dataset).values())
    batches = mixture_batches(streams, (1, 1, 1), batch_size=3, seq_len=8, seed=0)
    source = BatchSource(batches, 5)
    assert len(source) == 5
    np.testing.assert_array_equal(source[np.int64(3)], batches.batch_at(3))
    with pytest.raises(IndexError, match=r"step must lie in \[0, 5\), got 5"):
        source[5]


def test_grain_takes_them_and_its_checkpoint_is_the_step(dataset):
    grain = pytest.importorskip("grain", reason="Grain is optional")
    streams = list(source_streams(dataset).values())
    batches = mixture_batches(streams, (1, 1, 1), batch_size=3, seq_len=8, seed=0)
    iterator = iter(grain.MapDataset.source(BatchSource(batches, 50)).to_iter_dataset())
    for step in range(7):
        np.testing.assert_array_equal(next(iterator), batches.batch_at(step))
    state = iterator.get_state()
    again = iter(grain.MapDataset.source(BatchSource(batches, 50)).to_iter_dataset())
    again.set_state(state)
    np.testing.assert_array_equal(next(again), batches.batch_at(7))
