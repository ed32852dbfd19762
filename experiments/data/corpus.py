"""Builds the larger corpus: packages -> extracted text -> lines that occur once -> shards.

Two stages, each restartable. *Extract* handles sources in parallel, one shard per source
under ``OUT/extracted``; a finished source is never fetched again. *Deduplicate* passes over
them in the table's order and keeps the first copy of every line of 30 characters or more in
the whole corpus, which takes away page furniture and licence texts; source code, which a
missing line would break, is kept or dropped by whole files. It costs a minute or two, and
runs again whenever the set of sources changed. So the result depends on which sources are in
it, never on the order or the number of runs that built it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.data.debian import PackageError, Packages, PackageUnknownError
from experiments.data.documents import (
    MANIFEST_FORMAT,
    MANIFEST_NAME,
    CorpusError,
    Document,
    TextDigest,
    normalize_text,
    read_manifest,
    read_shard,
    write_json,
    write_shard,
)
from experiments.data.sources import Source, select_sources

logger = logging.getLogger(__name__)

MIN_LINE = 30  # shorter lines repeat for good reasons: headings, closing brackets, "Example:"
MIN_REST = 200  # a page that lost lines and has less than this left was page furniture
EXTRACT_VERSION = 1  # raise when a reader's output changes: finished sources are read again
FREE_BYTES = 3 << 30  # the largest packages unpack to more than 1 GB, two at a time
PINS = Path(__file__).parent / "pinned.json"


def build_corpus(
    out: Path,
    *,
    sources: tuple[str, ...] = (),
    min_mb: float = 100.0,
    workers: int | None = None,
    strict: bool = False,
    pins: Path = PINS,
) -> dict[str, Any]:
    """Builds or completes the corpus in ``out`` and returns its manifest.

    Args:
      out: the corpus directory.
      sources: names or groups; none mean all.
      min_mb: fewer megabytes (10^6 bytes) of text than this is an error.
      workers: sources read at once; by default one per core.
      strict: text that differs from its pinned checksum, or has none, is an error.
      pins: JSON of known checksums, ``{source: {"package version": sha256}}``.

    Raises:
      ValueError: an unknown source.
      PackageError: the archive cannot be used at all.
      CorpusError: too little text, or a pin that does not match under ``strict``.
    """
    selected = select_sources(sources)
    out.mkdir(parents=True, exist_ok=True)
    records = extract_all(selected, out, workers=workers or os.cpu_count() or 1)
    check_pins(records, pins, strict=strict)
    manifest = deduplicate([source for source in selected if source.name in records], records, out)
    size = sum(entry["bytes"] for entry in manifest["sources"]) / 1e6
    if size < min_mb:
        raise CorpusError(
            f"{out} holds {size:.1f} MB of text, less than --min-mb {min_mb:g}: name more "
            "--sources (see the warnings above for what could not be had)"
        )
    return manifest


# --- extract --------------------------------------------------------------------------------------


def extract_all(
    selected: tuple[Source, ...], out: Path, *, workers: int
) -> dict[str, dict[str, Any]]:
    """Extracts what is not extracted yet; returns name -> record of every source at hand.

    A source whose packages this release lacks, or whose layout changed, is left out with a
    warning that names it.
    """
    records = {source.name: record for source in selected if (record := _finished(source, out))}
    missing = [source for source in selected if source.name not in records]
    if not missing:
        return records
    packages = Packages(out / "packages")
    _check_disk(out)
    for half in (out / "extracted").glob("*.tmp"):
        half.unlink()
    # spawn: the parent may hold threads of the tokenizer or of JAX, which fork would copy dead.
    context = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(
            min(workers, len(missing)), context, initializer=_end_with_parent
        ) as pool,
        tqdm(total=len(missing), desc="sources", unit="source") as bar,
    ):
        jobs = {pool.submit(extract_source, source.name, out): source for source in missing}
        try:
            for job in concurrent.futures.as_completed(jobs):
                _collect(job, jobs[job], records)
                bar.update()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    shutil.rmtree(packages.work, ignore_errors=True)
    return records


def _end_with_parent() -> None:
    """Ends this worker when its parent is killed: it would go on through the queue otherwise."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _collect(
    job: concurrent.futures.Future[dict[str, Any]],
    source: Source,
    records: dict[str, dict[str, Any]],
) -> None:
    try:
        records[source.name] = job.result()
    except (PackageUnknownError, CorpusError) as error:
        logger.warning("%s left out: %s", source.name, error)


def extract_source(name: str, out: Path) -> dict[str, Any]:
    """Fetches and reads one source into ``out/extracted``; returns its record."""
    (source,) = select_sources([name])
    packages = Packages(out / "packages")
    package, version, root = packages.fetch(source.packages)
    shard, record_path = _extracted_paths(source, out)
    shard.parent.mkdir(parents=True, exist_ok=True)
    documents = (Document(f"{name}/{key}", name, text) for key, text in source.read(root))
    try:
        digest = write_shard(shard, documents, level=3)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise CorpusError(f"{package} {version} cannot be read: {error}") from error
        raise PackageError(f"{shard}: no disk space left: free some, or another --out") from error
    except (ValueError, KeyError, EOFError, struct.error, zlib.error) as error:
        raise CorpusError(
            f"{package} {version} is not laid out as expected: {error!r}; its reader in "
            "experiments/data/extract.py needs a look"
        ) from error
    packages.discard(root)
    record = {
        "extract_version": EXTRACT_VERSION,
        "package": package,
        "version": version,
        "documents": digest.documents,
        "bytes": digest.bytes,
        "sha256": digest.hexdigest(),
    }
    write_json(record_path, record)
    return record


def _extracted_paths(source: Source, out: Path) -> tuple[Path, Path]:
    folder = out / "extracted"
    return folder / f"{source.name}.jsonl.zst", folder / f"{source.name}.json"


def _finished(source: Source, out: Path) -> dict[str, Any] | None:
    shard, record_path = _extracted_paths(source, out)
    if not (shard.is_file() and record_path.is_file()):
        return None
    record = json.loads(record_path.read_text(encoding="utf-8"))
    return record if record["extract_version"] == EXTRACT_VERSION else None


def _check_disk(out: Path) -> None:
    free = shutil.disk_usage(out).free
    if free < FREE_BYTES:
        raise PackageError(
            f"{out}: {free / 2**30:.1f} GiB free, building needs {FREE_BYTES >> 30} GiB: free some "
            "space, or give another --out"
        )


# --- pins -----------------------------------------------------------------------------------------


def check_pins(records: dict[str, dict[str, Any]], pins: Path, *, strict: bool) -> None:
    """Compares extracted text with the checksums that are known for the package's version.

    Raises:
      CorpusError: under ``strict``, when a source differs or is not pinned.
    """
    known = json.loads(pins.read_text(encoding="utf-8")) if pins.is_file() else {}
    differ, unknown = [], []
    for name, record in records.items():
        version = f"{record['package']} {record['version']}"
        expected = known.get(name, {}).get(version)
        if expected is None:
            unknown.append(f"{name} ({version})")
        elif expected != record["sha256"]:
            differ.append(
                f"{name}: text of {version} has sha256 {record['sha256'][:12]}, pinned is "
                f"{expected[:12]}: results are not comparable with those of the pinned text"
            )
    if unknown:
        differ.append(
            "no checksum is pinned for these versions, so results may differ from those of "
            f"other machines: {', '.join(unknown)}"
        )
    if differ and strict:
        raise CorpusError("; ".join(differ))
    for problem in differ:
        logger.warning("%s", problem)


def write_pins(records: dict[str, dict[str, Any]], pins: Path) -> None:
    """Adds the checksums of ``records`` to the pins, for maintainers."""
    known = json.loads(pins.read_text(encoding="utf-8")) if pins.is_file() else {}
    for name, record in records.items():
        known.setdefault(name, {})[f"{record['package']} {record['version']}"] = record["sha256"]
    write_json(pins, {name: known[name] for name in sorted(known)})


# --- deduplicate ----------------------------------------------------------------------------------


class LineDeduplicator:
    """Drops lines of at least ``MIN_LINE`` characters that were seen before, anywhere.

    Lines are compared without their outer spaces, by a 64-bit hash: among 10^7 lines the
    chance of one false match is 3 in a million.
    """

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def filter_lines(self, text: str) -> tuple[str, int]:
        """The text without repeated lines, and how many were dropped."""
        kept = []
        dropped = 0
        for line in text.split("\n"):
            key = _line_key(line)
            if key is not None and key in self._seen:
                dropped += 1
                continue
            if key is not None:
                self._seen.add(key)
            kept.append(line)
        return (normalize_text("\n".join(kept)) if dropped else text), dropped

    def filter_whole(self, text: str) -> tuple[str, int]:
        """All of the text, or nothing when more than half of its long lines were seen.

        For source code, which a missing line would break.
        """
        keys = [key for line in text.split("\n") if (key := _line_key(line)) is not None]
        repeated = sum(key in self._seen for key in keys)
        if 2 * repeated > len(keys):
            return "", len(keys)
        self._seen.update(keys)
        return text, 0


def _line_key(line: str) -> bytes | None:
    line = line.strip()
    if len(line) < MIN_LINE:
        return None
    return hashlib.blake2b(line.encode(), digest_size=8).digest()


def deduplicate(
    sources: list[Source], records: dict[str, dict[str, Any]], out: Path
) -> dict[str, Any]:
    """Writes the final shards and the manifest, unless they are there already."""
    plan = {
        "min_line": MIN_LINE,
        "min_rest": MIN_REST,
        "code": "whole files",
        "extracted": [[source.name, records[source.name]["sha256"]] for source in sources],
    }
    existing = _existing_manifest(out)
    if existing is not None and existing["plan"] == plan:
        return existing
    (out / MANIFEST_NAME).unlink(missing_ok=True)
    # Shards of another set of sources, and halves that a kill left behind.
    for stale in (*out.glob("*.jsonl.zst"), *out.glob("*.jsonl.zst.*.tmp")):
        stale.unlink()
    lines = LineDeduplicator()
    entries = []
    for source in tqdm(sources, desc="unique lines", unit="source"):
        entries.append(_deduplicate_source(source, records[source.name], lines, out))
    manifest = {
        "format": MANIFEST_FORMAT,
        "name": "corpus",
        "plan": plan,
        "sources": entries,
    }
    write_json(out / MANIFEST_NAME, manifest)
    return manifest


def _existing_manifest(out: Path) -> dict[str, Any] | None:
    try:
        manifest = read_manifest(out)
    except CorpusError:
        return None
    complete = all((out / entry["file"]).is_file() for entry in manifest["sources"])
    return manifest if complete and "plan" in manifest else None


def _deduplicate_source(
    source: Source, record: dict[str, Any], lines: LineDeduplicator, out: Path
) -> dict[str, Any]:
    extracted = TextDigest()
    removed = {"lines": 0, "documents": 0}
    filter_text = lines.filter_whole if source.group == "code" else lines.filter_lines

    def unique() -> Iterator[Document]:
        for document in read_shard(_extracted_paths(source, out)[0]):
            extracted.update(document)
            text, dropped = filter_text(document.text)
            removed["lines"] += dropped
            if dropped and len(text) < MIN_REST:
                removed["documents"] += 1
            else:
                yield dataclasses.replace(document, text=text)

    file = f"{source.name}.jsonl.zst"
    digest = write_shard(out / file, unique())
    if extracted.hexdigest() != record["sha256"]:
        raise CorpusError(
            f"extracted text of {source.name} was changed or damaged: delete {out}/extracted"
        )
    return {
        "name": source.name,
        "title": source.title,
        "group": source.group,
        "package": record["package"],
        "version": record["version"],
        "licence": source.licence,
        "file": file,
        "documents": digest.documents,
        "bytes": digest.bytes,
        "sha256": digest.hexdigest(),
        "extracted": {key: record[key] for key in ("documents", "bytes", "sha256")},
        "removed": {**removed, "bytes": extracted.bytes - digest.bytes},
    }
