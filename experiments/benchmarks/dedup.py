"""Time deduplication beside its peers and check it by brute force: one JSON row per measurement.

    python -m experiments.benchmarks.dedup quality near substrings --corpus corpus

quality     2,000 documents with planted near duplicates, against all their pairs by brute force
near        near duplicates: ours beside datasketch, and datatrove on fewer documents
substrings  exact repeats: ours beside one suffix array and LCP array of the whole text

The documents are drawn from a corpus directory; a part of them is replaced by edited copies of
others. Peers run one after the other, in turns, each in a process of its own (see
`dedup_peers`). Wall time means something only on a quiet machine: the load beside each row says
whether it was, CPU seconds are there for when it was not. Rows are appended to
`experiments/benchmarks/results/dedup.jsonl`.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from scipy.sparse import csr_matrix

from experiments.benchmarks.dedup_peers import WORD, shingles
from experiments.data.documents import read_corpus
from experiments.data.near_duplicates import NearDuplicateConfig

RESULTS = Path(__file__).parent / "results"
What = Literal["quality", "near", "substrings"]
THRESHOLDS = (0.7, 0.8)
PEER_PACKAGES = ("datasketch", "datatrove", "numpy", "pydivsufsort")


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure."""

    what: Annotated[tuple[What, ...], tyro.conf.Positional] = ("quality", "near", "substrings")
    """Parts to run."""
    corpus: Path = Path("corpus")
    """A directory made by `python -m experiments.data corpus`."""
    documents: int = 100_000
    """Of `near`, for ours and datasketch."""
    few: int = 5_000
    """Of `near`, for datatrove and ours beside it; none if 0."""
    megabytes: int = 100
    """Of text for `substrings`."""
    planted: float = 0.2
    """Share of documents that are edited copies."""
    threshold: float = 0.8
    """Jaccard similarity for `near`."""
    workers: int = 2
    """Threads or processes of each peer."""
    turns: int = 1
    """Times that each peer runs."""
    seed: int = 0
    """Of the drawn documents."""
    peer_python: str = sys.executable
    """A Python in whose environment datasketch and datatrove are installed."""
    note: str = ""
    """What else ran on the machine, for the rows."""
    folder: Path = RESULTS
    """Folder of the results."""

    def __post_init__(self) -> None:
        if not 0 <= self.planted < 1:
            raise ValueError(f"planted must be in [0, 1), got {self.planted}")
        for name in ("documents", "megabytes", "workers", "turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


# --- documents ------------------------------------------------------------------------------------


def draw(options: Options, count: int) -> list[str]:
    """Texts of the corpus with planted near duplicates, the same for the same seed."""
    texts = [document.text for document in read_corpus(options.corpus)]
    if count > len(texts):
        raise ValueError(f"{options.corpus} has {len(texts)} documents, {count} are wanted")
    return plant(random.Random(options.seed).sample(texts, count), options.planted, options.seed)


def plant(texts: list[str], share: float, seed: int) -> list[str]:
    """The texts, some of them replaced by copies of others with up to a tenth of words changed.

    A tenth of the words leaves half of the five-word shingles or less, so that similarities on
    both sides of any threshold occur.
    """
    draw = random.Random(seed)
    out = list(texts)
    for index in draw.sample(range(len(out)), int(share * len(out))):
        words = draw.choice(texts).split(" ")
        rate = draw.uniform(0, 0.1)
        out[index] = " ".join(w if draw.random() > rate else f"x{draw.random():.6f}" for w in words)
    return out


# --- against brute force --------------------------------------------------------------------------


def true_pairs(texts: list[str], size: int, least: float) -> Iterator[tuple[int, int, float]]:
    """All pairs at Jaccard similarity `least` or above, from exact sets of word n-grams."""
    numbers: dict[str, int] = {}
    sets = [shingles(text, size) for text in texts]
    rows = np.repeat(np.arange(len(sets)), [len(s) for s in sets])
    columns = [numbers.setdefault(shingle, len(numbers)) for s in sets for shingle in s]
    table = csr_matrix((np.ones(len(columns), np.int32), (rows, columns)))
    common = (table @ table.T).tocoo()
    for a, b, both in zip(common.row, common.col, common.data, strict=True):
        similarity = both / (len(sets[a]) + len(sets[b]) - both)
        if a < b and similarity >= least:
            yield int(a), int(b), float(similarity)


def quality(texts: list[str], dropped: list[int], threshold: float) -> dict[str, Any]:
    """Recall and false drops of a set of dropped documents.

    recall: of the pairs at similarity threshold + 0.1 or above, the share of which not both
      documents are kept.
    false_drops: of the documents whose most similar other one is below threshold - 0.1, the
      share that was dropped.
    """
    gone = set(dropped)
    pairs = list(true_pairs(texts, 5, threshold - 0.1))
    near = [(a, b) for a, b, similarity in pairs if similarity >= threshold + 0.1]
    some = {index for a, b, _ in pairs for index in (a, b)}
    # Documents without words are compared as they are, which shingles of words cannot tell.
    apart = [i for i, text in enumerate(texts) if i not in some and WORD.search(text)]
    found = sum(a in gone or b in gone for a, b in near)
    return {
        "pairs": len(near),
        "recall": round(found / max(len(near), 1), 5),
        "unlike_documents": len(apart),
        "false_drops": round(sum(i in gone for i in apart) / max(len(apart), 1), 6),
        "dropped": len(gone),
    }


# --- the run --------------------------------------------------------------------------------------


def run_peer(options: Options, peer: str, path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The row of one peer in a process of its own; a failure is a row with its error."""
    own = peer in ("ours", "substrings", "lcp")
    script = Path(__file__).parent / "dedup_peers.py"
    command = [sys.executable if own else options.peer_python, str(script), peer, str(path)]
    load = os.getloadavg()[0]
    finished = subprocess.run(
        [*command, json.dumps(settings)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    row = {"peer": peer, **settings, "load_before": round(load, 2)}
    if finished.returncode:
        return {**row, "error": finished.stderr.strip().splitlines()[-1:]}
    return {**row, **json.loads(finished.stdout.strip().splitlines()[-1])}


def near_settings(options: Options, threshold: float) -> dict[str, Any]:
    config = NearDuplicateConfig(threshold=threshold)
    bands, rows = config.band_shape()
    return {
        "threshold": threshold,
        "permutations": config.permutations,
        "bands": bands,
        "rows": rows,
        "size": config.size,
        "workers": options.workers,
    }


def measure(options: Options, folder: Path) -> Iterator[dict[str, Any]]:
    """Rows of all parts."""
    if "quality" in options.what:
        texts = draw(options, 2000)
        path = _write(folder / "quality.jsonl", texts)
        for threshold, peer in itertools.product(THRESHOLDS, ("ours", "datasketch")):
            row = run_peer(options, peer, path, near_settings(options, threshold))
            if "dropped" in row:
                row |= quality(texts, row["dropped"], threshold)
            yield {"part": "quality", "documents": len(texts), **row}
    if "near" in options.what:
        yield from _near(options, folder, options.documents, ("ours", "datasketch"))
        if options.few:
            yield from _near(options, folder, options.few, ("ours", "datatrove"))
    if "substrings" in options.what:
        texts = list(_first_megabytes(draw(options, options.documents), options.megabytes))
        path = _write(folder / "substrings.jsonl", texts)
        size = sum(len(text.encode()) for text in texts)
        settings = {"min_bytes": 200, "partition_bytes": 128 << 20, "workers": options.workers}
        for _, peer in itertools.product(range(options.turns), ("substrings", "lcp")):
            row = run_peer(options, peer, path, settings)
            if "error" not in row:
                row["mb_per_s"] = round(size / 1e6 / row["wall_s"], 2)
                row["mb_per_cpu_s"] = round(size / 1e6 / row["cpu_s"], 2)
                row["bytes_per_byte"] = round((row["peak_mb"] - row["texts_mb"]) * 1e6 / size, 2)
            yield {"part": "substrings", "documents": len(texts), "text_mb": size / 1e6, **row}


def _near(
    options: Options, folder: Path, count: int, peers: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    texts = draw(options, count)
    path = _write(folder / f"near{count}.jsonl", texts)
    size = sum(len(text.encode()) for text in texts) / 1e6
    for _, peer in itertools.product(range(options.turns), peers):
        row = run_peer(options, peer, path, near_settings(options, options.threshold))
        if "dropped" in row:
            row["dropped"] = len(row["dropped"])
            row["documents_per_s"] = round(count / row["wall_s"], 1)
            row["documents_per_cpu_s"] = round(count / row["cpu_s"], 1)
        yield {"part": "near", "documents": count, "text_mb": round(size, 1), **row}


def _write(path: Path, texts: list[str]) -> Path:
    with path.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return path


def _first_megabytes(texts: list[str], megabytes: int) -> Iterator[str]:
    sizes = itertools.accumulate(len(text.encode()) for text in texts)
    return (t for t, size in zip(texts, sizes, strict=True) if size <= megabytes * 1e6)


def provenance(options: Options) -> dict[str, Any]:
    """Where the rows of this run come from."""
    code = (
        "import importlib.metadata as m\n"
        f"for p in {PEER_PACKAGES}:\n"
        "  try: print(p, m.version(p))\n"
        "  except m.PackageNotFoundError: pass"
    )
    listed = subprocess.run([options.peer_python, "-c", code], capture_output=True, text=True)
    return {
        "device": f"CPU, {os.cpu_count()} cores, {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("numpy", "pydivsufsort")},
            "peers": dict(line.split() for line in listed.stdout.splitlines()),
        },
        "note": options.note,
        "command": shlex.join(
            ["python", "-m", "experiments.benchmarks.dedup", *_without_paths(sys.argv[1:])]
        ),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _without_paths(arguments: list[str]) -> list[str]:
    """Arguments without folders of this machine."""
    return [Path(a).name if a.startswith("/") else a for a in arguments]


def describe(row: dict[str, Any]) -> str:
    """One line of a row for the terminal."""
    start = f"{row['part']:10} {row['peer']:10} {row['documents']:>7} documents"
    if "error" in row:
        return f"{start} {row['error']}"
    text = f"{start} {row['wall_s']:8.1f} s {row['cpu_s']:8.1f} CPU s {row['peak_mb']:7.0f} MB"
    for name in ("recall", "false_drops", "dropped", "bytes_cut", "bytes_per_byte", "load_before"):
        if name in row:
            text += f"  {name} {row[name]}"
    return text


def run(options: Options) -> Path:
    """Measure everything, print a line and append a row for each; the rows' path."""
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "dedup.jsonl"
    source = provenance(options)
    seconds = collections.defaultdict(list)
    with path.open("a", encoding="utf-8") as rows, tempfile.TemporaryDirectory() as folder:
        for row in measure(options, Path(folder)):
            rows.write(json.dumps({**row, **source}) + "\n")
            rows.flush()
            print(describe(row), flush=True)
            if "error" not in row:
                seconds[row["part"], row["documents"], row["peer"]].append(row["cpu_s"])
    for (part, count, peer), times in seconds.items():
        print(f"{part} {count} {peer}: median {np.median(times):.1f} CPU s of {len(times)}")
    return path


def main() -> None:
    print(f"rows appended to {run(tyro.cli(Options, description=__doc__))}")


if __name__ == "__main__":
    main()
