r"""Files to records: JSONL, Parquet, plain text and source trees, also ``.gz`` and ``.zst``.

A file that breaks off gives what came before the break. Whatever cannot be read is counted in
the tally by a named reason with the file and row; nothing else is lost. Ids are
``source/path:row`` and so unique, and stay the same when other files are added.

Text is made valid here, before any stage sees it: invalid UTF-8 and lone surrogates become
U+FFFD, NUL characters go, line ends become ``\n``; each is counted.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from experiments.data.documents import normalize_text, replace_surrogates
from experiments.data.pipeline.records import Record, Tally
from experiments.data.pipeline.streams import DamagedFileError, blocks, lines

Format = Literal["auto", "jsonl", "parquet", "text", "code"]
SUFFIXES = {
    "jsonl": {".jsonl", ".ndjson"},
    "parquet": {".parquet", ".pq"},
    "text": {".txt", ".text", ".md", ".rst", ".html", ".htm", ".tex"},
    "code": {
        ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".go", ".java", ".js", ".ts", ".jl", ".lean",
        ".py", ".pyi", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".kt", ".hs", ".ml",
    },
}  # fmt: skip
COMPRESSED = {".gz", ".zst", ".zstd"}
PARQUET_ROWS = 512  # rows decoded at once


@dataclasses.dataclass(frozen=True)
class ReadConfig:
    """How files become documents.

    Attributes:
      max_document_mb: longer JSONL rows and Parquet values (10^6 bytes) are dropped; longer
        text files are cut into parts of at most this, at a line end where there is one.
      shard_mb: text per shard, in 10^6 bytes: the unit of parallel work and of restart.
    """

    max_document_mb: float = 16.0
    shard_mb: float = 16.0

    def __post_init__(self) -> None:
        for name in ("max_document_mb", "shard_mb"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    @property
    def max_document_bytes(self) -> int:
        return int(self.max_document_mb * 1e6)


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """Where the text of one source lies.

    Attributes:
      name: of the source; mixing weights and exemptions refer to it.
      paths: files, folders (walked), or glob patterns, relative to the configuration's file.
      format: ``auto`` goes by suffix (``.jsonl``, ``.parquet``, text, code; before ``.gz``
        or ``.zst``); another one takes every file below ``paths`` for it.
      text_field: the column that holds the text, in JSONL and Parquet.
      group: what recipes of a mixture give shares to; by default the name.
    """

    name: str
    paths: tuple[str, ...]
    format: Format = "auto"
    text_field: str = "text"
    group: str | None = None

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ValueError(f"source name must be non-empty and without '/', got {self.name!r}")
        if not self.paths:
            raise ValueError(f"source {self.name!r}: paths must name at least one file or folder")


@dataclasses.dataclass(frozen=True)
class InputFile:
    """One file to read. ``name`` is its place relative to the root, for ids and messages."""

    source: str
    path: Path
    name: str
    format: str
    text_field: str
    size: int


def find_files(source: SourceConfig, root: Path, tally: Tally) -> list[InputFile]:
    """The files of a source, sorted by name, each once.

    Hidden files and folders are passed over. A folder that is called like a data file, and
    (under ``auto``) a file of an unknown kind, are counted as faults.

    Raises:
      ValueError: a path that does not exist, or a source without any file.
    """
    found: dict[Path, InputFile] = {}
    for pattern in source.paths:
        for path in _expand(source, pattern, root):
            name = _name(path, root)
            kind = source.format if source.format != "auto" else format_of(path)
            if path.is_dir():
                tally.fault("a directory in place of a file", name)
            elif kind is None:
                tally.fault("file of unknown kind", name, "name a format for the source")
            else:
                size = path.stat().st_size
                found[path] = InputFile(source.name, path, name, kind, source.text_field, size)
    if not found:
        raise ValueError(f"source {source.name!r}: no readable file in {', '.join(source.paths)}")
    return sorted(found.values(), key=lambda file: file.name)


def _expand(source: SourceConfig, pattern: str, root: Path) -> list[Path]:
    path = root / pattern
    if path.is_dir() and format_of(path) is None:
        inside = (file for file in path.rglob("*") if not _hidden(file.relative_to(path)))
        return [file for file in inside if file.is_file() or _looks_like_a_file(file)]
    if path.exists():
        return [path]
    matches = sorted(root.glob(pattern)) if not Path(pattern).is_absolute() else []
    if not matches:
        raise ValueError(f"source {source.name!r}: {path} does not exist")
    return matches


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _looks_like_a_file(path: Path) -> bool:
    # Source trees do have folders called "foo.c" or "vue.js"; what is in them is read anyway.
    return path.is_dir() and format_of(path) in ("jsonl", "parquet")


def _name(path: Path, root: Path) -> str:
    # With ".." where need be: ids must not depend on where on the disk the project lies.
    return Path(os.path.relpath(path, root)).as_posix()


def format_of(path: Path) -> str | None:
    """The format that a file's suffix stands for, or None."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    return next((kind for kind, known in SUFFIXES.items() if last in known), None)


def read_file(file: InputFile, config: ReadConfig, tally: Tally) -> Iterator[Record]:
    """The documents of one file, made valid; faults go into the tally, none is raised."""
    reader = {"jsonl": _read_jsonl, "parquet": _read_parquet}.get(file.format, _read_text)
    try:
        for row, text in reader(file, config, tally):
            record = Record(f"{file.source}/{file.name}:{row}", file.source, text)
            if not text.strip():
                tally.drop("empty document", record)
            else:
                yield record
    except DamagedFileError as error:
        tally.fault("file cut short or damaged", file.name, str(error))
    except OSError as error:
        tally.fault("file cannot be opened", file.name, error.strerror or str(error))


def _valid(data: bytes | str, where: str, tally: Tally) -> str:
    if isinstance(data, bytes):
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            text = data.decode("utf-8", errors="replace")
            tally.change("documents with invalid UTF-8 (replaced by U+FFFD)")
            tally.sample("invalid UTF-8", where, text[max(0, error.start - 40) :], str(error))
    else:
        text = data
    text, surrogates = replace_surrogates(text)
    tally.change("lone surrogates replaced by U+FFFD", surrogates)
    tally.change("NUL characters removed", text.count("\0"))
    return normalize_text(text)


def _read_jsonl(file: InputFile, config: ReadConfig, tally: Tally) -> Iterator[tuple[int, str]]:
    for line in lines(blocks(file.path), limit=config.max_document_bytes):
        where = f"{file.name}:{line.number}"
        if line.data is None:
            reason = f"longer than max_document_mb = {config.max_document_mb:g}"
            tally.fault(reason, where, f"{line.size} bytes")
            continue
        if not line.data.strip():
            continue
        # A last line without newline is whole in many files; if it was cut it is not JSON.
        text = _json_text(line.data, file.text_field, where, tally)
        if text is not None:
            yield line.number, text


def _json_text(data: bytes, field: str, where: str, tally: Tally) -> str | None:
    try:
        decoded = data.decode("utf-8")
    except UnicodeDecodeError:
        decoded = data.decode("utf-8", errors="replace")
        tally.change("documents with invalid UTF-8 (replaced by U+FFFD)")
        tally.sample("invalid UTF-8", where, decoded)
    try:
        row = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        tally.fault("row is not JSON", where, f"{error}; starts {decoded[:60]!r}")
        return None
    value = row.get(field) if isinstance(row, dict) else None
    if not isinstance(value, str):
        got = sorted(row)[:8] if isinstance(row, dict) else type(row).__name__
        tally.fault(f"row without a text in {field!r}", where, f"has {got}")
        return None
    return _valid(value, where, tally)


def _read_parquet(file: InputFile, config: ReadConfig, tally: Tally) -> Iterator[tuple[int, str]]:
    import pyarrow  # heavy, and only this format needs it
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file.path) as table:
            if file.text_field not in table.schema_arrow.names:
                detail = f"has {table.schema_arrow.names[:8]}"
                tally.fault(f"no column {file.text_field!r}", file.name, detail)
                return
            row = 0
            for batch in table.iter_batches(PARQUET_ROWS, columns=[file.text_field]):
                yield from _column(batch.column(0), row, file, config, tally)
                row += len(batch)
    except pyarrow.ArrowException as error:
        raise DamagedFileError(f"broken Parquet: {error}") from error


def _column(
    column: Any, first: int, file: InputFile, config: ReadConfig, tally: Tally
) -> Iterator[tuple[int, str]]:
    import pyarrow

    kind = column.type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        tally.fault(f"column {file.text_field!r} is no string", file.name, str(kind))
        return
    # As bytes: Arrow does not check UTF-8 on reading, and to_pylist would raise for all rows.
    for row, value in enumerate(column.cast(pyarrow.large_binary()).to_pylist(), start=first):
        where = f"{file.name}:{row}"
        if value is None:
            tally.fault(f"row without a text in {file.text_field!r}", where, "null")
        elif len(value) > config.max_document_bytes:
            reason = f"longer than max_document_mb = {config.max_document_mb:g}"
            tally.fault(reason, where, f"{len(value)} bytes")
        else:
            yield row, _valid(value, where, tally)


def _read_text(file: InputFile, config: ReadConfig, tally: Tally) -> Iterator[tuple[int, str]]:
    """A whole file as one document, or as parts when it is long; binary files are faults."""
    limit = config.max_document_bytes
    held = bytearray()
    part = 0
    damage = None
    try:
        for block in blocks(file.path):
            if file.format == "code" and part == 0 and not held and b"\0" in block[:8192]:
                tally.fault("binary file in a source tree", file.name)
                return
            held += block
            while len(held) > limit:
                cut = _cut(held, limit)
                yield part, _valid(bytes(held[:cut]), f"{file.name}:{part}", tally)
                del held[:cut]
                part += 1
    except DamagedFileError as error:
        damage = error
    if part:
        tally.change("parts of text files longer than max_document_mb", part + 1)
    yield part, _valid(bytes(held), f"{file.name}:{part}", tally)
    if damage is not None:
        raise damage


def _cut(data: bytearray, limit: int) -> int:
    """Where to cut: after the last newline of the second half, else between characters."""
    newline = data.rfind(b"\n", limit // 2, limit)
    if newline >= 0:
        return newline + 1
    cut = limit
    while cut > max(1, limit - 3) and data[cut] & 0xC0 == 0x80:  # inside a UTF-8 sequence
        cut -= 1
    return cut
