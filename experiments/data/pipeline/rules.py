"""Length and repetition rules for web text, in the families of Gopher, C4 and FineWeb.

Each rule is a measure of the text and a bound; a document is dropped by the first rule that
it breaks, and the reason names the rule. Sources: Rae et al. 2021 (2112.11446), table A1 and
appendix A1.1 (Gopher); Raffel et al. 2020 (1910.10683), section 2.2 (C4); Penedo et al. 2024
(2406.17557), section 3.6 (FineWeb).

TOML has no None: there, 0 as a lower bound and 1 as an upper one (of a share) switch a rule off.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

_CJK = re.compile("([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff])")
_BULLETS = ("-", "*", "•", "‣", "●", "◦", "–")
_STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
_TERMINAL = tuple(".?!。？！…\"'”’)」』")


@dataclasses.dataclass(frozen=True)
class LengthConfig:
    """Gopher's quality rules and C4's phrases. None switches a rule off.

    Attributes:
      min_words: words in the document; a CJK character counts as a word.
      max_words: the same from above.
      min_mean_word: characters per word on average (not asked of CJK text).
      max_mean_word: the same from above.
      max_symbol_ratio: ``#`` and ellipses per word, each.
      max_bullet_lines: share of lines that start with a bullet.
      max_ellipsis_lines: share of lines that end with an ellipsis.
      min_alphabetic_words: share of words that hold a letter.
      min_stop_words: how many of the, be, to, of, and, that, have, with must occur (English).
      phrases: lower-case strings; a document that holds one is dropped (C4).
      exempt: sources that these rules do not apply to.
    """

    min_words: int | None = 50
    max_words: int | None = 100_000
    min_mean_word: float | None = 3.0
    max_mean_word: float | None = 10.0
    max_symbol_ratio: float | None = 0.1
    max_bullet_lines: float | None = 0.9
    max_ellipsis_lines: float | None = 0.3
    min_alphabetic_words: float | None = 0.8
    min_stop_words: int | None = 2
    phrases: tuple[str, ...] = ("lorem ipsum",)
    exempt: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class LineConfig:
    """FineWeb's line rules. None switches a rule off.

    Attributes:
      min_punctuated_lines: share of lines that end in terminal punctuation.
      short_line: characters below which a line is short.
      max_short_lines: share of short lines.
      max_lines_per_word: line ends per word.
      exempt: sources that these rules do not apply to.
    """

    min_punctuated_lines: float | None = 0.12
    short_line: int = 30
    max_short_lines: float | None = 0.67
    max_lines_per_word: float | None = 0.3
    exempt: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RepetitionConfig:
    """Gopher's repetition rules: the greatest allowed shares. None switches a rule off.

    Attributes:
      lines: share of lines that occurred before in the document.
      line_characters: share of characters in such lines.
      paragraphs: share of paragraphs that occurred before.
      paragraph_characters: share of characters in them.
      top_ngrams: share of characters in the most frequent word 2-, 3-, 4-gram.
      top_ngram_count: one that occurs less often than this is not judged: in a text of twenty
        words, a phrase that stands there twice already has a fifth of the characters.
      repeated_ngrams: share of characters in word 5- to 10-grams that occurred before,
        overlaps counted once.
      exempt: sources that these rules do not apply to.
    """

    lines: float | None = 0.3
    line_characters: float | None = 0.2
    paragraphs: float | None = 0.3
    paragraph_characters: float | None = 0.2
    top_ngrams: tuple[float, float, float] | None = (0.20, 0.18, 0.16)
    top_ngram_count: int = 3
    repeated_ngrams: tuple[float, float, float, float, float, float] | None = (
        0.15, 0.14, 0.13, 0.12, 0.11, 0.10,
    )  # fmt: skip
    exempt: tuple[str, ...] = ()


def split_words(text: str) -> list[str]:
    """Words between spaces; each Chinese, Japanese or Korean character is a word of its own.

    >>> split_words("two words, 中文")
    ['two', 'words,', '中', '文']
    """
    return (text if text.isascii() else _CJK.sub(r" \1 ", text)).split()


def length_reason(text: str, words: list[str], config: LengthConfig) -> str | None:
    """The first rule of ``LengthConfig`` that the text breaks, or None."""
    count = len(words)
    if _below(count, config.min_words):
        return f"fewer than {config.min_words} words"
    if _above(count, config.max_words):
        return f"more than {config.max_words} words"
    mean = sum(map(len, words)) / max(1, count)
    if _below(mean, config.min_mean_word) and not _mostly_cjk(text, count):
        return f"mean word shorter than {config.min_mean_word:g} characters"
    if _above(mean, config.max_mean_word):
        return f"mean word longer than {config.max_mean_word:g} characters"
    for name, symbols in (("#", text.count("#")), ("...", text.count("...") + text.count("…"))):
        if _above(symbols / max(1, count), config.max_symbol_ratio):
            return f"more than {config.max_symbol_ratio:g} {name} per word"
    return _line_starts_and_ends(text, config) or _word_kinds(text, words, config)


def _mostly_cjk(text: str, words: int) -> bool:
    """Words of CJK text are one character long by construction: their length says nothing."""
    return not text.isascii() and 2 * len(_CJK.findall(text)) > words


def _line_starts_and_ends(text: str, config: LengthConfig) -> str | None:
    lines = [stripped for line in text.split("\n") if (stripped := line.strip())]
    bullets = sum(line.startswith(_BULLETS) for line in lines) / max(1, len(lines))
    if _above(bullets, config.max_bullet_lines):
        return f"more than {config.max_bullet_lines:g} of the lines are bullets"
    ellipses = sum(line.endswith(("...", "…")) for line in lines) / max(1, len(lines))
    if _above(ellipses, config.max_ellipsis_lines):
        return f"more than {config.max_ellipsis_lines:g} of the lines end with an ellipsis"
    return None


def _word_kinds(text: str, words: list[str], config: LengthConfig) -> str | None:
    if config.min_alphabetic_words is not None:
        alphabetic = sum(word.isalpha() or any(map(str.isalpha, word)) for word in words)
        if alphabetic / max(1, len(words)) < config.min_alphabetic_words:
            return f"fewer than {config.min_alphabetic_words:g} of the words have a letter"
    lowered = text.lower() if config.phrases or config.min_stop_words else ""
    if config.min_stop_words:
        found = len(_STOP_WORDS.intersection(lowered.split()))
        if found < config.min_stop_words:
            return f"fewer than {config.min_stop_words} of the English stop words"
    for phrase in config.phrases:
        if phrase in lowered:
            return f"holds the phrase {phrase!r}"
    return None


def line_reason(text: str, words: list[str], config: LineConfig) -> str | None:
    """The first rule of ``LineConfig`` that the text breaks, or None."""
    lines = [stripped for line in text.split("\n") if (stripped := line.strip())]
    total = max(1, len(lines))
    if _below(sum(line.endswith(_TERMINAL) for line in lines) / total, config.min_punctuated_lines):
        return f"fewer than {config.min_punctuated_lines:g} of the lines end in punctuation"
    short = sum(len(line) < config.short_line for line in lines) / total
    if _above(short, config.max_short_lines):
        return f"more than {config.max_short_lines:g} of the lines are short"
    if _above(text.count("\n") / max(1, len(words)), config.max_lines_per_word):
        return f"more than {config.max_lines_per_word:g} line ends per word"
    return None


def repetition_reason(text: str, words: list[str], config: RepetitionConfig) -> str | None:
    """The first rule of ``RepetitionConfig`` that the text breaks, or None."""
    for name, parts, count_bound, size_bound in (
        ("lines", text.split("\n"), config.lines, config.line_characters),
        ("paragraphs", text.split("\n\n"), config.paragraphs, config.paragraph_characters),
    ):
        parts = [stripped for part in parts if (stripped := part.strip())]
        share, size_share = _repeated_parts(parts)
        if _above(share, count_bound):
            return f"more than {count_bound:g} of the {name} are repeated"
        if _above(size_share, size_bound):
            return f"more than {size_bound:g} of the characters are in repeated {name}"
    return _ngram_reason(words, config)


def _repeated_parts(parts: list[str]) -> tuple[float, float]:
    seen: set[str] = set()
    count = size = 0
    for part in parts:
        if part in seen:
            count, size = count + 1, size + len(part)
        seen.add(part)
    return count / max(1, len(parts)), size / max(1, sum(map(len, parts)))


def _ngram_reason(words: list[str], config: RepetitionConfig) -> str | None:
    ids: dict[str, int] = {}
    tokens = np.array([ids.setdefault(word, len(ids)) for word in words], dtype=np.uint64)
    sizes = np.array([len(word) for word in words], dtype=np.int64)
    total = max(1, int(sizes.sum()))
    keys = tokens
    for n in range(2, 11):
        if len(tokens) < n:
            return None
        # A polynomial in a random odd 64-bit base names an n-gram; ids are exact, so within
        # one document two n-grams meet with a chance of about (words)^2 / 2^64.
        keys = keys[:-1] * np.uint64(0x9E3779B97F4A7C15) + tokens[n - 1 :] + np.uint64(1)
        if n <= 4 and config.top_ngrams is not None:
            bound = config.top_ngrams[n - 2]
            if _top_share(keys, sizes, n, config.top_ngram_count) / total > bound:
                return f"most frequent {n}-gram has more than {bound:g} of the characters"
        if n >= 5 and config.repeated_ngrams is not None:
            covered = _repeated_characters(keys, sizes, n)
            if covered / total > (bound := config.repeated_ngrams[n - 5]):
                return f"repeated {n}-grams have more than {bound:g} of the characters"
            if not covered:  # longer ones repeat only where shorter ones do
                return None
    return None


def _top_share(keys: np.ndarray, sizes: np.ndarray, n: int, least: int) -> int:
    """Characters in the most frequent n-gram, the first of equals; 0 if it is rarer than least."""
    _, first, counts = np.unique(keys, return_index=True, return_counts=True)
    most = int(counts.max())
    if most < max(2, least):
        return 0
    start = int(first[counts == most].min())
    return most * int(sizes[start : start + n].sum())


def _repeated_characters(keys: np.ndarray, sizes: np.ndarray, n: int) -> int:
    """Characters in n-grams that occurred before, each counted once."""
    repeated = np.ones(len(keys), dtype=bool)
    repeated[np.unique(keys, return_index=True)[1]] = False
    starts = np.flatnonzero(repeated)
    change = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.add.at(change, starts, 1)
    np.add.at(change, starts + n, -1)
    return int(sizes[np.cumsum(change[:-1]) > 0].sum())


def _below(value: float, bound: float | None) -> bool:
    return bound is not None and value < bound


def _above(value: float, bound: float | None) -> bool:
    return bound is not None and value > bound
