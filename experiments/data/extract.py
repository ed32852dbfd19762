"""From an unpacked Debian package to (id, text) pairs: one reader per kind of data.

Every reader is a function of the package's root folder, so that a table of sources can name
one with its settings bound. Ids are stable: they depend on the data, not on file order.
"""

from __future__ import annotations

import gzip
import re
import string
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from experiments.data.documents import CorpusError, normalize_text
from experiments.data.markup import html_to_text, osis_to_text, pod_to_text, unwrap_paragraphs

Reader = Callable[[Path], Iterator[tuple[str, str]]]

# Pages that list other pages: no prose.
INDEX_PAGES = re.compile(
    r"(^|/)(genindex|search|py-modindex|modindex|index-all|allclasses|allpackages|doc-index"
    r"|overview-tree|package-tree|package-use|constant-values|deprecated-list|help-doc|print"
    r"|all|sitemap|functions_index|http-routingtable)(-[^/]*)?\.html$"
    r"|(^|/)(class-use|index-files)/"
)


def find_files(root: Path, pattern: str) -> list[Path]:
    """Regular files (no links) under ``root`` that match a glob, sorted by path.

    Raises:
      CorpusError: none match: the package changed its layout.
    """
    files = sorted(p for p in root.rglob(pattern) if p.is_file() and not p.is_symlink())
    if not files:
        raise CorpusError(f"no file matches {pattern!r} in the unpacked package")
    return files


def read_text(path: Path) -> str:
    """A text file, .gz or not."""
    data = path.read_bytes()
    return decode_text(gzip.decompress(data) if path.suffix == ".gz" else data)


def decode_text(data: bytes) -> str:
    """UTF-8 when it is, else Windows-1252, as old manuals are."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace")


def file_tree(
    pattern: str, convert: Callable[[str], str], *, exclude: str = r"$^", min_chars: int = 200
) -> Reader:
    """One document per file below the root; pages shorter than ``min_chars`` are left out.

    ``exclude`` is a regular expression over the path relative to the root.
    """
    skipped = re.compile(exclude)

    def read(root: Path) -> Iterator[tuple[str, str]]:
        for path in find_files(root, pattern):
            name = path.relative_to(root).as_posix()
            if skipped.search(name):
                continue
            text = convert(read_text(path))
            if len(text) >= min_chars:
                yield name, text

    return read


def html_pages(*, exclude: str = "", min_chars: int = 200) -> Reader:
    """Every HTML page except indexes and what ``exclude`` matches."""
    pattern = INDEX_PAGES.pattern + (f"|{exclude}" if exclude else "")
    return file_tree("*.html", html_to_text, exclude=pattern, min_chars=min_chars)


# The mark that Go's tools agreed on; other languages' generators write much the same.
_GENERATED = re.compile(r"^.{0,8}(?:Code )?[Gg]enerated\b.*DO NOT (?:EDIT|MODIFY)", re.MULTILINE)


_FIRST_COMMENT = re.compile(r"\s*(?:/\*.*?\*/|(?:(?://|#)[^\n]*\n)+)", re.DOTALL)


def written_code(text: str) -> str:
    """Source code without the licence above it; nothing of a file that a program wrote."""
    text = normalize_text(text)
    if _GENERATED.search(text[:2000]):
        return ""
    comment = _FIRST_COMMENT.match(text)
    if comment and "copyright" in comment[0].lower():
        text = text[comment.end() :].lstrip("\n")
    return text


def source_files(pattern: str, *, exclude: str = r"$^") -> Reader:
    """Files of source code that people wrote."""
    return file_tree(pattern, written_code, exclude=exclude)


def zipped_source_files(suffix: str) -> Reader:
    """The same out of every ``*.zip`` of a package."""

    def read(root: Path) -> Iterator[tuple[str, str]]:
        for path in find_files(root, "*.zip"):
            with zipfile.ZipFile(path) as archive:
                for name in sorted(archive.namelist()):
                    if not name.endswith(suffix):
                        continue
                    text = written_code(decode_text(archive.read(name)))
                    if len(text) >= 200:
                        yield f"{path.stem}/{name}", text

    return read


def pod_files(root: Path) -> Iterator[tuple[str, str]]:
    """Perl's manual."""
    yield from file_tree("*.pod", pod_to_text)(root)


# --- R data: the novels of the janeaustenr package --------------------------------------------

_CHAPTER = re.compile(r"^\s*chapter\s+([ivxlc]+|\d+)\b", re.IGNORECASE)
_VOLUME = re.compile(r"^\s*volume\s+([ivxlc]+|\d+)\b", re.IGNORECASE)
_R_CHARSXP = 9  # type code of one string in R's serialisation


def r_strings(blob: bytes) -> list[str]:
    """The strings of R's XDR-serialised character vectors, in order.

    A string is a big-endian flag word whose low byte is 9 (CHARSXP), a big-endian length
    (-1 for NA) and the bytes. The scan starts at the vector's header (flags, count) and
    follows lengths from there, so bytes inside a string are never taken for a header.
    """
    strings: list[str] = []
    position = blob.find(b"\0\4\0\x09")  # the first CHARSXP with the UTF-8 or ASCII flag
    while 0 <= position <= len(blob) - 8:
        flags, length = struct.unpack_from(">Ii", blob, position)
        if flags & 0xFF != _R_CHARSXP or length < -1 or position + 8 + length > len(blob):
            break
        strings.append(blob[position + 8 : position + 8 + max(length, 0)].decode("utf-8"))
        position += 8 + max(length, 0)
    return strings


def r_novels(titles: dict[str, str]) -> Reader:
    """Chapters of the novels in an R lazy-load database (``Rdata.rdb``).

    The file is a row of records: a 4-byte big-endian length and a zlib stream. ``titles``
    maps the first line of a novel, in capitals, to the name used in ids.
    """

    def read(root: Path) -> Iterator[tuple[str, str]]:
        blob = find_files(root, "Rdata.rdb")[0].read_bytes()
        position = 0
        while position < len(blob):
            stream = zlib.decompressobj()
            lines = r_strings(stream.decompress(blob[position + 4 :]))
            position = len(blob) - len(stream.unused_data)
            title = lines[0].strip().upper()
            if title not in titles:
                raise CorpusError(f"unknown novel {title!r} in Rdata.rdb, want one of {[*titles]}")
            yield from _chapters(titles[title], lines)

    return read


def _chapters(novel: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    starts = [i for i, line in enumerate(lines) if _CHAPTER.match(line)]
    if not starts:
        raise CorpusError(f"no chapter heading found in {novel}")
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(lines)], strict=True), 1):
        # A volume's heading stands before its first chapter, at the end of the one before.
        body = [line for line in lines[start:end] if not _VOLUME.match(line)]
        yield f"{novel}/{number:02d}", unwrap_paragraphs(normalize_text("\n".join(body)))


# --- dictd databases ----------------------------------------------------------------------------

_DICT_DIGITS = {
    c: i
    for i, c in enumerate(string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/")
}
_CROSS_REFERENCE = re.compile(r"\{([^{}]*)\}")


def _dict_number(digits: str) -> int:
    value = 0
    for digit in digits:
        value = value * 64 + _DICT_DIGITS[digit]
    return value


def dictd_entries(*, drop: str = r"$^", min_chars: int = 20) -> Reader:
    """Entries of a ``.index`` / ``.dict.dz`` pair (RFC 2229 servers), one document each.

    The index gives headword, offset and length, the numbers in base 64. Several headwords may
    point at one entry: it is read once. Braces around cross-references and what the regular
    expression ``drop`` matches are left out.
    """
    dropped = re.compile(drop)

    def read(root: Path) -> Iterator[tuple[str, str]]:
        index = find_files(root, "*.index")[0]
        blob = gzip.decompress(index.with_suffix(".dict.dz").read_bytes())
        spans: dict[tuple[int, int], str] = {}
        for row in index.read_text(encoding="utf-8").splitlines():
            word, offset, length = row.split("\t")[:3]
            if not word.startswith(("00database", "00-")):  # the database about itself
                spans.setdefault((_dict_number(offset), _dict_number(length)), word)
        for (offset, length), word in sorted(spans.items()):
            text = blob[offset : offset + length].decode("utf-8", errors="replace")
            for _ in range(2):  # some references stand in two pairs of braces
                text = _CROSS_REFERENCE.sub(r"\1", text)
            text = _dedent(dropped.sub("", text))
            if len(text) >= min_chars:
                yield f"{word}@{offset}", text

    return read


def _dedent(text: str) -> str:
    """Takes away the common indent of all lines but the headword's."""
    head, _, body = normalize_text(text).partition("\n")
    indents = [len(line) - len(line.lstrip()) for line in body.splitlines() if line.strip()]
    shift = min(indents, default=0)
    return normalize_text("\n".join([head, *(line[shift:] for line in body.splitlines())]))


# --- WordNet --------------------------------------------------------------------------------------

_SYNSETS_PER_DOCUMENT = 64


def wordnet_glosses(root: Path) -> Iterator[tuple[str, str]]:
    """``word, word: gloss`` lines of data.{noun,verb,adj,adv}, 64 synsets a document.

    A line of the data files is ``offset file type count(hex) word id word id ... | gloss``.
    """
    for path in find_files(root, "data.*"):
        if path.suffix.lstrip(".") not in {"noun", "verb", "adj", "adv"}:
            continue
        rows = [r for r in path.read_text("utf-8").splitlines() if r[:1].isdigit() and " | " in r]
        lines = [_synset_line(row) for row in rows]
        for start in range(0, len(lines), _SYNSETS_PER_DOCUMENT):
            chunk = lines[start : start + _SYNSETS_PER_DOCUMENT]
            yield f"{path.name}/{start:06d}", normalize_text("\n".join(chunk))


def _synset_line(row: str) -> str:
    data, gloss = row.split(" | ", 1)
    fields = data.split(" ")
    words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
    names = (re.sub(r"\((?:a|p|ip)\)$", "", word).replace("_", " ") for word in words)
    return f"{', '.join(names)}: {gloss.strip()}"


# --- SWORD modules --------------------------------------------------------------------------------

_SWORD_CHAPTER = re.compile(r'(<chapter\b[^>]*\bosisID="([^"]+)"[^>]*/?>)')


def sword_chapters(*, min_chars: int = 200) -> Reader:
    """Chapters of a compressed SWORD Bible or commentary (zText, zCom).

    ``*.?zs`` lists blocks as (offset, size, unpacked size), little-endian uint32, into the
    ``*.?zz`` file of zlib streams of OSIS XML.
    """

    def read(root: Path) -> Iterator[tuple[str, str]]:
        # Old Testament first, as printed.
        for table in sorted(find_files(root, "*.[bc]zs"), key=lambda p: p.name, reverse=True):
            xml = "".join(_sword_blocks(table))
            pieces = _SWORD_CHAPTER.split(xml)
            for index in range(1, len(pieces), 3):
                text = osis_to_text(pieces[index + 2])
                if len(text) >= min_chars:
                    yield pieces[index + 1], text

    return read


def _sword_blocks(table: Path) -> Iterator[str]:
    rows = table.read_bytes()
    data = table.with_suffix(table.suffix[:-1] + "z").read_bytes()
    for offset, size, _ in struct.iter_unpack("<III", rows[: len(rows) // 12 * 12]):
        if size:
            yield zlib.decompress(data[offset : offset + size]).decode("utf-8", errors="replace")


# --- fortune files --------------------------------------------------------------------------------


def fortunes(root: Path) -> Iterator[tuple[str, str]]:
    """Sayings in files that separate them by lines of ``%``; compiled .dat and links skipped."""
    for path in find_files(root, "games/fortunes/*"):
        if path.suffix in {".dat", ".u8"}:
            continue
        for number, text in enumerate(re.split(r"^%\n", read_text(path), flags=re.MULTILINE)):
            if len(text) >= 40:
                yield f"{path.name}/{number}", normalize_text(text.expandtabs())
