"""Bytes of plain, ``.gz`` and ``.zst`` files in blocks; damage is named."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard

CHUNK = 1 << 18


class DamagedFileError(Exception):
    """A compressed file that breaks off or is none; what came before it is good."""


def blocks(path: Path) -> Iterator[bytes]:
    """The decompressed bytes of a file, by its last suffix, in blocks of a few hundred kB.

    Raises:
      DamagedFileError: after the last good block, when the compression is broken or cut short.
      OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        chunks = iter(lambda: file.read(CHUNK), b"")
        if path.suffix == ".gz":
            yield from _decompress(chunks, lambda: zlib.decompressobj(wbits=31), "gzip")
        elif path.suffix in {".zst", ".zstd"}:
            yield from _decompress(
                chunks, lambda: zstandard.ZstdDecompressor().decompressobj(), "zstd"
            )
        else:
            yield from chunks


def _decompress(chunks: Iterator[bytes], make: Any, kind: str) -> Iterator[bytes]:
    """Both formats allow several frames (members) one after the other in a file."""
    frame = None
    try:
        for chunk in chunks:
            while chunk:
                frame = frame or make()
                if block := frame.decompress(chunk):
                    yield block
                chunk, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except (zlib.error, zstandard.ZstdError) as error:
        raise DamagedFileError(f"broken {kind}: {error}") from error
    if frame is not None:
        raise DamagedFileError(f"{kind} cut short")


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One line without its end. ``data`` is None when it was longer than the limit."""

    number: int
    data: bytes | None
    size: int
    ended: bool


def lines(source: Iterator[bytes], *, limit: int) -> Iterator[Line]:
    """Lines of a stream of blocks; one longer than ``limit`` bytes is skipped, not held.

    ``ended`` is False for a last line without a newline. An exception of ``source`` comes
    through after the unfinished line was yielded.
    """
    number, held, size = 1, [], 0
    try:
        for block in source:
            parts = block.split(b"\n")
            for index, part in enumerate(parts):
                size += len(part)
                if size <= limit:
                    held.append(part)
                else:
                    held.clear()
                if index < len(parts) - 1:
                    yield Line(number, b"".join(held) if size <= limit else None, size, True)
                    number, held, size = number + 1, [], 0
    except DamagedFileError:
        if size:
            yield Line(number, b"".join(held) if size <= limit else None, size, False)
        raise
    if size:
        yield Line(number, b"".join(held) if size <= limit else None, size, False)
