"""Cleaning: Unicode repair, length and repetition rules, language, toxicity, personal data."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from experiments.data.documents import Document, normalize_text
from experiments.data.pipeline.personal import PersonalConfig, redact_personal
from experiments.data.pipeline.records import Record, Tally, read_records
from experiments.data.pipeline.rules import (
    LengthConfig,
    LineConfig,
    RepetitionConfig,
    length_reason,
    line_reason,
    repetition_reason,
    split_words,
)
from experiments.data.pipeline.stages import Unit

# Vulgar words that are hardly ever anything else. A language, a register or slurs that matter
# to a corpus go into a file of the user's own (`words_file`): no short list serves everyone.
VULGAR = [
    "arsehole", "assholes", "asshole", "bitches", "blowjob", "bullshit", "cumshot", "cunt",
    "cunts", "dickhead", "fuck", "fucked", "fucker", "fuckers", "fucking", "gangbang",
    "handjob", "milf", "motherfucker", "motherfucking", "porn", "pornhub", "porno", "shit",
    "shitty", "slut", "sluts", "whore", "whores",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LanguageConfig:
    """Language identification by py3langid, whose model (97 languages) is in its package.

    Attributes:
      keep: codes of ISO 639-1; other documents are dropped. Empty keeps all, with the note.
      min_confidence: below this probability the language counts as unknown and is dropped.
      min_characters: shorter texts say too little about their language; they are kept.
      max_characters: how much of a document is looked at, half from the start and half from
        the middle.
      exempt: sources that are neither asked nor dropped (program code has no language).
    """

    keep: tuple[str, ...] = ("en",)
    min_confidence: float = 0.5
    min_characters: int = 100
    max_characters: int = 1000
    exempt: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ToxicityConfig:
    """A word list, normalised by length, so that one quotation does not condemn a book.

    Attributes:
      max_share: of listed words among all; more drops the document.
      min_hits: fewer listed words than this never drop it.
      words_file: one lower-case word per line, in place of the short English list.
      exempt: sources that the rule does not apply to.
    """

    max_share: float = 0.005
    min_hits: int = 3
    words_file: str | None = None
    exempt: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class CleanConfig:
    """The cleaning stage; a table that is missing switches its rules off.

    Attributes:
      repair: mends mojibake and half-decoded text (ftfy); line by line, so that one broken
        line does not decide over the rest. Quotation marks and entities stay as they are.
      repair_exempt: sources whose text is left as it is.
    """

    repair: bool = True
    repair_exempt: tuple[str, ...] = ()
    length: LengthConfig | None = None
    lines: LineConfig | None = None
    repetition: RepetitionConfig | None = None
    language: LanguageConfig | None = None
    toxicity: ToxicityConfig | None = None
    personal: PersonalConfig | None = None


def repair_text(text: str) -> str:
    r"""Text without mojibake, in NFC; ASCII lines cannot hold any and are passed over.

    >>> repair_text("sch\u00c3\u00b6n (cafe\u0301)")
    'schön (café)'
    """
    if text.isascii():
        return text
    import ftfy

    settings = ftfy.TextFixerConfig(
        unescape_html=False, uncurl_quotes=False, fix_latin_ligatures=False,
        fix_character_width=False, explain=False,
    )  # fmt: skip
    lines = (line if line.isascii() else ftfy.fix_text(line, settings) for line in text.split("\n"))
    return normalize_text("\n".join(lines))


@functools.cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def identify_language(text: str, *, max_characters: int = 1000) -> tuple[str, float]:
    """(code, probability) of the language of a text; ``("", 0.0)`` for one without letters."""
    if len(text) > max_characters:
        half, middle = max_characters // 2, len(text) // 2
        text = text[:half] + "\n" + text[max(half, middle) :][:half]
    if not any(map(str.isalpha, text)):
        return "", 0.0
    code, probability = _identifier().classify(text)
    return str(code), float(probability)


@functools.cache
def _toxic_pattern(words_file: str | None) -> re.Pattern[str]:
    words = VULGAR
    if words_file is not None:
        words = [
            word
            for line in Path(words_file).read_text(encoding="utf-8").splitlines()
            if (word := line.strip().lower())
        ]
        if not words:
            raise ValueError(f"clean.toxicity.words_file {words_file}: holds no word")
    return re.compile(r"\b(?:" + "|".join(map(re.escape, words)) + r")\b")


def toxic_hits(text: str, config: ToxicityConfig) -> int:
    """How many words of the list the text holds."""
    return len(_toxic_pattern(config.words_file).findall(text.lower()))


def clean_documents(
    documents: Iterable[Document], config: CleanConfig, tally: Tally | None = None
) -> Iterator[Record]:
    """Repairs, judges and redacts a stream of documents; what it drops goes into ``tally``."""
    tally = Tally() if tally is None else tally
    for document in documents:
        notes = document.notes if isinstance(document, Record) else {}
        record = Record(document.id, document.source, document.text, notes)
        cleaned = _clean_one(record, config, tally)
        if cleaned is not None:
            yield cleaned


def _clean_one(record: Record, config: CleanConfig, tally: Tally) -> Record | None:
    if config.repair and record.source not in config.repair_exempt:
        repaired = repair_text(record.text)
        tally.change("documents repaired (mojibake, NFC)", repaired != record.text)
        record = dataclasses.replace(record, text=repaired)
    reason = _rule_reason(record, config)
    if reason is not None:
        tally.drop(reason, record)
        return None
    judged = _judge_language(record, config.language, tally)
    if judged is None:
        return None
    return _redact(judged, config.personal, tally)


def _applies(rules: Any, record: Record) -> bool:
    return rules is not None and record.source not in rules.exempt


def _rule_reason(record: Record, config: CleanConfig) -> str | None:
    text = record.text
    words = split_words(text)
    checks = (
        (config.length, length_reason),
        (config.lines, line_reason),
        (config.repetition, repetition_reason),
    )
    for rules, check in checks:
        if _applies(rules, record) and (reason := check(text, words, rules)):  # type: ignore
            return reason
    toxicity = config.toxicity
    if toxicity is not None and _applies(toxicity, record):
        hits = toxic_hits(text, toxicity)
        if hits >= max(1, toxicity.min_hits) and hits > toxicity.max_share * len(words):
            return f"more than {toxicity.max_share:g} of the words are on the toxicity list"
    return None


def _judge_language(record: Record, config: LanguageConfig | None, tally: Tally) -> Record | None:
    if config is None or record.source in config.exempt:
        return record
    if len(record.text) < config.min_characters:
        return record
    code, confidence = identify_language(record.text, max_characters=config.max_characters)
    detail = f"{code or 'none'} {confidence:.2f}"
    if config.keep and confidence < config.min_confidence:
        tally.drop("language unknown", record, detail)
        return None
    if config.keep and code not in config.keep:
        tally.drop(f"language {code}", record, detail)
        return None
    return record.noted(language=code)


def _redact(record: Record, config: PersonalConfig | None, tally: Tally) -> Record | None:
    if config is None or record.source in config.exempt:
        return record
    text, counts, drop = redact_personal(record.text, config)
    if drop is not None:
        tally.drop(f"personal data: {drop}", record)
        return None
    for kind, count in counts.items():
        tally.change(f"redacted: {kind}", count)
    return dataclasses.replace(record, text=text)


@dataclasses.dataclass(frozen=True)
class CleanStage:
    """``clean_documents`` over shards."""

    config: CleanConfig
    name: ClassVar[str] = "clean"
    version: ClassVar[int] = 1

    @property
    def settings(self) -> CleanConfig:
        return self.config

    def records(self, unit: Unit, root: Path, folder: Path, tally: Tally) -> Iterator[Record]:
        yield from clean_documents(read_records(root / unit.payload[0]), self.config, tally)
