"""One run of one deduplicator, ours or another, on a file of documents: prints a JSON row.

    python experiments/benchmarks/dedup_peers.py PEER DOCUMENTS SETTINGS

A script of its own, so that each run has a process, whose memory is its own, and so that peers
can be run by the Python of another environment: only the peer asked for is imported. DOCUMENTS is
JSON lines with a text each; SETTINGS is a JSON object. Reading the documents is not timed.

ours        experiments.data.near_duplicates
datasketch  text-dedup's way: datasketch MinHash in a pool of processes, MinHashLSH, candidates
            verified by the Jaccard similarity of their sets, union-find, the first one kept
datatrove   its local MinHash pipeline of four stages, verification not offered
substrings  experiments.data.substrings
lcp         the whole text's suffix array and LCP array, by pydivsufsort
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import re
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WORD = re.compile(r"[^\W_]+")


def shingles(text: str, size: int) -> set[str]:
    """Sets of word n-grams as Python strings; fewer words than `size` make one shingle."""
    words = WORD.findall(text.casefold())
    return {" ".join(words[i : i + size]) for i in range(max(1, len(words) - size + 1))}


def ours(texts: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    from experiments.data.near_duplicates import NearDuplicateConfig, near_duplicates

    config = NearDuplicateConfig(
        threshold=settings["threshold"],
        permutations=settings["permutations"],
        bands=settings["bands"],
        rows=settings["rows"],
        keep="first",
    )
    found = near_duplicates(texts, config, workers=settings["workers"])
    return {"dropped": found.dropped.tolist(), "counts": found.counts}


# --- datasketch -----------------------------------------------------------------------------------


@functools.cache
def _empty_sketch(permutations: int) -> Any:
    """Copied for each document: drawing the permutations takes longer than a short text."""
    from datasketch import MinHash  # pyright: ignore[reportMissingImports]

    return MinHash(num_perm=permutations, seed=1)


def _datasketch_signatures(job: tuple[list[str], int, int]) -> list[Any]:
    texts, size, permutations = job
    out = []
    for text in texts:
        sketch = _empty_sketch(permutations).copy()
        sketch.update_batch([shingle.encode() for shingle in shingles(text, size)])
        out.append(sketch.hashvalues)
    return out


def datasketch(texts: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    from datasketch import MinHashLSH  # pyright: ignore[reportMissingImports]

    size, permutations = settings["size"], settings["permutations"]
    jobs = [(texts[i : i + 500], size, permutations) for i in range(0, len(texts), 500)]
    lsh = MinHashLSH(num_perm=permutations, params=(settings["bands"], settings["rows"]))
    parent: dict[int, int] = {}

    def root(index: int) -> int:
        while parent.get(index, index) != index:
            index = parent[index]
        return index

    sets: dict[int, set[str]] = {}

    def set_of(index: int) -> set[str]:
        if index not in sets:
            sets[index] = shingles(texts[index], size)
        return sets[index]

    index = 0
    with multiprocessing.Pool(settings["workers"]) as pool:
        for part in pool.imap(_datasketch_signatures, jobs):
            for values in part:
                sketch = _empty_sketch(permutations).copy()
                sketch.hashvalues = values
                for other in sorted(lsh.query(sketch)):
                    a, b = set_of(index), set_of(int(other))
                    if len(a & b) >= settings["threshold"] * len(a | b):
                        first, second = sorted((root(index), root(int(other))))
                        parent[second] = first
                lsh.insert(index, sketch, check_duplication=False)
                index += 1
    return {"dropped": [i for i in range(len(texts)) if root(i) != i]}


# --- datatrove ------------------------------------------------------------------------------------


def datatrove(texts: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    from datatrove.data import Document  # pyright: ignore[reportMissingImports]
    from datatrove.executor import LocalPipelineExecutor  # pyright: ignore[reportMissingImports]
    from datatrove.pipeline.dedup import (  # pyright: ignore[reportMissingImports]
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig  # pyright: ignore[reportMissingImports]
    from datatrove.pipeline.writers import JsonlWriter  # pyright: ignore[reportMissingImports]

    workers, bands = settings["workers"], settings["bands"]
    config = MinhashConfig(
        n_grams=settings["size"], num_buckets=bands, hashes_per_bucket=settings["rows"]
    )
    read = [
        [Document(text=t, id=str(i)) for i, t in list(enumerate(texts))[k::workers]]
        for k in range(workers)
    ]

    def documents(data, rank: int = 0, world_size: int = 1):
        yield from read[rank]

    with tempfile.TemporaryDirectory() as folder:
        signatures, buckets, removed, out = (
            f"{folder}/{n}" for n in ("sig", "buckets", "remove", "out")
        )
        stages = [
            (workers, [documents, MinhashDedupSignature(signatures, config=config)]),
            (bands, [MinhashDedupBuckets(signatures, buckets, config=config)]),
            (1, [MinhashDedupCluster(buckets, removed, config=config)]),
            (workers, [documents, MinhashDedupFilter(removed), JsonlWriter(out, compression=None)]),
        ]
        for number, (tasks, pipeline) in enumerate(stages):
            LocalPipelineExecutor(
                pipeline,
                tasks=tasks,
                workers=workers,
                logging_dir=f"{folder}/logs{number}",
                start_method="fork",
            ).run()
        kept = {
            int(json.loads(line)["id"])
            for path in Path(out).glob("*.jsonl")
            for line in path.read_text(encoding="utf-8").splitlines()
        }
    return {"dropped": [i for i in range(len(texts)) if i not in kept]}


# --- exact substrings -----------------------------------------------------------------------------


def substrings(texts: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    import dataclasses

    from experiments.data.substrings import SubstringConfig, cut_repeats

    config = SubstringConfig(
        min_bytes=settings["min_bytes"], partition_bytes=settings["partition_bytes"]
    )
    stream, stats = cut_repeats(texts, config, workers=settings["workers"])
    digest = hashlib.sha256()
    for document in stream:
        digest.update(document.text.encode() + b"\0")
    return {**dataclasses.asdict(stats), "sha256": digest.hexdigest()[:16]}


def lcp(texts: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    import pydivsufsort

    data = np.frombuffer(bytearray("\0".join(texts).encode()), np.uint8)
    suffixes = pydivsufsort.divsufsort(data)
    lengths = np.asarray(pydivsufsort.kasai(data, suffixes))
    return {"repeated_neighbours": int((lengths >= settings["min_bytes"]).sum())}


PEERS = {f.__name__: f for f in (ours, datasketch, datatrove, substrings, lcp)}


def peak_mb() -> float:
    """Largest resident set of this process.

    From the kernel's own table: ru_maxrss counts the process that forked this one too.
    """
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1e3  # pyright: ignore[reportOptionalSubscript]


def cpu(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    peer, path, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    with path.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    before, texts_mb = resource.getrusage(resource.RUSAGE_SELF), peak_mb()
    start = time.perf_counter()
    outcome = PEERS[peer](texts, settings)
    wall = time.perf_counter() - start
    usage = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    row = {
        "wall_s": round(wall, 3),
        "cpu_s": round(sum(map(cpu, usage)) - cpu(before), 3),
        "peak_mb": round(peak_mb(), 1),
        "largest_child_mb": round(usage[1].ru_maxrss / 1e3, 1),
        "texts_mb": round(texts_mb, 1),
    }
    print("\n" + json.dumps({**row, **outcome}))


if __name__ == "__main__":
    main()
