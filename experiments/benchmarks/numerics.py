"""One model, one seed, many numerics: the same run by attention implementation and dtype.

    python -m experiments.benchmarks.numerics --steps 500 \\
        --runs mosaic:bfloat16 mosaic:bfloat16 reference:bfloat16 reference:bfloat16
    python -m experiments.benchmarks.numerics --preset tiny --runs xla:float32 reference:float32

Every run starts from the same parameters and reads the same batches of real text, so that losses
differ by rounding alone; a run that is named twice shows how much two runs of one kind differ
(atomic additions are not ordered), which is what a difference between kinds has to be held against.
Rows, with the whole loss curves, go to results/NAME.jsonl, and a picture beside them.

The guard refuses only steps that are not finite, and those are counted: nothing is hidden by it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from jaxtyping import Float64
from matplotlib.figure import Figure

from experiments.benchmarks.attention import RESULTS, provenance
from experiments.configs.train import PRESETS
from experiments.console import run_main
from experiments.data import TokenDataset, load_dataset
from experiments.training.config import DataConfig, ScheduleConfig, TrainConfig
from experiments.training.curriculum import BatchSource
from experiments.training.guard import GuardConfig
from experiments.training.programs import Programs
from models.config import COMPUTE_DTYPES
from models.sharding import make_mesh
from pallas_flash.implementations import NAMES

Curve = Float64[np.ndarray, " steps"]
EXPLODING = 10.0  # a gradient norm this many times the run's median counts as exploding
LAST = 100  # steps over which the end of a curve is judged
WARM_STEPS = 5  # not timed


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run."""

    runs: tuple[str, ...] = ("mosaic:bfloat16", "reference:bfloat16")
    """IMPLEMENTATION:DTYPE of each run, in this order; name one twice to see its spread."""
    preset: Literal["gpt2-124m", "tiny"] = "gpt2-124m"
    """The model."""
    steps: int = 500
    """Steps of each run."""
    batch_size: int = 8
    """Sequences of a step."""
    seq_len: int = 1024
    """Tokens of a sequence."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """Which text; bytes of the sample corpus by default."""
    peak: float = 6e-4
    """Learning rate after warm-up."""
    name: str = "numerics"
    """Rows go to results/NAME.jsonl, the picture to results/NAME.png."""
    folder: Path = RESULTS
    """Folder of the results."""

    def __post_init__(self) -> None:
        for run in self.runs:
            implementation, _, dtype = run.partition(":")
            if implementation not in NAMES or dtype not in COMPUTE_DTYPES:
                raise ValueError(
                    f"runs: {run!r} is no IMPLEMENTATION:DTYPE; implementations are "
                    f"{', '.join(NAMES)}, dtypes {', '.join(COMPUTE_DTYPES)}"
                )
        if self.steps <= WARM_STEPS:
            raise ValueError(f"steps must be above {WARM_STEPS}, got {self.steps}")


def config_of(options: Options, run: str) -> TrainConfig:
    """The training run of one IMPLEMENTATION:DTYPE."""
    implementation, _, dtype = run.partition(":")
    base = PRESETS[options.preset]()
    model = dataclasses.replace(
        base.model,
        vocab_size=max(options.data.vocab_size, 256),
        max_seq_len=max(options.seq_len, base.model.max_seq_len),
        attention_implementation=implementation,
        compute_dtype=dtype,
    )
    return TrainConfig(
        model=model,
        batch_size=options.batch_size,
        seq_len=options.seq_len,
        data=options.data,
        schedule=ScheduleConfig(
            peak=options.peak, total_steps=options.steps, warmup_steps=options.steps // 10
        ),
        optimizer=base.optimizer,
        guard=GuardConfig(deviations=math.inf),
    )


def train(config: TrainConfig, dataset: TokenDataset) -> dict[str, Any]:
    """Losses and gradient norms of every step, and what a step cost."""
    programs = Programs(config, make_mesh(config.mesh, jax.devices()[:1]), separator=None)
    source = BatchSource(dataset, config.curriculum(), seed=config.data.seed)
    state, schedule = programs.fresh(), programs.schedule(1.0)
    phase = config.curriculum().phases[0]
    kept, begun, step = [], 0.0, None
    for index in range(config.schedule.total_steps):
        if index == WARM_STEPS:
            jax.block_until_ready(state)
            begun = time.perf_counter()
        batch = programs.place(source.at(index))
        step = programs.step_for(phase, batch)
        state, metrics = step.run(state, batch, schedule)
        kept.append({name: metrics[name] for name in ("loss", "grad_norm", "accepted")})
    jax.block_until_ready(state)
    seconds = (time.perf_counter() - begun) / (config.schedule.total_steps - WARM_STEPS)
    rows = jax.device_get(kept)
    curves = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
    return {
        **curves,
        "ms": seconds * 1e3,
        "tokens_per_second": config.batch_size * config.seq_len / seconds,
        "temporary_bytes": step.temporary_bytes if step else None,
    }


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Numbers that say how a run went.

    `loss_std` is the standard deviation of the last losses about their straight line; `exploding`
    counts gradient norms above 10 times the median of the finite ones.
    """
    losses: Curve = result["loss"]
    norms: Curve = result["grad_norm"]
    finite = np.isfinite(norms)
    tail = losses[-LAST:]
    steps = np.arange(len(tail))
    trend = np.polyval(np.polyfit(steps, tail, 1), steps) if np.isfinite(tail).all() else np.nan
    return {
        "final_loss": float(np.mean(tail)),
        "loss_std": float(np.std(tail - trend)),
        "not_finite": int(np.sum(~np.isfinite(losses) | ~finite)),
        "refused": int(np.sum(result["accepted"] == 0)),
        "exploding": int(np.sum(norms[finite] > EXPLODING * np.median(norms[finite]))),
    }


def gap(losses: Curve, other: Curve) -> dict[str, float]:
    """How far two curves are apart: largest and RMS difference of the losses of a step."""
    difference = losses - other
    return {
        "largest": float(np.max(np.abs(difference))),
        "rms": float(np.sqrt(np.mean(difference**2))),
        "of_last_means": float(np.mean(difference[-LAST:])),
    }


def picture(options: Options, curves: list[tuple[str, Curve]], path: Path) -> None:
    """Loss by step, and below it each run's distance to the first."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, gaps = figure.subplots(2, 1, sharex=True)
    for label, curve in curves:
        losses.plot(curve, linewidth=0.8, label=label)
    losses.set_ylabel("loss (nats per token)")
    losses.set_title(f"{options.preset}, one seed, {options.batch_size} x {options.seq_len} tokens")
    losses.legend()
    for label, curve in curves[1:]:
        gaps.semilogy(np.abs(curve - curves[0][1]) + 1e-9, linewidth=0.8, label=label)
    gaps.set_ylabel(f"|loss - loss of {curves[0][0]}|")
    gaps.set_xlabel("step")
    figure.savefig(path, dpi=120)


def run(options: Options) -> Path:
    """Run everything, print a line and append a row for each; the rows' path."""
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"{options.name}.jsonl"
    dataset = load_dataset(options.data.corpus, vocab_size=options.data.vocab_size)
    source = provenance("experiments.benchmarks.numerics")
    curves: list[tuple[str, Curve]] = []
    with path.open("a") as rows:
        for number, name in enumerate(options.runs):
            result = train(config_of(options, name), dataset)
            told = summary(result)
            curves.append((f"{number + 1}: {name}", result["loss"]))
            row = {
                "run": name,
                "number": number + 1,
                "preset": options.preset,
                "batch": options.batch_size,
                "seq_len": options.seq_len,
                **{k: result[k] for k in ("ms", "tokens_per_second", "temporary_bytes")},
                **told,
                "to_first": gap(result["loss"], curves[0][1]),
                "losses": [round(float(x), 5) for x in result["loss"]],
            }
            rows.write(json.dumps({**row, **source}) + "\n")
            rows.flush()
            print(describe(row), flush=True)
    picture(options, curves, path.with_suffix(".png"))
    return path


def describe(row: dict[str, Any]) -> str:
    """One line of a row for the terminal."""
    apart = row["to_first"]
    return (
        f"{row['number']:2} {row['run']:20} {row['ms']:8.2f} ms {row['tokens_per_second']:9,.0f} "
        f"tokens/s  loss {row['final_loss']:.4f} (std {row['loss_std']:.4f})  not finite "
        f"{row['not_finite']}  exploding {row['exploding']}  to run 1: RMS {apart['rms']:.1e}, "
        f"last {apart['of_last_means']:+.1e}"
    )


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    print(f"rows appended to {run(options)}")


if __name__ == "__main__":
    sys.exit(run_main(main))
