"""Builds the sample corpus that lives in the repository, from the packages it came from.

Only public-domain text, about 4 MB from five sources of different style, so that one clone
can train, compare sources and hold text out with no network at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments.data.documents import (
    MANIFEST_FORMAT,
    MANIFEST_NAME,
    Document,
    write_json,
    write_shard,
)
from experiments.data.sources import SOURCES

SAMPLE_LEVEL = 22  # the smallest files zstd can make: they are cloned far more than they are made


@dataclasses.dataclass(frozen=True)
class Slice:
    """Part of a source: the documents whose local id ``keep`` accepts."""

    source: str
    title: str
    keep: Callable[[str], bool]


def _novel_is(*names: str) -> Callable[[str], bool]:
    return lambda local_id: local_id.split("/")[0] in names


def _book_is(*names: str) -> Callable[[str], bool]:
    return lambda local_id: local_id.split(".")[0] in names


def _share(fraction: float) -> Callable[[str], bool]:
    """Entries picked by hash, so that they come from the whole alphabet."""
    limit = fraction * 256
    return lambda local_id: hashlib.sha256(local_id.encode()).digest()[0] < limit


SLICES = (
    Slice(
        "austen",
        "Jane Austen: Emma, Persuasion, Pride and Prejudice",
        _novel_is("emma", "persuasion", "pride-and-prejudice"),
    ),
    Slice(
        "bible-kjv",
        "The Bible, King James Version: Genesis to Deuteronomy, Psalms",
        _book_is("Gen", "Exod", "Lev", "Num", "Deut", "Ps"),
    ),
    Slice(
        "spurgeon",
        "C. H. Spurgeon, The Treasury of David: Psalms 1-5",
        lambda local_id: local_id in {f"Ps.{number}" for number in range(1, 6)},
    ),
    Slice("devils-dictionary", "Ambrose Bierce, The Devil's Dictionary", lambda _: True),
    Slice("jargon-file", "The Jargon File, three entries in eight", _share(0.375)),
)


def build_sample(
    out: Path, *, fetch: Callable[[tuple[str, ...]], tuple[str, str, Path]]
) -> dict[str, Any]:
    """Writes the sample's shards and manifest into ``out``.

    Args:
      out: directory; made when missing.
      fetch: from package names to (package, version, unpacked root); ``debian.fetch`` bound to
        a work folder.

    Returns:
      The manifest.
    """
    out.mkdir(parents=True, exist_ok=True)
    by_name = {source.name: source for source in SOURCES}
    entries = []
    for part in SLICES:
        source = by_name[part.source]
        package, version, root = fetch(source.packages)

        def documents(
            part: Slice = part, root: Path = root, read: Any = source.read
        ) -> Iterator[Document]:
            for local_id, text in read(root):
                if part.keep(local_id):
                    yield Document(f"{part.source}/{local_id}", part.source, text)

        file = f"{part.source}.jsonl.zst"
        digest = write_shard(out / file, documents(), level=SAMPLE_LEVEL)
        entries.append(
            {
                "name": part.source,
                "title": part.title,
                "group": source.group,
                "package": package,
                "version": version,
                "licence": source.licence,
                "file": file,
                "documents": digest.documents,
                "bytes": digest.bytes,
                "sha256": digest.hexdigest(),
            }
        )
    manifest = {"format": MANIFEST_FORMAT, "name": "sample", "sources": entries}
    write_json(out / MANIFEST_NAME, manifest)
    return manifest
