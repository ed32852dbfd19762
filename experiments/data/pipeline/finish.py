"""The last stages: tokenize, mix, pack; and opening what they made."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from experiments.data.documents import CorpusError, write_json
from experiments.data.fitting import Long, PackedBatch, document_limits, pack_documents
from experiments.data.loader import TokenDataset, open_dataset
from experiments.data.mixing import MixConfig, integer_shares, mix_shares
from experiments.data.mixture_loader import (
    MixtureBatches,
    PackedBatches,
    mixture_batches,
    packed_batches,
    source_streams,
)
from experiments.data.packing import split_report
from experiments.data.pipeline.records import ShardStream
from experiments.data.pipeline.stages import (
    Shard,
    Unit,
    WorkerPool,
    fingerprint_of,
    open_folder,
    read_json,
)
from experiments.data.pipeline.tokenize import (
    TOKENIZER,
    TokenizeConfig,
    TokenizeTask,
    join_tokens,
    prepare_tokenizer,
)
from experiments.data.tokenizer import END_OF_TEXT

TOKENIZE_VERSION = 1
STORE = "tokens.bin"
MIX = "mix.json"


@dataclasses.dataclass(frozen=True)
class PackConfig:
    """How the tokens become rows.

    Attributes:
      seq_len: targets per row.
      method: ``split`` (concatenate and split, no padding), ``first-fit`` or ``best-fit``.
      long: what the fits do with documents longer than a row: ``split`` or ``drop``.
    """

    seq_len: int = 1024
    method: Literal["split", "first-fit", "best-fit"] = "split"
    long: Long = "split"

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {self.seq_len}")


def tokenize_shards(
    root: Path,
    shards: Sequence[Shard],
    config: TokenizeConfig,
    base: Path,
    *,
    folder: str,
    pool: WorkerPool,
) -> dict[str, Any]:
    """Writes ``ROOT/tokens.bin`` and its description; returns sections of the report."""
    digests: list[Any] = [[shard.path, shard.sha256] for shard in shards]
    if config.tokenizer is not None:
        digests.append((base / config.tokenizer).read_text(encoding="utf-8"))
    fingerprint = fingerprint_of("tokenize", TOKENIZE_VERSION, config, digests)
    place = root / folder
    open_folder(place, fingerprint)
    size = sum(shard.bytes for shard in shards)
    prepare_tokenizer(place, ShardStream(root, shards), size, config, base)
    units = [Unit(f"{i:05d}", shard.path) for i, shard in enumerate(shards)]
    left = [unit for unit in units if not (place / f"{unit.key}.json").is_file()]
    if left:
        pool.run(TokenizeTask(root, place, config.heldout_fraction), left, label="tokenize")
    keys = [unit.key for unit in units]
    sections = join_tokens(place, keys, root / STORE, config=config, fingerprint=fingerprint)
    sections["Tokenizer"]["merges and bytes in"] = f"{folder}/{TOKENIZER}"
    return sections


def tokenize_cpu_seconds(folder: Path) -> float:
    """What encoding cost, over all workers and runs; training is not in it."""
    records = (read_json(path) or {} for path in folder.glob("[0-9]*.json"))
    return sum(record.get("cpu_seconds", 0.0) for record in records)


def mix_sources(root: Path, groups: dict[str, str], config: MixConfig) -> list[dict[str, Any]]:
    """Writes ``ROOT/mix.json`` from the store's counts; returns the report's table."""
    meta = json.loads((root / STORE).with_suffix(".json").read_text(encoding="utf-8"))
    sizes = {name: splits["train"]["tokens"] for name, splits in meta["sources"].items()}
    shares = mix_shares(sizes, groups, config)
    counts = integer_shares(list(shares.values()), period=config.period)
    exact = [count / sum(counts) for count in counts]
    budget = config.budget_tokens or float(sum(sizes.values()))
    rows = [
        {
            "source": name, "group": groups[name], "tokens": sizes[name], "share": share,
            "rows per period": count, "epochs": share * budget / max(1, sizes[name]),
        }
        for name, share, count in zip(sizes, exact, counts, strict=True)
    ]  # fmt: skip
    write_json(root / MIX, {"budget_tokens": budget, "period": sum(counts), "sources": rows})
    return rows


def packing_rows(root: Path, config: PackConfig) -> list[dict[str, Any]]:
    """What every method of packing would make of each source: rows, padding, loss."""
    dataset = open_dataset(root / STORE, verify=False)
    rows = []
    for name, stream in source_streams(dataset).items():
        split = split_report(len(stream), seq_len=config.seq_len)
        rows.append(
            _packing_row(name, "split", split.windows, 0.0, split.dropped / max(1, split.tokens))
        )
        _, lengths = document_limits(stream, eos_id=dataset.tokenizer.eos_id)
        for method in ("first-fit", "best-fit"):
            report = pack_documents(
                lengths, seq_len=config.seq_len, method=method, long=config.long
            ).report
            rows.append(
                _packing_row(name, method, report.rows, report.padding_share, report.loss_share)
                | {"documents cut": report.split_documents}
            )
    return rows


def _packing_row(
    source: str, method: str, rows: int, padding: float, lost: float
) -> dict[str, Any]:
    # Where documents are cut is no count of concatenate-and-split: any row end may do it.
    return {
        "source": source, "method": method, "rows": rows, "padding share": padding,
        "share of targets lost": lost, "documents cut": "at row ends",
    }  # fmt: skip


def open_batches(
    root: Path,
    pack: PackConfig,
    *,
    batch_size: int,
    seed: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> tuple[MixtureBatches | PackedBatches, TokenDataset]:
    """The batches of a finished build, by step; also from within a training script.

    Args:
      root: the build's folder.
      pack: its ``[pack]``.
      batch_size: rows of a global batch.
      seed: of the order.
      process_index: this host, of ``process_count``.

    Raises:
      CorpusError: the build has not got as far as a mixture.
    """
    try:
        mix = json.loads((root / MIX).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorpusError(f"{root}: no {MIX}: run the build with [tokenize] first") from None
    dataset = open_dataset(root / STORE, verify=False)
    streams = source_streams(dataset)
    chosen = [row for row in mix["sources"] if row["rows per period"] > 0]
    options = {
        "batch_size": batch_size, "seq_len": pack.seq_len, "seed": seed,
        "process_index": process_index, "process_count": process_count,
    }  # fmt: skip
    parts = [streams[row["source"]] for row in chosen]
    counts = [row["rows per period"] for row in chosen]
    if pack.method == "split":
        return mixture_batches(parts, counts, **options), dataset
    eos = dataset.tokenizer.eos_id
    batches = packed_batches(
        parts, counts, eos_id=eos, method=pack.method, long=pack.long, **options
    )
    return batches, dataset


def show_batch(root: Path, pack: PackConfig, step: int, *, batch_size: int, seed: int) -> str:
    """Batch ``step`` as text: one block per row, document limits shown, padding left out."""
    batches, dataset = open_batches(root, pack, batch_size=batch_size, seed=seed)
    sources, rows = batches.order.at(step)
    names = [row["source"] for row in json.loads((root / MIX).read_text())["sources"]
             if row["rows per period"] > 0]  # fmt: skip
    batch = batches.batch_at(step)
    blocks = []
    for place, (source, row) in enumerate(zip(sources.tolist(), rows.tolist(), strict=True)):
        if isinstance(batch, PackedBatch):
            tokens: np.ndarray = batch.inputs[place][batch.mask[place]]
        else:
            tokens = batch[place]
        text = dataset.tokenizer.decode(tokens).replace(END_OF_TEXT, f"\n{END_OF_TEXT}\n")
        blocks.append(f"--- step {step} row {place}: {names[source]} row {row} ---\n{text}")
    return "\n".join(blocks)


def timed[T](timings: dict[str, float], name: str, function: functools.partial[T]) -> T:
    """Calls a function and notes its wall time in seconds."""
    start = time.monotonic()
    value = function()
    timings[name] = round(time.monotonic() - start, 2)
    return value
