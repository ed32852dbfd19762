"""First fit and best fit: every pair once, rows never overfull, documents never mixed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.data.fitting import (
    document_limits,
    gather_rows,
    pack_documents,
)
from experiments.data.packing import join_documents

lengths_lists = st.lists(st.integers(0, 30), max_size=25)
methods = st.sampled_from(["first-fit", "best-fit"])


def documents_of(lengths):
    rng = np.random.default_rng(len(lengths))
    return [rng.integers(1, 1000, length) for length in lengths]


@settings(max_examples=60)
@given(lengths_lists, st.integers(1, 12), methods, st.sampled_from(["split", "drop"]))
def test_every_pair_is_a_target_exactly_once(lengths, seq_len, method, long):
    documents = documents_of(lengths)
    stream = join_documents(documents, eos_id=0)
    starts, found = document_limits(stream, eos_id=0)
    assert found.tolist() == lengths
    packed = pack_documents(lengths, seq_len=seq_len, method=method, long=long)
    batch = gather_rows(stream, starts, packed, np.arange(packed.rows), eos_id=0)
    got = sorted(
        zip(batch.inputs[batch.mask].tolist(), batch.targets[batch.mask].tolist(), strict=True)
    )
    kept = [d for d in documents if long == "split" or len(d) + 1 <= seq_len]
    want = sorted(
        pair for d in kept for pair in zip([0, *d.tolist()], [*d.tolist(), 0], strict=True)
    )
    assert got == want
    report = packed.report
    assert report.targets == len(want)
    assert report.pairs == sum(lengths) + len(lengths) == report.targets + report.dropped
    assert packed.rows * seq_len == report.targets + report.padding
    assert (~batch.mask).sum() == report.padding
    assert batch.mask.any(axis=1).all()  # no row is all padding


@given(lengths_lists.filter(bool), st.integers(2, 40), methods)
def test_segments_hold_one_document_and_positions_count(lengths, seq_len, method):
    documents = documents_of(lengths)
    # Tokens name their document, so that a mixture of two shows.
    documents = [np.full(len(d), i + 1) for i, d in enumerate(documents)]
    stream = join_documents(documents, eos_id=0)
    starts, _ = document_limits(stream, eos_id=0)
    packed = pack_documents(lengths, seq_len=seq_len, method=method)
    batch = gather_rows(stream, starts, packed, np.arange(packed.rows), eos_id=0)
    for row in range(packed.rows):
        for segment in range(1, batch.segments[row].max() + 1):
            inside = batch.segments[row] == segment
            names = set(batch.inputs[row, inside].tolist() + batch.targets[row, inside].tolist())
            assert len(names - {0}) <= 1
            assert batch.positions[row, inside].tolist() == list(range(inside.sum()))
        used = batch.segments[row] > 0
        assert (np.diff(batch.segments[row][used]) >= 0).all()
        assert not used[np.argmin(used) :].any() or used.all()  # padding is at the end


def first_fit_by_hand(sizes, capacity):
    free, rows = [], []
    for size in sizes:
        row = next((i for i, left in enumerate(free) if left >= size), len(free))
        if row == len(free):
            free.append(capacity)
        free[row] -= size
        rows.append(row)
    return rows


@given(st.lists(st.integers(0, 9), max_size=40))
def test_first_fit_is_first_fit(lengths):
    packed = pack_documents(lengths, seq_len=10, method="first-fit")
    row = np.repeat(np.arange(packed.rows), np.diff(packed.row_starts))
    got = dict(zip(packed.document.tolist(), row.tolist(), strict=True))
    want = first_fit_by_hand([n + 1 for n in lengths], 10)
    assert [got[i] for i in range(len(lengths))] == want


@settings(max_examples=40)
@given(st.lists(st.integers(0, 19), min_size=1, max_size=60))
def test_best_fit_decreasing_stays_within_its_bound(lengths):
    """At most 11/9 of the optimum + 1 rows (Johnson 1974); first-fit decreasing has no fewer."""
    packed = pack_documents(lengths, seq_len=20, method="best-fit")
    sizes = np.array(lengths) + 1
    least = max(-(-int(sizes.sum()) // 20), int((sizes > 10).sum()))
    upper = 11 / 9 * len(first_fit_rows(sizes)) + 1
    assert least <= packed.rows <= upper


def first_fit_rows(sizes):
    return set(first_fit_by_hand(sorted(sizes.tolist(), reverse=True), 20))


def test_best_fit_beats_first_fit_and_concatenation_cuts_more():
    rng = np.random.default_rng(0)
    lengths = np.minimum(3000, rng.lognormal(5, 1.2, 5000)).astype(int)
    best = pack_documents(lengths, seq_len=1024, method="best-fit").report
    first = pack_documents(lengths, seq_len=1024, method="first-fit").report
    assert best.rows <= first.rows
    assert best.padding_share < 0.01
    assert first.padding_share < 0.1
    assert best.split_documents == first.split_documents == (lengths + 1 > 1024).sum()
    dropped = pack_documents(lengths, seq_len=1024, long="drop").report
    assert dropped.loss_share == pytest.approx(
        (lengths + 1)[lengths + 1 > 1024].sum() / (lengths + 1).sum()
    )


def test_the_time_grows_with_the_documents_and_not_their_square():
    import time

    lengths = np.random.default_rng(1).integers(1, 2000, 30_000)
    for method in ("first-fit", "best-fit"):
        start = time.process_time()
        assert pack_documents(lengths, seq_len=2048, method=method).rows > 0
        assert time.process_time() - start < 5


def test_rows_come_in_any_order_and_bad_arguments_are_named():
    lengths = [3, 1, 4, 1, 5]
    stream = join_documents(documents_of(lengths), eos_id=0)
    starts, _ = document_limits(stream, eos_id=0)
    packed = pack_documents(lengths, seq_len=6)
    whole = gather_rows(stream, starts, packed, np.arange(packed.rows), eos_id=0)
    last = gather_rows(stream, starts, packed, [packed.rows - 1, 0], eos_id=0)
    np.testing.assert_array_equal(last.inputs, whole.inputs[[-1, 0]])
    with pytest.raises(ValueError, match=r"rows must lie in \[0, 4\)"):
        gather_rows(stream, starts, packed, [4], eos_id=0)
    with pytest.raises(ValueError, match="seq_len must be at least 1"):
        pack_documents(lengths, seq_len=0)
    with pytest.raises(ValueError, match="method must be 'first-fit' or 'best-fit', got 'worst'"):
        pack_documents(lengths, seq_len=4, method="worst")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="non-negative"):
        pack_documents([-1], seq_len=4)
    assert pack_documents([], seq_len=4).rows == 0
