"""Packing: no token is lost unreported, no document sees another."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.data.packing import (
    gather_windows,
    join_documents,
    segments_and_positions,
    split_report,
    window_count,
)

EOS = 0
DOCUMENTS = st.lists(
    st.lists(st.integers(1, 9), max_size=12).map(lambda ids: np.array(ids, dtype=np.uint16)),
    max_size=8,
)


@settings(deadline=None)
@given(DOCUMENTS)
def test_join_keeps_every_token_and_limit(documents):
    stream = join_documents(documents, eos_id=EOS)
    if not documents:
        assert stream.size == 0
        return
    assert len(stream) == sum(len(d) for d in documents) + len(documents) + 1
    inner = np.split(stream, np.flatnonzero(stream == EOS))[1:-1]
    assert [part[1:].tolist() for part in inner] == [d.tolist() for d in documents]


def test_a_document_that_holds_eos_is_refused():
    with pytest.raises(ValueError, match="document 1 holds the end-of-text id 0"):
        join_documents([np.array([1]), np.array([2, 0, 3])], eos_id=EOS)


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 33))
def test_every_token_is_a_target_once_or_reported(tokens, seq_len):
    stream = np.arange(tokens)
    report = split_report(tokens, seq_len=seq_len)
    assert report.windows == window_count(tokens, seq_len=seq_len)
    rows = gather_windows(stream, np.arange(report.windows), seq_len=seq_len)
    targets = rows[:, 1:].ravel()
    assert targets.tolist() == list(range(1, 1 + report.targets))
    first = 1 if report.windows else 0
    assert report.tokens == report.targets + report.dropped + first
    assert report.dropped < seq_len + (0 if report.windows else 1)
    # Input t predicts target t: the same window moved by one.
    np.testing.assert_array_equal(rows[:, :-1] + 1, rows[:, 1:])


def test_seq_len_must_be_positive():
    with pytest.raises(ValueError, match="seq_len must be at least 1, got 0"):
        window_count(10, seq_len=0)


@settings(deadline=None)
@given(DOCUMENTS.filter(len), st.integers(1, 9), st.data())
def test_segments_follow_documents(documents, seq_len, data):
    stream = join_documents(documents, eos_id=EOS)
    owner = np.cumsum(stream == EOS)  # an EOS, as an input, opens the next document
    windows = window_count(len(stream), seq_len=seq_len)
    if not windows:
        return
    window = data.draw(st.integers(0, windows - 1))
    row = stream[window * seq_len : window * seq_len + seq_len][None]
    segments, positions = segments_and_positions(row, eos_id=EOS)
    same_owner = owner[window * seq_len :][:seq_len]
    np.testing.assert_array_equal(
        segments[0][:, None] == segments[0], same_owner[:, None] == same_owner
    )
    assert segments.min() == 1
    for segment in np.unique(segments):
        inside = positions[segments == segment]
        np.testing.assert_array_equal(inside, np.arange(len(inside)))


def test_segments_do_not_change_their_argument():
    tokens = np.array([[5, 0, 5]])
    segments_and_positions(tokens, eos_id=EOS)
    assert tokens.tolist() == [[5, 0, 5]]
