"""Time the training step of a run, guard and metrics included, and what cuDNN would make of it.

    python -m experiments.benchmarks.training --shapes gpt2-124m_2k llama-1b_8k
    python -m experiments.benchmarks.training --list

Each shape trains on random tokens, so that only data is left out: the compiled step is the one of
`experiments.train`. Attention is ours, or (`cudnn`) `jax.nn.dot_product_attention` put in its place
in the same step. Times are wall clock of a chain of steps after `heat` seconds of them, with no
host in between but the one that dispatches. Rows are appended to results/NAME.jsonl.

MFU counts three forward passes of the exact FLOPs (blocks and head, causal attention as half) over
the dense bfloat16 peak of the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest import mock

import jax
import numpy as np
import tyro
from jaxtyping import Array

import models.attention
from experiments.benchmarks import timing
from experiments.benchmarks.attention import RESULTS, provenance
from experiments.console import run_main
from experiments.training import programs
from experiments.training.config import ScheduleConfig, TrainConfig
from experiments.training.guard import GuardConfig
from experiments.training.programs import Compiled, Programs
from experiments.training.watch import MFU_CONVENTION, peak_flops
from models.config import ModelConfig
from models.cost import forward_flops_per_token
from models.presets import gpt2_124m, llama3_2_1b
from models.sharding import make_mesh

Attention = Literal["ours", "cudnn"]
STEPS_BETWEEN_CLOCKS = 8


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model and the batch that it is trained on."""

    model: ModelConfig
    batch: int
    seq_len: int


def _shapes() -> dict[str, Shape]:
    llama = dataclasses.replace(
        llama3_2_1b(), vocab_size=32_064, max_seq_len=8192, rope_scaling=None, z_loss=1e-5
    )
    wide = dataclasses.replace(llama, num_heads=16, num_kv_heads=8, head_dim=128)
    small = dataclasses.replace(
        gpt2_124m(), vocab_size=32_768, max_seq_len=2048, qk_norm=True, z_loss=1e-5
    )
    tiny = ModelConfig(
        vocab_size=256,
        num_layers=2,
        d_model=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_dim=176,
        max_seq_len=256,
        compute_dtype="float32",
    )
    return {
        "tiny": Shape(tiny, 4, 128),
        "gpt2-124m_2k": Shape(small, 16, 2048),
        "llama-1b_2k": Shape(llama, 4, 2048),
        "llama-1b_8k": Shape(llama, 2, 8192),
        "1.2b-h128_8k": Shape(wide, 2, 8192),
    }


SHAPES = _shapes()


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time."""

    shapes: tuple[str, ...] = ()
    """Names of shapes; none for all on a GPU and the tiny one elsewhere."""
    attention: tuple[Attention, ...] = ()
    """Attentions to time; none for both on a GPU and ours elsewhere."""
    remat: Literal["none", "attention", "full"] = "none"
    """What the blocks recompute in the backward pass."""
    heat: float = 3.0
    """Seconds of steps before each measurement."""
    measure: float = 3.0
    """Seconds of steps per measurement."""
    kernels: bool = False
    """Also record the time of each GPU kernel (CUPTI) over a few steps."""
    name: str = "training"
    """Rows go to results/NAME.jsonl."""
    folder: Path = RESULTS
    """Folder of the results."""
    list: Annotated[bool, tyro.conf.arg(help="Print the shapes and leave.")] = False

    def __post_init__(self) -> None:
        unknown = [name for name in self.shapes if name not in SHAPES]
        if unknown:
            raise ValueError(f"shapes: no shape {', '.join(unknown)}; --list names all of them")
        if self.heat < 0 or self.measure <= 0:
            raise ValueError(
                f"heat must be >= 0 and measure > 0 seconds, got {self.heat} and {self.measure}"
            )

    def chosen_shapes(self) -> tuple[str, ...]:
        everywhere = tuple(name for name in SHAPES if name != "tiny")
        return self.shapes or (everywhere if jax.default_backend() == "gpu" else ("tiny",))

    def chosen_attention(self) -> tuple[Attention, ...]:
        return self.attention or (
            ("ours", "cudnn") if jax.default_backend() == "gpu" else ("ours",)
        )


# ---- one step -----------------------------------------------------------------------------------


def config_of(shape: Shape, remat: str) -> TrainConfig:
    """A run of this shape, whose guard accepts every finite step: random tokens teach nothing."""
    model = dataclasses.replace(shape.model, remat=remat)
    return TrainConfig(
        model=model,
        batch_size=shape.batch,
        seq_len=shape.seq_len,
        schedule=ScheduleConfig(peak=1e-4, total_steps=100_000, warmup_steps=1),
        guard=GuardConfig(deviations=float("inf")),
    )


def _cudnn(query: Array, key: Array, value: Array, **options: Any) -> Array:
    """`jax.nn`'s cuDNN attention with the arguments that the decoder gives to ours."""
    for name in ("segment_ids", "local_window_size"):
        if options.get(name) is not None:
            raise NotImplementedError(f"the cuDNN step of this benchmark has no {name}")
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=options["is_causal"], implementation="cudnn"
    )


@contextlib.contextmanager
def attention_of(name: Attention) -> Iterator[None]:
    """The decoder attends by `name` in programs that are traced inside."""
    if name == "ours":
        yield
        return
    with mock.patch.object(models.attention, "attention", _cudnn):
        yield


class Stepper:
    """A compiled step and its state; each call takes one step on the same random tokens."""

    def __init__(self, config: TrainConfig):
        made = Programs(config, make_mesh(config.mesh), separator=None)
        phase = config.curriculum().phases[0]
        rng = np.random.default_rng(0)
        rows = (1, config.batch_size, config.seq_len + 1)
        tokens = rng.integers(0, config.model.vocab_size, rows, dtype=np.int32)
        self.batch = made.place({"tokens": tokens})
        self.compiled: Compiled = made.step_for(phase, self.batch)
        self.schedule = made.schedule(1.0)
        self.state = made.fresh()

    def __call__(self) -> dict[str, Array]:
        self.state, metrics = self.compiled.run(self.state, self.batch, self.schedule)
        return metrics


def seconds_per_step(step: Stepper, heat: float, measure: float) -> tuple[float, int]:
    """Wall-clock seconds of one step in a chain, and the steps of the chain."""

    def chain(steps: int) -> float:
        begun = time.perf_counter()
        metrics = {}
        for _ in range(steps):
            metrics = step()
        jax.block_until_ready(metrics)
        return time.perf_counter() - begun

    chain(2)
    once = chain(2) / 2
    if heat:
        chain(max(1, int(heat / once)))
    steps = max(STEPS_BETWEEN_CLOCKS, int(measure / once))
    return chain(steps) / steps, steps


def measure(options: Options, name: str, attention: Attention) -> dict[str, Any]:
    """The row of one shape with one attention; a failure is a row with its error."""
    shape = SHAPES[name]
    row: dict[str, Any] = {
        "shape": name,
        "attention": attention,
        "batch": shape.batch,
        "seq_len": shape.seq_len,
        "params": shape.model.param_count(),
        "remat": options.remat,
    }
    try:
        with attention_of(attention):
            step = Stepper(config_of(shape, options.remat))
        seconds, steps = seconds_per_step(step, options.heat, options.measure)
        row |= rates(shape, seconds, step) | {"steps": steps}
        if options.kernels and jax.default_backend() == "gpu":
            row["kernels"] = timing.time_call(step, heat_s=0.0, measure_s=0.3).kernels
        return row
    except Exception as error:  # one failure must not end the run: it becomes a row
        return row | {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def rates(shape: Shape, seconds: float, step: Stepper) -> dict[str, Any]:
    """Tokens per second, MFU and memory of a step that takes `seconds`."""
    metrics = step()
    loss = float(metrics["loss"])
    if not np.isfinite(loss) or not bool(metrics["accepted"]):
        raise FloatingPointError(f"the step is broken: loss {loss}")
    tokens = shape.batch * shape.seq_len
    flops = 3 * forward_flops_per_token(shape.model, shape.seq_len) * tokens / seconds
    peak = peak_flops(jax.devices()[0])
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "ms": seconds * 1e3,
        "tokens_per_second": tokens / seconds,
        "tflops": flops / 1e12,
        "mfu": flops / peak if peak else None,
        "mfu_convention": MFU_CONVENTION,
        "loss": loss,
        "compile_s": step.compiled.seconds,
        "temporary_bytes": step.compiled.temporary_bytes,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "sm_clock_mhz": timing.sm_clock_mhz(),
    }


def describe(row: dict[str, Any]) -> str:
    """One line of a row for the terminal."""
    start = f"{row['shape']:14} {row['attention']:6} {row['batch']:3} x {row['seq_len']:5}"
    if "error" in row:
        return f"{start} {row['error']}"
    mfu = "" if row["mfu"] is None else f"  MFU {100 * row['mfu']:5.1f}%"
    return f"{start} {row['ms']:9.2f} ms {row['tokens_per_second']:10,.0f} tokens/s{mfu}"


def run(options: Options) -> Path:
    """Time everything, print a line and append a row for each measurement; the rows' path."""
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"{options.name}.jsonl"
    source = provenance("experiments.benchmarks.training")
    with path.open("a") as rows:
        for name in options.chosen_shapes():
            for attention in options.chosen_attention():
                row = measure(options, name, attention)
                rows.write(json.dumps({**row, **source}) + "\n")
                rows.flush()
                print(describe(row), flush=True)
                # The programs of one attention must not serve the other.
                clear_programs()
    return path


def clear_programs() -> None:
    """Forget compiled steps: their caches do not know which attention was patched in."""
    for cached in (programs.abstract_state, programs._compile_init, programs._compile_step):
        cached.cache_clear()
    jax.clear_caches()


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.list:
        for name, shape in SHAPES.items():
            count = shape.model.param_count() / 1e6
            print(f"{name:14} {count:8.1f} M parameters, {shape.batch} x {shape.seq_len} tokens")
        return
    print(f"rows appended to {run(options)}")


if __name__ == "__main__":
    sys.exit(run_main(main))
