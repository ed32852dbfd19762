"""Documents and how they lie on disk: zstd-compressed JSON lines with checksums.

A *document* is the unit that the held-out split, packing and later stages (deduplication,
filters, mixing) agree on: a chapter, a dictionary entry, one page of a manual. A *shard* is
a file of documents, one JSON object ``{"id", "source", "text"}`` a line, compressed with
zstd. A *manifest* is a JSON file beside the shards that says what each holds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import zstandard

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = 1

_SURROGATE = re.compile("[\ud800-\udfff]")
# C0 controls except tab and newline, and DEL: no text format means anything by them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f]")
_BLANK_LINES = re.compile(r"\n{3,}")
_TRAILING_SPACE = re.compile(r"[ \t]+$", re.MULTILINE)


class CorpusError(RuntimeError):
    """A corpus, shard or manifest that cannot be used; the message names the file and the fix."""


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """One text with a name.

    Attributes:
      id: unique within a corpus; the held-out split is a hash of it.
      source: the name of the source in the manifest.
      text: Unicode without lone surrogates.
    """

    id: str
    source: str
    text: str


def replace_surrogates(text: str) -> tuple[str, int]:
    r"""Replaces lone surrogates, which UTF-8 cannot hold, by U+FFFD.

    Returns:
      The text and how many code points were replaced.

    >>> replace_surrogates("a\ud800b") == ("a\ufffdb", 1)
    True
    """
    return _SURROGATE.subn("\ufffd", text)


def normalize_text(text: str) -> str:
    r"""LF line ends, no control characters, no trailing spaces, at most one blank line.

    >>> normalize_text("one \r\n\r\n\r\n\r\ntwo\x00\n")
    'one\n\ntwo'
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\x0c", "\n").replace("\xa0", " ")
    text = _CONTROL.sub("", replace_surrogates(text)[0])
    return _BLANK_LINES.sub("\n\n", _TRAILING_SPACE.sub("", text)).strip("\n")


class TextDigest:
    """SHA-256 of a sequence of documents: UTF-8 id and text, each closed by a NUL byte.

    The NUL keeps document limits in the digest, so that moving a line from one document to
    the next changes it. ``normalize_text`` keeps NUL out of the texts themselves.
    """

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self.documents = 0
        self.bytes = 0

    def update(self, document: Document) -> None:
        data = document.text.encode()
        self._sha.update(document.id.encode() + b"\0" + data + b"\0")
        self.documents += 1
        self.bytes += len(data)

    def hexdigest(self) -> str:
        return self._sha.hexdigest()


def write_shard(path: Path, documents: Iterable[Document], *, level: int = 10) -> TextDigest:
    """Writes documents as zstd JSON lines: to a temporary name first, then renamed.

    Returns:
      The digest and counts of what was written.
    """
    digest = TextDigest()
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as raw:
            packer = zstandard.ZstdCompressor(level=level, write_checksum=True)
            with packer.stream_writer(raw, closefd=False) as out:
                for document in documents:
                    digest.update(document)
                    line = json.dumps(dataclasses.asdict(document), ensure_ascii=False)
                    out.write(line.encode() + b"\n")
            raw.flush()
            os.fsync(raw.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return digest


def read_shard(path: Path) -> Iterator[Document]:
    """Yields the documents of one shard, in order.

    Raises:
      CorpusError: the file is missing, is not zstd JSON lines, or ends in the middle.
    """
    for row in read_shard_rows(path):
        yield Document(id=row["id"], source=row["source"], text=row["text"])


def read_shard_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a shard: id, source, text, and what else a writer put there."""
    rest = b""
    number = 0
    for block in _decompressed(path):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            number += 1
            yield _parse_row(line, where=f"{path}: line {number}")
    if rest:
        raise CorpusError(
            f"{path}: ends inside line {number + 1}: delete it and build the corpus again"
        )


def _decompressed(path: Path) -> Iterator[bytes]:
    """Blocks of a file of zstd frames; a frame that does not end is an error, not the end."""
    frame = None
    frames = 0
    try:
        with path.open("rb") as raw:
            for chunk in iter(lambda: raw.read(1 << 17), b""):
                while chunk:
                    if frame is None:
                        frame = zstandard.ZstdDecompressor().decompressobj()
                        frames += 1
                    yield frame.decompress(chunk)
                    chunk, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except FileNotFoundError:
        raise CorpusError(f"{path}: no such shard: build the corpus again") from None
    except zstandard.ZstdError as error:
        raise CorpusError(f"{path}: not a zstd JSON-lines shard ({error})") from error
    if frame is not None or not frames:
        raise CorpusError(f"{path}: cut short: delete it and build the corpus again")


def _parse_row(line: bytes, *, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if missing := {"id", "source", "text"} - row.keys():
            raise KeyError(*sorted(missing))
        return row
    except (ValueError, KeyError, AttributeError) as error:
        raise CorpusError(
            f"{where}: want a JSON object with id, source and text, got {line[:60]!r} ({error!r})"
        ) from None


def write_json(path: Path, value: Any) -> None:
    """Writes JSON to a temporary name, then renames it: readers never see half a file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a corpus directory.

    Raises:
      CorpusError: there is none, or it is of another format.
    """
    path = directory / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorpusError(
            f"{directory}: no {MANIFEST_NAME}, so this is no corpus; "
            "make one with `make corpus`, or use corpus='sample'"
        ) from None
    except ValueError as error:
        raise CorpusError(f"{path}: not JSON ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != MANIFEST_FORMAT:
        raise CorpusError(f"{path}: want manifest format {MANIFEST_FORMAT}: build the corpus again")
    return manifest


def read_corpus(directory: Path) -> Iterator[Document]:
    """Yields every document of a corpus, source by source, in the manifest's order.

    The text of each source is checked against the manifest when its end is reached.

    Raises:
      CorpusError: a shard is missing, damaged, or differs from its checksum.
    """
    for entry in read_manifest(directory)["sources"]:
        digest = TextDigest()
        path = directory / entry["file"]
        for document in read_shard(path):
            digest.update(document)
            yield document
        if digest.hexdigest() != entry["sha256"]:
            raise CorpusError(
                f"{path}: text has sha256 {digest.hexdigest()[:12]}, manifest says "
                f"{entry['sha256'][:12]}: the shard was changed or damaged: delete it and build "
                "the corpus again"
            )


def manifest_digest(manifest: dict[str, Any]) -> str:
    """SHA-256 over the checksums of the sources: names the text of a whole corpus."""
    pairs = [(entry["name"], entry["sha256"]) for entry in manifest["sources"]]
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
