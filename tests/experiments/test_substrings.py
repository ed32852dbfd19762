"""Exact substrings: the definition by brute force, planted repeats, partitions, characters."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.data import anchors, suffixes
from experiments.data.documents import Document
from experiments.data.intervals import Intervals
from experiments.data.substrings import SubstringConfig, cut_repeats, repeated_substrings, shrink

LETTERS = "abcdefghijklmnopqrstuvwxyz    "


def text(seed, length, alphabet=LETTERS):
    return "".join(random.Random(seed).choices(alphabet, k=length))


def windows(data, size):
    """Every string of `size` bytes and where it starts."""
    found = {}
    for document, part in enumerate(data):
        for place in range(len(part) - size + 1):
            found.setdefault(part[place : place + size], []).append((document, place))
    return found


def cut_by_definition(data, size, held):
    """(document, byte) pairs that are cut, straight from the rule of the module."""
    later, first = set(), set()
    for places in windows(data, size).values():
        if len(places) > 1:
            first |= {(places[0][0], places[0][1] + i) for i in range(size)}
            later |= {(d, place + i) for d, place in places[1:] for i in range(size)}
    return {(d, place) for d, place in later - first if d >= held}


def cut_by_search(texts, config, held=0, workers=1):
    found = repeated_substrings(texts[held:], config, held_out=texts[:held], workers=workers)
    limits = found.offsets.tolist()
    return {
        (d, byte - start)
        for d, (start, end) in enumerate(itertools.pairwise(limits))
        for a, b in found.cuts.within(start, end)
        for byte in range(a, b)
    }, found.stats


ALPHABETS = st.sampled_from(["a", "ab", "abcdefgh ", "é世a😀", "\r\nx"])


@st.composite
def collections(draw):
    """Texts with common parts, of alphabets that make many accidental repeats too."""
    letters = st.sampled_from(draw(ALPHABETS))
    common = "".join(draw(st.lists(letters, min_size=1, max_size=50)))
    texts = []
    for _ in range(draw(st.integers(0, 4))):
        own = "".join(draw(st.lists(letters, max_size=30)))
        at, a, b = (draw(st.integers(0, 50)) for _ in range(3))
        texts.append(own[:at] + common[min(a, b) : max(a, b)] + own[at:])
    return texts, draw(st.integers(2, 24)), draw(st.integers(0, len(texts)))


@settings(max_examples=60, deadline=None)
@given(collections(), st.sampled_from([2, 5, 1000]))
def test_cuts_are_those_of_the_definition(case, partition):
    texts, size, held = case
    config = SubstringConfig(min_bytes=size, partition_bytes=partition * size)
    got, stats = cut_by_search(texts, config, held)
    data = [t.encode() for t in texts]
    assert got == cut_by_definition(data, size, held)
    assert stats.bytes == sum(map(len, data))


@settings(max_examples=40, deadline=None)
@given(collections())
def test_nothing_that_repeats_disappears(case):
    """Every string of whole characters that repeats, k bytes or longer, is still there once."""
    texts, size, _ = case
    stream, stats = cut_repeats(texts, SubstringConfig(min_bytes=size, joint="|", min_rest=0))
    after = [document.text for document in stream]
    assert len(after) == len(texts)
    rest = [piece.encode() for t in after for piece in t.split("|")]
    for window, places in windows([t.encode() for t in texts], size).items():
        assert len(places) == 1 or any(window in piece for piece in rest)
    before, now = (sum(len(t.encode()) for t in part) for part in (texts, after))
    assert before - now == stats.bytes_cut - sum(t.count("|") for t in after)


@settings(max_examples=60, deadline=None)
@given(collections())
def test_equal_windows_share_an_anchor(case):
    texts, size, _ = case
    data = [t.encode() for t in texts]
    offsets = np.concatenate(([0], np.cumsum([len(part) for part in data], dtype=np.int64)))
    hashes, places = anchors.find_anchors(np.frombuffer(b"".join(data), np.uint8), offsets, size)
    at = dict(zip(places.tolist(), hashes.tolist(), strict=True))
    span = size - anchors.anchor_width(size) + 1
    for found in windows(data, size).values():
        inside = [
            {at[i] for i in range(offsets[d] + p, offsets[d] + p + span) if i in at}
            for d, p in found
        ]
        assert set.intersection(*inside)


def test_anchors_are_few_and_do_not_depend_on_blocks(monkeypatch):
    data = np.frombuffer(text(0, 50_000).encode(), np.uint8)
    offsets = np.array([0, 20_000, 50_000])
    whole = anchors.find_anchors(data, offsets, 200)
    assert 1 / 73 < len(whole[0]) / len(data) < 2.3 / 74  # at most 2 / (w + 1) or so
    monkeypatch.setattr(anchors, "BLOCK", 777)
    for a, b in zip(whole, anchors.find_anchors(data, offsets, 200), strict=True):
        np.testing.assert_array_equal(a, b)
    one_letter = np.full(50_000, ord("a"), np.uint8)
    assert len(anchors.find_anchors(one_letter, np.array([0, 50_000]), 200)[0]) < 1000


# --- planted repeats ------------------------------------------------------------------------------

LICENCE = {
    "English": text(1, 400),
    "Chinese": text(2, 150, "的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年得"),
    "Arabic": text(3, 300, "ابتثجحخدذرزسشصضطظعغفقكلمنهوي "),
    "emoji": text(4, 100, "😀😃😄😁😆🥹😅😂🤣🥲🙂🙃😉😊😇🥰"),
    "CRLF": "\r\n".join(text(10 + i, 60) for i in range(8)),
}


@pytest.mark.parametrize("name", LICENCE)
def test_planted_text_is_cut_but_for_its_first_time(name):
    planted = LICENCE[name].strip()
    own = [text(100 + i, 500) for i in range(6)]
    documents = [
        Document(f"{i}", source, f"{own[i][:200]}<{planted}>{own[i][200:]}" if i % 2 else own[i])
        for i, source in enumerate(("web", "web", "books", "books", "code", "code"))
    ]
    stream, stats = cut_repeats(documents)
    after = list(stream)
    assert [d.text for d in after[:3]] == [d.text for d in documents[:3]]  # the first is whole
    for d in (after[3], after[5]):
        assert d.text == own[int(d.id)][:200] + own[int(d.id)][200:]
        assert d.source == documents[int(d.id)].source
    assert stats.documents_cut == stats.spans_cut == 2
    assert stats.bytes_cut == 2 * len(f"<{planted}>".encode())
    struck, _ = cut_repeats(documents, SubstringConfig(keep="none"))
    assert [d.text for d in struck] == own
    held, _ = cut_repeats(documents, held_out=[f"Question: <{planted}> Answer."])
    assert [d.text for d in held] == own


def test_shorter_repeats_and_other_limits_stay():
    planted = text(1, 199)
    one, two = text(2, 300), text(3, 300)
    stream, stats = cut_repeats([one + "<" + planted + "<", two + ">" + planted + ">"])
    assert [d.text for d in stream] == [one + "<" + planted + "<", two + ">" + planted + ">"]
    assert stats.bytes_cut == 0
    # 100 bytes at the end of one document and 100 at the start of the next are no repeat.
    parts = [one + planted[:100], planted[100:] + two, text(5, 400) + planted + text(6, 400)]
    stream, stats = cut_repeats(parts, SubstringConfig(min_bytes=150))
    assert [d.text for d in stream] == parts


def test_a_document_within_a_document_is_dropped():
    inner = text(1, 400)
    stream, stats = cut_repeats([text(2, 300) + inner, " \n" + inner + "\n", text(3, 300)])
    assert [d.id for d in stream] == ["0", "2"]
    assert stats.documents_dropped == 1
    stream, _ = cut_repeats([inner, "ab" + inner, "abcd" + inner], SubstringConfig(min_rest=3))
    assert [d.text for d in stream] == [inner, "abcd"]


def test_one_letter_and_no_text():
    line = "a" * 30_000
    stream, stats = cut_repeats(["", line, " ", "a" * 500])
    assert [d.text for d in stream] == ["", "a" * 200, " "]
    assert stats.bytes_cut == 30_300
    stream, stats = cut_repeats([])
    assert not list(stream)
    assert stats.documents == stats.bytes == 0


def test_cut_text_is_whole_characters():
    """Repeats that begin and end inside characters: their lead or last bytes differ."""
    common = LICENCE["Chinese"].strip()
    documents = ["Ā" + common + "ā", "ŀ" + common + "Ł", text(1, 300)]
    data = [d.encode() for d in documents]
    assert data[0][1:2] == data[1][1:2]  # the last byte of the first character agrees
    stream, _ = cut_repeats(documents)
    assert [d.text for d in stream] == [documents[0], "ŀŁ", documents[2]]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=8), st.integers(0, 32), st.integers(0, 32))
def test_shrunk_spans_hold_whole_characters(string, a, b):
    data = string.encode("utf-8", "surrogatepass")
    start, end = sorted((min(a, len(data)), min(b, len(data))))
    first, last = shrink(data, start, end)
    if first < last:
        assert start <= first
        assert last <= end
        rest = data[:first] + data[last:]
        inner = data[first:last].decode("utf-8", "surrogatepass")
        assert rest.decode("utf-8", "surrogatepass").count("") + len(inner) == len(string) + 1


# --- the same result whatever the partitions, blocks and workers ----------------------------------


def repetitive(seed, count=60):
    draw = random.Random(seed)
    parts = [text(1000 * seed + i, draw.randrange(20, 300)) for i in range(25)]
    return ["".join(draw.choices(parts, k=draw.randrange(1, 8))) for _ in range(count)]


def test_partitions_and_workers_give_equal_bytes(monkeypatch):
    monkeypatch.setattr("experiments.data.threads.BATCH_CHARACTERS", 5000)
    texts = repetitive(1)
    outcomes = []
    for partition, workers in ((1 << 20, 1), (4000, 1), (4000, 2), (1000, 7)):
        config = SubstringConfig(min_bytes=100, partition_bytes=partition)
        stream, stats = cut_repeats(iter(texts), config, workers=workers)
        outcomes.append(("\0".join(d.text for d in stream).encode(), stats.bytes_cut))
        parts = stats.partitions
    assert parts > 10
    assert outcomes[0][1] > 10_000
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_partitions_hold_whole_groups():
    """A string that alone fills more than a partition still has all its places in one."""
    config = SubstringConfig(min_bytes=50, partition_bytes=200)
    texts = [f"{text(200 + i, 80)}{chr(256 + i)}{LICENCE['English'][:60]}" for i in range(20)]
    got, stats = cut_by_search(texts, config)
    assert stats.largest_partition > 200
    assert len(got) == 19 * 60


def test_small_blocks_of_the_suffix_array(monkeypatch):
    texts = repetitive(2, 20)
    config = SubstringConfig(min_bytes=40)
    whole = cut_by_search(texts, config)
    monkeypatch.setattr(suffixes, "BLOCK", 61)
    assert cut_by_search(texts, config) == whole


def test_a_collision_of_hashes_is_seen_and_mended(monkeypatch):
    """With every window hashed alike, the bytes decide, and the next hash is taken."""
    data = np.frombuffer(bytearray(text(5, 300).encode() * 2), np.uint8)
    offsets = np.array([0, 600])
    want = suffixes.repeated_windows(data, offsets, 20)
    assert (want >= 0).sum() == 281
    real = suffixes._window_hashes
    seeds = []

    def weak(text, offsets, size, seed):
        seeds.append(seed)
        hashes = real(text, offsets, size, seed)
        return hashes if seed >= 2 else np.minimum(hashes, seed + 1).astype(np.uint32)

    monkeypatch.setattr(suffixes, "_window_hashes", weak)
    np.testing.assert_array_equal(suffixes.repeated_windows(data, offsets, 20), want)
    assert seeds == [0, 1, 2]


SETS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


@settings(max_examples=80, deadline=None)
@given(SETS, SETS)
def test_intervals_are_sets(first, second):
    def members(intervals):
        return {i for a, b in intervals.pairs() for i in range(a, b)}

    a, b = Intervals.union(first), Intervals.union(second)
    inside = [{i for x, y in pairs for i in range(x, y)} for pairs in (first, second)]
    assert members(a) == inside[0]
    assert a.size() == len(inside[0])
    assert members(a.minus(b)) == inside[0] - inside[1]
    assert members(a.join(b)) == inside[0] | inside[1]
    clipped = a.within(7, 19)
    assert {i for x, y in clipped for i in range(x, y)} == inside[0] & set(range(7, 19))
    mask = np.array([i in inside[0] for i in range(31)])
    assert Intervals.of_mask(mask).pairs() == a.pairs()


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_bytes": 1}, "min_bytes must be at least 2, got 1"),
        ({"keep": "last"}, "keep must be one of"),
        ({"partition_bytes": 100}, "partition_bytes must be between 2 \\* min_bytes = 400"),
        ({"partition_bytes": 1 << 31}, "partition_bytes must be between"),
        ({"min_rest": -1}, "min_rest must not be negative"),
    ],
)
def test_bad_configurations_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SubstringConfig(**arguments)
    with pytest.raises(ValueError, match="tokens and bytes_per_token must be positive"):
        SubstringConfig.of_tokens(0)


def test_bad_calls_are_refused():
    with pytest.raises(TypeError, match="must be Document or str, got int"):
        cut_repeats([3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="workers must be a positive integer"):
        cut_repeats([], workers=-1)

    class Changing:
        rounds = 0

        def __iter__(self):
            self.rounds += 1
            return iter([text(0, 300), text(0, 300) + "x" * self.rounds])

    with pytest.raises(RuntimeError, match="documents changed while they were read"):
        repeated_substrings(Changing())
    found = repeated_substrings([text(0, 300)])
    with pytest.raises(RuntimeError, match="had 300 bytes when it was searched, now 2"):
        found.spans(0, b"ab")
