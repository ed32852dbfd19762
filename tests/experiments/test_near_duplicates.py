"""Near duplicates: planted ones in many scripts, brute force, the S-curve, workers, limits."""

import itertools
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.data import minhash
from experiments.data.documents import Document
from experiments.data.hashing import mix, window_hashes
from experiments.data.near_duplicates import NearDuplicateConfig, near_duplicates
from experiments.data.shingles import PIECE, ShingleSets, shingle_sets

CONFIG = NearDuplicateConfig()
WORDS = ["".join(p) for p in itertools.product("bdfgklmnprst", "aeiou", "bdgklmnprst", "aeio")]


def prose(seed, words=120):
    """Distinct text: no two seeds share five words in a row, but for chance of 1e-14."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def changed(text, every, seed=0):
    """The text with one word in `every` replaced."""
    draw = random.Random(seed)
    words = text.split(" ")
    for place in range(every // 2, len(words), every):
        words[place] = draw.choice(WORDS) + "x"
    return " ".join(words)


def true_jaccard(a, b, size=5):
    """By Python's own sets, for ASCII prose."""
    first, second = (
        {tuple(words[i : i + size]) for i in range(max(1, len(words) - size + 1))}
        for words in (re.findall(r"[a-z0-9]+", text.lower()) for text in (a, b))
    )
    return len(first & second) / len(first | second)


# --- planted duplicates ---------------------------------------------------------------------------

CHINESE = "".join(chr(0x4E00 + c) for c in random.Random(6).choices(range(3000), k=200))
ARABIC = " ".join(
    "".join(random.Random(i).choices("ابتثجحخدذرزسشصضطظعغفقكلمنهوي", k=5)) for i in range(120)
)
EMOJI = "".join(random.Random(7).choices("😀😃😄😁😆🥹😅😂🤣🥲🙂🙃😉😊😇🥰", k=120))
PAGES = "\n\n".join(prose(100 + i, 60) for i in range(8))

PLANTED = {
    "exact": (PAGES, PAGES),
    "one word changed": (PAGES, PAGES.replace(PAGES.split()[200], "changed", 1)),
    "case and punctuation": (PAGES, PAGES.upper().replace(" ", ", ")),
    "marks of a markup": (PAGES, PAGES.replace(" ", " `").replace("a ", "a^ ")),
    "CRLF": (PAGES, PAGES.replace("\n", "\r\n")),
    "reordered paragraphs": (PAGES, "\n\n".join(reversed(PAGES.split("\n\n")))),
    "Chinese, one character changed": (CHINESE, CHINESE[:100] + "\u9f98" + CHINESE[101:]),
    "Chinese with punctuation": (CHINESE, "。".join(re.findall(".{1,9}", CHINESE))),
    "Arabic, one word changed": (ARABIC, ARABIC.replace(ARABIC.split()[60], "كلمة")),
    "emoji, one changed": (EMOJI, EMOJI[:60] + "🚀" + EMOJI[61:]),
    "emoji with variation selectors": (EMOJI, "\ufe0f".join(EMOJI)),
    "emoji with skin tones": (EMOJI, "\U0001f3fd".join(EMOJI)),
    "composed and decomposed": (
        "é à ö ñ café " + PAGES,
        "e\u0301 a\u0300 o\u0308 n\u0303 café " + PAGES,
    ),
    "two words": ("hello world", "Hello,  world!\n"),
    "one word": ("hello", "hello"),
    "punctuation alone": ("-- ** --", "--  ** --\n"),
    "surrogates": ("\ud800 " + PAGES, "\udfff " + PAGES),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_duplicates_are_dropped(name):
    first, second = PLANTED[name]
    others = [prose(i) for i in range(5)]
    texts = [*others[:2], first, *others[2:], second]
    found = near_duplicates(texts)
    assert found.counts["dropped"] == 1
    assert set(found.dropped) | set(found.kept) == {2, 6}
    assert found.similarity[0] >= CONFIG.threshold
    assert found.cluster[2] == found.cluster[6]
    assert found.keep[[0, 1, 3, 4, 5]].all()


DIFFERENT = {
    "other prose": (prose(1), prose(2)),
    "half in common": (prose(1) + " " + prose(2), prose(1) + " " + prose(3)),
    "inside another": (prose(1), "\n".join(prose(i) for i in range(1, 5))),
    "Chinese": (CHINESE[:90], CHINESE[90:180]),
    "Arabic": (ARABIC[:200], ARABIC[200:400]),
    "emoji": (EMOJI[:50], EMOJI[50:100]),
    "one word": ("hello", "world"),
    "one word of two": ("hello", "hello hello"),
    "punctuation": ("---", "***"),
    "empty": ("", "   \r\n\u3000"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_documents_stay(name):
    assert near_duplicates([*DIFFERENT[name], prose(9)]).keep.all()


def test_empty_documents_are_counted_and_kept():
    found = near_duplicates(["", " ", "word", "\n\n", "word"])
    assert found.keep.tolist() == [True, True, True, True, False]
    assert found.counts["empty"] == 3
    nothing = near_duplicates([])
    assert nothing.counts["documents"] == len(nothing.keep) == len(nothing.cluster) == 0


def test_chain_keeps_both_ends():
    """A ~ B ~ C with A unlike C: nothing is dropped for resembling what was dropped."""
    words = prose(3, 400).split()
    a, b, c = (" ".join(words[i : i + 200]) for i in (0, 15, 30))
    assert true_jaccard(a, b) > 0.8 > true_jaccard(a, c)
    first = near_duplicates([a, b, c], NearDuplicateConfig(keep="first"))
    assert first.keep.tolist() == [True, False, True]
    blind = near_duplicates(
        [a, b, c], NearDuplicateConfig(keep="first", verify=False, bands=128, rows=1)
    )
    assert blind.keep.tolist() == [True, False, False]  # what verification prevents


def test_keep_rule_sources_and_held_out():
    text = prose(4, 300)
    documents = [
        Document("b", "web", text),
        Document("a", "web", text),
        Document("z", "books", text),
        Document("y", "code", text + " and more"),
        Document("q", "web", prose(5)),
    ]

    def kept(config, **arguments):
        found = near_duplicates(documents, config, **arguments)
        assert set(found.representative[found.dropped]) == set(found.kept)
        return [documents[i].id for i in np.flatnonzero(found.keep)]

    assert kept(NearDuplicateConfig()) == ["y", "q"]  # the longest
    assert kept(NearDuplicateConfig(keep="first")) == ["b", "q"]
    assert kept(NearDuplicateConfig(prefer=("books",))) == ["z", "q"]
    assert kept(NearDuplicateConfig(prefer=("web",))) == ["a", "q"]  # smallest id of equal length
    found = near_duplicates(documents, held_out=[prose(6), changed(text, 100)])
    assert found.keep.tolist() == [False] * 4 + [True]
    assert found.kept.tolist() == [6] * 4  # 5 documents, then held-out document 1
    assert found.counts["dropped_held_out"] == 4
    assert near_duplicates([text], held_out=[prose(7)]).keep.all()


# --- brute force ----------------------------------------------------------------------------------


def collection(seed, groups=60):
    """Documents at all similarities to one another: each group varies one text."""
    draw = random.Random(seed)
    texts = []
    for group in range(groups):
        text = prose(1000 * seed + group, draw.randrange(30, 150))
        texts.append(text)
        texts += [
            changed(text, draw.randrange(6, 150), draw.randrange(1 << 30))
            for _ in range(draw.randrange(4))
        ]
    draw.shuffle(texts)
    return texts


@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_brute_force_agrees(threshold):
    texts = collection(1)
    found = near_duplicates(texts, NearDuplicateConfig(threshold=threshold))
    for dropped, kept, similarity in zip(found.dropped, found.kept, found.similarity, strict=True):
        assert found.keep[kept]
        assert not found.keep[dropped]
        assert similarity == true_jaccard(texts[dropped], texts[kept]) >= threshold
    near = [
        (i, j)
        for i, j in itertools.combinations(range(len(texts)), 2)
        if true_jaccard(texts[i], texts[j]) >= threshold + 0.1
    ]
    missed = sum(found.keep[i] and found.keep[j] for i, j in near)
    assert len(near) > 10
    assert missed <= 0.01 * len(near)


def test_candidates_follow_the_s_curve():
    """400 pairs of sets at Jaccard 0.6: candidates within 4 sigma of 1 - (1 - s^r)^b."""
    common, own, pairs = 150, 50, 400
    base = mix(np.arange(pairs * (common + 2 * own), dtype=np.uint64), seed=9).reshape(pairs, -1)
    sets = [
        s
        for row in base
        for s in (row[: common + own], np.delete(row, slice(common, common + own)))
    ]
    offsets = np.arange(len(sets) + 1) * (common + own)
    permutations = minhash.Permutations.draw(128, 0)
    signature = minhash.signatures(ShingleSets(np.concatenate(sets), offsets), permutations)
    similarity = common / (common + 2 * own)
    equal = (signature[::2] == signature[1::2]).mean(axis=1)
    sigma = np.sqrt(similarity * (1 - similarity) / 128)
    assert abs(equal.mean() - similarity) < 4 * sigma / np.sqrt(pairs)
    assert 0.85 < equal.std() / sigma < 1.15
    keys = minhash.band_keys(signature, 16, 8)
    share = (keys[:, ::2] == keys[:, 1::2]).any(axis=0).mean()
    expected = minhash.candidate_probability(similarity, 16, 8)
    assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / pairs)


def test_signatures_of_any_block_split(monkeypatch):
    draw = np.random.default_rng(0)
    counts = draw.integers(0, 40, 60)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    sets = ShingleSets(draw.integers(0, 1 << 63, offsets[-1]).astype(np.uint64), offsets)
    permutations = minhash.Permutations.draw(16, 3)
    whole = minhash.signatures(sets, permutations)
    for d in range(60):
        part = (sets.hashes[offsets[d] : offsets[d + 1]] >> np.uint64(32)).tolist()
        for p, (a, c) in enumerate(zip(permutations.factors, permutations.shifts, strict=True)):
            minimum = min(((int(a) * x + int(c)) % 2**32 for x in part), default=2**32 - 1)
            assert whole[d, p] == minimum
    for block in (1, 7, 100):
        monkeypatch.setattr(minhash, "BLOCK", block)
        np.testing.assert_array_equal(minhash.signatures(sets, permutations), whole)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 17))
def test_window_hashes_are_equal_exactly_where_windows_are(values, size):
    hashes = window_hashes(mix(np.array(values, np.uint64)), size)
    windows = [tuple(values[i : i + size]) for i in range(len(values) - size + 1)]
    assert len(hashes) == len(windows)
    assert len(set(hashes.tolist())) == len(set(windows))
    assert len(set(zip(hashes.tolist(), windows, strict=True))) == len(set(windows))


# --- the same result whatever the batches ---------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.text(max_size=40), max_size=8), st.sampled_from(["word", "char"]), st.integers(1, 6)
)
def test_shingles_do_not_depend_on_neighbours(texts, unit, size):
    together = shingle_sets(texts, unit=unit, size=size)
    assert len(together) == len(texts)
    for i, text in enumerate(texts):
        alone = shingle_sets([text], unit=unit, size=size)
        np.testing.assert_array_equal(together.unique(i), alone.unique(0))
        assert (len(alone.hashes) > 0) == bool(text.strip())


def test_worker_counts_give_the_same_result(monkeypatch):
    texts = collection(2, groups=150)
    monkeypatch.setattr("experiments.data.threads.BATCH_CHARACTERS", 2000)
    results = [near_duplicates(iter(texts), workers=workers) for workers in (1, 2, 7)]
    assert results[0].counts["dropped"] > 20
    for other in results[1:]:
        for field in ("keep", "representative", "cluster", "dropped", "kept", "similarity"):
            assert getattr(results[0], field).tobytes() == getattr(other, field).tobytes()
        assert results[0].counts == other.counts


def test_order_of_input_does_not_change_what_is_kept():
    documents = [Document(f"{i:03}", "s", text) for i, text in enumerate(collection(3))]
    shuffled = random.Random(0).sample(documents, len(documents))
    kept = [
        {d.id for d, keep in zip(order, near_duplicates(order).keep, strict=True) if keep}
        for order in (documents, shuffled)
    ]
    assert kept[0] == kept[1]


def test_a_very_long_line_is_read_in_pieces():
    text = " ".join(itertools.islice(itertools.cycle(WORDS), PIECE // 4))
    assert len(text) > PIECE
    found = near_duplicates([text, text + " end", "x" * (PIECE + 5), "x" * (PIECE + 5)])
    assert found.keep.tolist() == [False, True, True, False]
    whole = shingle_sets([text], unit="word", size=5)
    assert len(whole.hashes) == len(text.split()) - 4


def test_templates_are_bounded():
    """Documents from one template share a bucket each with each: work stays linear."""
    head = prose(8, 100)
    texts = [f"{head} {prose(1000 + i, 60)}" for i in range(40)]
    config = NearDuplicateConfig(bands=128, rows=1, most_compared=3)
    found = near_duplicates(texts, config)
    assert found.keep.all()
    assert found.counts["not_compared"] > 0
    assert found.counts["compared"] < 40 * 39 / 2


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": 0.0}, r"threshold must be in \(0, 1\], got 0.0"),
        ({"threshold": float("nan")}, "threshold must be in"),
        ({"unit": "byte"}, "unit must be one of"),
        ({"keep": "last"}, "keep must be one of"),
        ({"size": 0}, "size must be at least 1"),
        ({"permutations": 0}, "permutations must be at least 1"),
        ({"most_compared": 0}, "most_compared must be at least 1"),
        ({"bands": 8}, "give both bands and rows or neither, got 8 and None"),
        ({"bands": 13, "rows": 60}, "13 \\* 60 = 780 > 128"),
        ({"bands": 0, "rows": 1}, "must be at least 1, got 0 and 1"),
        ({"miss_weight": 1.0}, "miss_weight must be in"),
        ({"seed": -1}, "seed must be in"),
    ],
)
def test_bad_configurations_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        NearDuplicateConfig(**arguments)


def test_bad_calls_are_refused():
    with pytest.raises(TypeError, match="must be Document or str, got bytes"):
        near_duplicates([b"bytes"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="workers must be a positive integer, got 0"):
        near_duplicates([], workers=0)

    class Growing:
        rounds = 0

        def __iter__(self):
            self.rounds += 1
            return iter(["same text"] * (1 + self.rounds))

    with pytest.raises(RuntimeError, match="documents changed while they were read"):
        near_duplicates(Growing())


def test_curve_names_the_threshold():
    curve = CONFIG.curve()
    assert "16 bands x 8 rows" in curve.splitlines()[0]
    assert next(line for line in curve.splitlines() if "threshold" in line).startswith(
        "   0.80   0.9470"
    )
