"""Cleaning rules: what they drop, what they keep, and that repeating them changes nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.data.dataset import SAMPLE_DIR
from experiments.data.documents import Document, read_corpus
from experiments.data.pipeline.clean import (
    CleanConfig,
    LanguageConfig,
    ToxicityConfig,
    clean_documents,
    identify_language,
    repair_text,
)
from experiments.data.pipeline.personal import PersonalConfig, luhn_valid, redact_personal
from experiments.data.pipeline.records import Tally
from experiments.data.pipeline.rules import (
    LengthConfig,
    LineConfig,
    RepetitionConfig,
    length_reason,
    line_reason,
    repetition_reason,
    split_words,
)

PROSE = (
    "The committee that met on Tuesday had to decide what to do with the old library. Some of "
    "its members wanted to sell the building, and others thought that a reading room should "
    "have been opened years ago. After two hours of talk they agreed on nothing at all, which "
    "surprised nobody who knew them, and they went home to have dinner with their families."
)


def run(texts, config, source="web"):
    tally = Tally()
    documents = [Document(str(i), source, text) for i, text in enumerate(texts)]
    return [record.text for record in clean_documents(documents, config, tally)], tally


def reasons(text):
    words = split_words(text)
    found = (
        length_reason(text, words, LengthConfig()),
        line_reason(text, words, LineConfig()),
        repetition_reason(text, words, RepetitionConfig()),
    )
    return [reason for reason in found if reason]


def test_prose_passes_every_rule():
    assert reasons(PROSE) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Two words.", "fewer than 50 words"),
        (PROSE.replace(" ", ""), "fewer than 50 words"),
        (" ".join(["a b"] * 60), "mean word shorter"),
        (" ".join(f"internationalisation{i}" for i in range(60)), "mean word longer"),
        (PROSE + " # # #" * 8, "more than 0.1 # per word"),
        (PROSE.replace(" ", " ... ", 12), "more than 0.1 ... per word"),
        (
            "\n".join(f"- {part} {i}" for i, part in enumerate(PROSE.split(" to "))),
            "of the lines are bullets",
        ),
        (
            "\n".join(
                f"They had thought that the {w} should never have been a matter for us…"
                for w in PROSE.split()
            ),
            "end with an ellipsis",
        ),
        (" ".join(f"{i:06d}" for i in range(60)), "have a letter"),
        (" ".join(f"wort{i}" for i in range(60)), "stop words"),
        (PROSE + " Lorem ipsum dolor.", "phrase 'lorem ipsum'"),
        ("\n".join(PROSE.split()), "end in punctuation"),
        ("\n".join(f"{w}." for w in PROSE.split()), "lines are short"),
        ("\n".join([PROSE] * 2), "of the lines are repeated"),
        (PROSE + " nobody remembers afterwards" * 40, "most frequent 2-gram"),
    ],
)
def test_each_rule_drops_its_kind(text, reason):
    import re

    assert any(re.search(reason, found) for found in reasons(text)), reasons(text)


def test_repeated_ngrams_count_overlaps_once():
    words = [f"w{i}" for i in range(100)]
    text = " ".join(words + words[:20])
    size = sum(map(len, words[:20])) / sum(map(len, words + words[:20]))

    def only_ngrams(bound):
        b = bound
        return RepetitionConfig(None, None, None, None, None, repeated_ngrams=(b, b, b, b, b, b))

    above, below = only_ngrams(size + 1e-9), only_ngrams(size - 1e-9)
    assert repetition_reason(text, text.split(), above) is None
    assert repetition_reason(text, text.split(), below) is not None


def test_chinese_counts_characters_as_words():
    text = (
        "委员会星期二开会决定如何处理旧图书馆。有些成员想把楼卖掉，另一些人认为早该开一个阅览室。"
        * 2
    )
    config = LengthConfig(min_stop_words=None)
    assert length_reason(text, split_words(text), config) is None


def test_repair_mends_mojibake_and_leaves_the_rest():
    assert repair_text("sch\u00c3\u00b6n\nna\u00efve &lt; “quoted” ﬁne") == (
        "schön\nnaïve &lt; “quoted” ﬁne"
    )
    assert repair_text("x &amp; y") == "x &amp; y"


@given(st.text(max_size=80))
def test_repair_is_idempotent_and_valid(text):
    once = repair_text(text.encode(errors="replace").decode())
    assert repair_text(once) == once
    once.encode()


def test_language():
    samples = {
        "en": PROSE,
        "de": "Der Ausschuss beriet am Dienstag zwei Stunden lang über die alte Bücherei.",
        "fr": "La commission n'a rien décidé au sujet de la vieille bibliothèque de la ville.",
        "ru": "Комиссия два часа обсуждала судьбу старой библиотеки и ничего не решила.",
        "zh": "委员会讨论了两个小时，没有决定如何处理旧图书馆。",
        "ar": "ناقشت اللجنة مصير المكتبة القديمة لمدة ساعتين ولم تقرر شيئا على الإطلاق.",
    }
    assert {code: identify_language(text)[0] for code, text in samples.items()} == {
        code: code for code in samples
    }
    assert identify_language("1234 !!") == ("", 0.0)
    config = CleanConfig(language=LanguageConfig(keep=("en", "de"), min_characters=20))
    kept, tally = run(samples.values(), config)
    assert kept == [samples["en"], samples["de"]]
    assert dict(tally.dropped) == {f"language {code}": 1 for code in ("fr", "ru", "zh", "ar")}
    assert len(run(["Trop court."], CleanConfig(language=LanguageConfig()))[0]) == 1
    exempt = CleanConfig(language=LanguageConfig(exempt=("code",)))
    assert len(run(["x = 1"], exempt, source="code")[0]) == 1


def test_toxicity_goes_by_share_and_whole_words(tmp_path):
    config = CleanConfig(toxicity=ToxicityConfig())
    vulgar = "You fucking shit, what a fucking asshole you are."
    quoted = PROSE * 10 + " He said shit once, fuck twice, and whore never again."
    kept, tally = run([vulgar, quoted, "Scunthorpe cockpit Essex shitake"], config)
    assert len(kept) == 2
    assert sum(tally.dropped.values()) == 1
    (tmp_path / "words.txt").write_text("committee\n")
    own = ToxicityConfig(words_file=str(tmp_path / "words.txt"), min_hits=1)
    assert not run([PROSE], CleanConfig(toxicity=own))[0]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("write to jane.doe+x@mail.co.uk today", "write to [email] today"),
        ("see user@example.com and a@b", "see user@example.com and a@b"),
        ("card 4111 1111 1111 1111.", "card [card]."),
        ("card 4111-1111-1111-1112 is no card", "card 4111-1111-1111-1112 is no card"),
        ("amex 378282246310005", "amex [card]"),
        ("zeros 4000000000000000000", "zeros 4000000000000000000"),
        ("call (212) 555-0187 or +44 20 7946 0958", "call [phone] or [phone]"),
        ("version 2.10.3, 2026-11-29, 1234567890, 192.168.100.200", None),
        ("0x4111111111111111 and 3.14159265358979", None),
    ],
)
def test_personal_data(text, want):
    assert redact_personal(text, PersonalConfig())[0] == (want or text)


@given(st.text("0123456789", min_size=1, max_size=18), st.integers(0, 200), st.integers(1, 9))
def test_luhn_finds_every_wrong_digit(body, place, change):
    number = next(body + str(d) for d in range(10) if luhn_valid(body + str(d)))
    place %= len(number)
    wrong = str((int(number[place]) + change) % 10)
    assert not luhn_valid(number[:place] + wrong + number[place + 1 :])


def test_drop_and_keep_actions():
    texts = ["mail ann@mail.org", "call +49 30 1234567"]
    kept, tally = run(texts, CleanConfig(personal=PersonalConfig(email="drop", phone="keep")))
    assert kept == texts[1:]
    assert dict(tally.dropped) == {"personal data: email": 1}


def test_the_sample_corpus_mostly_passes():
    rules = CleanConfig(
        length=LengthConfig(min_words=20), repetition=RepetitionConfig(), language=LanguageConfig(),
        toxicity=ToxicityConfig(), personal=PersonalConfig(),
    )  # fmt: skip
    documents = [d for d in read_corpus(SAMPLE_DIR) if d.source == "austen"]
    assert documents
    tally = Tally()
    kept = list(clean_documents(documents, rules, tally))
    assert len(kept) >= 0.95 * len(documents), tally.to_json()
    assert len(kept) + sum(tally.dropped.values()) == len(documents)
    assert {record.notes["language"] for record in kept} == {"en"}
    again = list(clean_documents(kept, rules))
    assert again == kept
