r"""Documents as sets of shingles: hashed n-grams of words or of characters.

Text is compared after NFC, without case, and with white space as nothing but a separator, so
that LF and CRLF, composed and decomposed accents, and another layout give the same shingles.

``word``  Maximal runs of letters, marks and numbers. Scripts that are written without spaces
          (Han, kana, Thai, Lao, Khmer, Burmese) and symbols such as emoji give one word per
          character: otherwise a Chinese page would be one word. Punctuation separates. Variation
          selectors, skin tones, joiners and other characters without width do not count.
``char``  Code points, each run of white space counted as one space.

A document with fewer than `size` units is one shingle: all that it has. A document of
punctuation alone, without units, is one shingle too, its text; an empty one has none.
"""

from __future__ import annotations

import functools
import hashlib
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int64, UInt8, UInt64

from experiments.data.hashing import mix, window_hashes

Unit = Literal["word", "char"]
UNITS: tuple[Unit, ...] = ("word", "char")

# Code points hashed at once: the temporary arrays of a block stay in the second-level cache.
BLOCK = 1 << 17
# A longer document is hashed in pieces of this many code points, cut at white space if there is
# some: it bounds memory, and only a "word" of a million characters can tell.
PIECE = 1 << 20

_SEPARATOR, _LETTER, _SINGLE, _IGNORED, _SPACE = range(5)
# Written without spaces between words: Thai, Lao, Burmese, Khmer, kana, Han and its extensions.
_UNSPACED = (
    (0x0E00, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x3040, 0x30FF),
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)
# Planes that hold characters; between and after them nothing is assigned but private use.
_ASSIGNED = ((0, 0x40000), (0xE0000, 0xE1000))
# Another look of the character before: variation selectors and skin tones.
_VARIANTS = ((0xFE00, 0xFE0F), (0x1F3FB, 0x1F3FF), (0xE0100, 0xE01EF))


@functools.cache
def _classes() -> UInt8[np.ndarray, " 1114112"]:
    """What each code point does to words; a tenth of a second, once."""
    by_category = dict.fromkeys(("Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me"), _LETTER)
    by_category |= dict.fromkeys(("Nd", "Nl", "No"), _LETTER)
    by_category |= {"So": _SINGLE, "Cf": _IGNORED}
    category = unicodedata.category
    table = np.full(0x110000, _SEPARATOR, np.uint8)
    for first, last in _ASSIGNED:
        classes = [by_category.get(category(chr(c)), _SEPARATOR) for c in range(first, last)]
        table[first:last] = classes
    for first, last in _UNSPACED:
        part = table[first : last + 1]
        part[part == _LETTER] = _SINGLE
    for first, last in _VARIANTS:
        table[first : last + 1] = _IGNORED
    # What str.split counts as white space.
    spaces = [code for code in range(0x3001) if chr(code).isspace()]
    table[spaces] = _SPACE
    return table


@functools.cache
def _code_hashes() -> UInt64[np.ndarray, " 1114112"]:
    """A hash of each code point, the same for its cases; made once.

    Only foldings to one code point count: the few others compare as they are.
    """
    codes = np.arange(0x110000, dtype=np.uint64)
    folded = [chr(code).casefold() for code in range(0x20000)]  # no case beyond
    codes[: len(folded)] = [ord(f) if len(f) == 1 else c for c, f in enumerate(folded)]
    return mix(codes)


@functools.cache
def _powers(count: int, base: int) -> UInt64[np.ndarray, " count"]:
    """base^0, base^1, ... modulo 2^64."""
    return np.concatenate(
        ([np.uint64(1)], np.cumprod(np.full(count - 1, base, np.uint64), dtype=np.uint64))
    )


_BASE = 0xE7037ED1A0B428DB
_INVERSE = pow(_BASE, -1, 1 << 64)


class ShingleSets:
    """Shingles of some documents, one after the other.

    Attributes:
      hashes: 64-bit hashes, document by document, in the order of the text, repeats included.
      offsets: document d has hashes[offsets[d] : offsets[d + 1]].
    """

    def __init__(
        self, hashes: UInt64[np.ndarray, " n"], offsets: Int64[np.ndarray, " d_plus_1"]
    ) -> None:
        self.hashes = hashes
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def unique(self, document: int) -> UInt64[np.ndarray, " m"]:
        """The set of a document: sorted, without repeats."""
        return np.unique(self.hashes[self.offsets[document] : self.offsets[document + 1]])


def shingle_sets(texts: Sequence[str], *, unit: Unit, size: int) -> ShingleSets:
    r"""Hashed n-grams of each text.

    Args:
      texts: any strings; lone surrogates count as characters without class.
      unit: ``word`` or ``char``.
      size: units per shingle.

    >>> sets = shingle_sets(["One  two, THREE four", "one two three\r\nfour"], unit="word", size=3)
    >>> bool(np.array_equal(sets.unique(0), sets.unique(1))), len(sets.unique(0))
    (True, 2)
    """
    texts = [text if text.isascii() else unicodedata.normalize("NFC", text) for text in texts]
    hashes, counts = [], []
    for block in _blocks(texts):
        units, sizes = _units(block, unit)
        hashes.append(units)
        counts.append(sizes)
    return _windows(np.concatenate(hashes or [np.empty(0, np.uint64)]), counts, texts, size)


def _blocks(texts: Sequence[str]) -> Iterator[list[list[str]]]:
    """Groups of documents, each a list of pieces, of about `BLOCK` characters."""
    block, length = [], 0
    for text in texts:
        block.append([text] if len(text) <= PIECE else list(_pieces(text)))
        length += len(text)
        if length >= BLOCK:
            yield block
            block, length = [], 0
    if block:
        yield block


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = start + PIECE
        if end < len(text):
            space = max(text.rfind(" ", start, end), text.rfind("\n", start, end))
            end = space if space > start else end
        yield text[start:end]
        start = end


def _units(
    block: list[list[str]], unit: Unit
) -> tuple[UInt64[np.ndarray, " n"], Int64[np.ndarray, " d"]]:
    """Hashes of the units of a block's documents, and how many each document has."""
    of_piece = _word_hashes if unit == "word" else _char_hashes
    # Pieces of a long document are hashed one by one, all others together.
    if len(block) == 1 and len(block[0]) > 1:
        parts = [of_piece([piece])[0] for piece in block[0]]
        return np.concatenate(parts), np.array([sum(map(len, parts))])
    if any(len(pieces) > 1 for pieces in block):
        parts = [_units([pieces], unit) for pieces in block]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    return of_piece([pieces[0] for pieces in block])


def _codes(texts: list[str]) -> Int64[np.ndarray, " n"]:
    """Code points of texts, a NUL after each: it separates words.

    As indices: numpy looks tables up twice as fast with its own index type.
    """
    joined = "\0".join(texts) + "\0"
    if joined.isascii():
        return np.frombuffer(joined.encode(), np.uint8).astype(np.intp)
    return np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.intp)


def _ends(texts: list[str], kept: np.ndarray | None) -> Int64[np.ndarray, " d"]:
    """Index of the NUL after each text, after dropping what is not `kept`."""
    ends = np.cumsum([len(text) + 1 for text in texts]) - 1
    return ends if kept is None else np.cumsum(kept)[ends] - 1


def _word_hashes(
    texts: list[str],
) -> tuple[UInt64[np.ndarray, " n"], Int64[np.ndarray, " d"]]:
    codes = _codes(texts)
    classes = np.take(_classes(), codes)
    kept = None
    if (classes == _IGNORED).any():
        kept = classes != _IGNORED
        codes, classes = codes[kept], classes[kept]
    letter = classes == _LETTER
    before = np.concatenate(([False], letter[:-1]))
    single = classes == _SINGLE
    starts = np.flatnonzero((letter & ~before) | single)
    # A word ends where a character that does not continue it stands.
    after = np.concatenate((letter[1:], [False]))
    ends = np.flatnonzero((letter & ~after) | single) + 1
    sums = np.take(_code_hashes(), codes)
    sums *= _powers(_power_count(len(codes)), _BASE)[: len(codes)]
    sums = np.concatenate(([np.uint64(0)], np.cumsum(sums, dtype=np.uint64)))
    words = sums[ends] - sums[starts]
    words *= _powers(_power_count(len(codes)), _INVERSE)[starts]
    limits = np.searchsorted(starts, _ends(texts, kept))
    return mix(words), np.diff(limits, prepend=0)


def _power_count(length: int) -> int:
    return max(1 << 18, 1 << (length - 1).bit_length())


def _char_hashes(
    texts: list[str],
) -> tuple[UInt64[np.ndarray, " n"], Int64[np.ndarray, " d"]]:
    codes = _codes([" ".join(text.split()) for text in texts])
    ends = np.flatnonzero(codes == 0)
    if len(ends) != len(texts):  # NUL in a text
        return _char_hashes([text.replace("\0", " ") for text in texts])
    hashes = np.take(_code_hashes(), np.delete(codes, ends))
    return hashes, np.diff(ends, prepend=-1) - 1


def _windows(
    units: UInt64[np.ndarray, " n"],
    counts: list[Int64[np.ndarray, " d"]],
    texts: Sequence[str],
    size: int,
) -> ShingleSets:
    """Shingles of documents from their units."""
    sizes = np.concatenate(counts) if counts else np.zeros(0, np.int64)
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    windows = mix(window_hashes(units, size), seed=size)
    # A document with fewer units than a shingle is one shingle, one without units but with
    # text is one as well: room for each is where its first unit would stand.
    short = sizes < size
    text = np.array([bool(t) and not t.isspace() for t in texts], bool)
    made = np.where(short, text.astype(np.int64), sizes - size + 1)
    out_offsets = np.concatenate(([0], np.cumsum(made)))
    out = np.empty(out_offsets[-1], np.uint64)
    long = np.flatnonzero(~short)
    # Document d's shingles are windows[offsets[d] + i] for i < made[d].
    spread = np.repeat(~short, made)
    shift = np.repeat(offsets[long] - out_offsets[long], made[long])
    out[spread] = windows[np.flatnonzero(spread) + shift]
    some = np.flatnonzero(short & text)
    out[out_offsets[some]] = _short_hashes(units, offsets, sizes, texts, some)
    return ShingleSets(out, out_offsets)


def _short_hashes(
    units: UInt64[np.ndarray, " n"],
    offsets: Int64[np.ndarray, " d_plus_1"],
    sizes: Int64[np.ndarray, " d"],
    texts: Sequence[str],
    documents: Int64[np.ndarray, " s"],
) -> UInt64[np.ndarray, " s"]:
    """One hash for each document that is shorter than a shingle."""
    total = np.zeros(len(documents), np.uint64)
    longest = int(sizes[documents].max(initial=0))
    for position in range(longest):
        has = sizes[documents] > position
        total[has] *= np.uint64(_BASE)
        total[has] += units[offsets[documents[has]] + position]
    hashes = mix(total + sizes[documents].astype(np.uint64), seed=1)
    for index in np.flatnonzero(sizes[documents] == 0):
        plain = " ".join(texts[int(documents[index])].split()).encode(errors="surrogatepass")
        hashes[index] = int.from_bytes(hashlib.blake2b(plain, digest_size=8).digest())
    return hashes
