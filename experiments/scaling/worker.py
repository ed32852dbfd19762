"""Train the points of a sweep, one after another, surviving kills and other workers."""

import functools
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data import TokenDataset
from experiments.scaling.ladder import Point
from experiments.scaling.runs import Run, claim, last_step
from experiments.training.checkpoint import load_state, save_state, write_atomic, write_json
from experiments.training.optimizer import make_optimizer
from experiments.training.schedule import Schedule, make_schedule
from experiments.training.state import TrainState, init_state
from experiments.training.step import make_chunk, make_evaluate
from models.decoder import apply, init_params
from models.loss import next_token_loss

MAX_CHUNK = 128  # steps in one compiled call, at most
CHUNK_SECONDS = 1.0  # and about this long: what a stop request or a progress bar waits for
CHECKPOINT_SECONDS = 45.0  # a kill loses at most this much of a point
EVAL_TOKENS = 16_384  # tokens of one held-out batch


class Stopped(Exception):
    """The worker was asked to stop between two chunks."""


@dataclass(frozen=True)
class Programs:
    """Compiled functions of one shape of point."""

    init: Any  # key -> TrainState
    chunk: Any  # see make_chunk
    evaluate: Any  # see make_evaluate


@functools.lru_cache(maxsize=64)
def programs_for(shape: tuple) -> Programs:
    """The functions that train and evaluate points of a shape (`Point.shape`)."""
    model, optimizer_config, seq_len, _, _ = shape
    optimizer = make_optimizer(optimizer_config)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits = apply(model, params, tokens[:, :-1])
        return next_token_loss(logits, tokens[:, 1:])[0]

    return Programs(
        init=jax.jit(lambda key: init_state(init_params(model, key), optimizer)),
        chunk=make_chunk(loss_fn, optimizer, seq_len=seq_len),
        evaluate=make_evaluate(loss_fn),
    )


class DeviceData:
    """The training stream and the held-out batches on the device, loaded once per process."""

    def __init__(self, dataset: TokenDataset):
        self.dataset = dataset
        self.stream = jnp.asarray(np.asarray(dataset.train))
        self._heldout: dict[tuple[int, int], jax.Array] = {}

    def heldout(self, seq_len: int, tokens: int) -> jax.Array:
        """(E, B, T+1) fixed held-out batches, the same for every point of a sweep."""
        key = (seq_len, tokens)
        if key not in self._heldout:
            size = max(1, min(EVAL_TOKENS, tokens) // seq_len)
            batches = self.dataset.heldout_batches(size, seq_len, tokens)
            self._heldout[key] = jnp.asarray(np.stack(batches))
        return self._heldout[key]


def work(run: Run, data: DeviceData, *, stop: Callable[[], bool] = lambda: False) -> None:
    """Train points until none is left that another process does not hold.

    Args:
      run: the sweep folder.
      data: its tokens.
      stop: asked between chunks; True ends the work after a checkpoint (raises `Stopped`).
    """
    compiled: set[tuple] = set()
    while True:
        point = _next_point(run, compiled)
        if point is None:
            return
        folder = run.point_folder(point)
        with claim(folder) as mine:
            # Another worker may have finished it between the look and the claim.
            if mine and run.result(point) is None:
                compiled.add(point.shape)
                train_point(run, point, data, stop=stop)


def _next_point(run: Run, compiled: set[tuple]) -> Point | None:
    """The next point to claim: a shape compiled here first, then shapes nobody works on.

    Large groups come first, so that the end of a sweep is not one worker on the longest point.
    """
    free, busy = [], set()
    for point in run.unfinished():
        with claim(run.point_folder(point)) as mine:
            if mine:
                free.append(point)
            else:
                busy.add(point.shape)
    group = {
        shape: sum(p.flops for p in free if p.shape == shape) for shape in {p.shape for p in free}
    }
    free.sort(
        key=lambda p: (p.shape not in compiled, p.shape in busy, -group[p.shape], -p.flops, p.id)
    )
    return free[0] if free else None


def train_point(
    run: Run, point: Point, data: DeviceData, *, stop: Callable[[], bool] = lambda: False
) -> dict:
    """Train one point from its checkpoint, if any, to its result.

    Returns:
      The result that was written: `status` "done" with `loss`, the mean held-out cross-entropy in
      nats per token, or "diverged" with loss None as soon as the training loss is not finite.

    Raises:
      Stopped: `stop()` was true; the state is saved.
      OSError: the disk is full or not writable; what was saved before is intact.
    """
    folder = run.point_folder(point)
    programs = programs_for(point.shape)
    state = _restore(folder, programs, point)
    first_step = int(state.step)
    run.log_event("point", id=point.id, pid=os.getpid(), step=first_step)
    started = time.monotonic()
    state, finite = _train(run, point, state, programs, data, stop)
    loss = None
    if finite:
        heldout = data.heldout(point.seq_len, point.heldout_tokens)
        value = float(programs.evaluate(state.params, heldout))
        loss = value if np.isfinite(value) else None
    seconds = time.monotonic() - started
    result = {
        "id": point.id,
        "status": "done" if loss is not None else "diverged",
        "loss": loss,  # held-out nats per token, after the cooldown
        "bits_per_byte": loss and loss / np.log(2) / run.dataset["bytes_per_token"],
        "params": point.params,
        "tokens": point.tokens,
        "flops": point.flops,
        "budget": point.budget,
        "seed": point.seed,
        "decayed": finite,
        "steps": int(state.step),
        "seconds": seconds,  # of the last attempt, compilation and evaluation included
        "resumed_at": first_step,
    }
    write_json(folder / "result.json", result)
    (folder / "state.npz").unlink(missing_ok=True)
    run.log_event("finished", id=point.id, status=result["status"], loss=loss, seconds=seconds)
    return result


def _restore(folder: Path, programs: Programs, point: Point) -> TrainState:
    """The checkpointed state, or a fresh one; metrics are cut back to it."""
    state = programs.init(jax.random.key(point.seed))
    if (folder / "state.npz").exists():
        state = load_state(folder / "state.npz", state)
    metrics = folder / "metrics.jsonl"
    if last_step(metrics) > int(state.step):
        lines = metrics.read_bytes().split(b"\n")[:-1]
        kept = [line for line in lines if json.loads(line)["step"] <= int(state.step)]
        write_atomic(metrics, b"".join(line + b"\n" for line in kept))
    return state


def schedule_of(point: Point) -> Schedule:
    """The learning rates of a point."""
    return make_schedule(
        peak=point.lr,
        total_steps=point.steps,
        warmup_steps=point.warmup_steps,
        cooldown_steps=point.cooldown_steps,
    )


def _train(run, point, state, programs, data, stop) -> tuple[TrainState, bool]:
    """Run the remaining steps in chunks; the flag says whether every loss was finite."""
    folder = run.point_folder(point)
    batches = data.dataset.batches(point.batch_size, point.seq_len, seed=point.seed)
    schedule = schedule_of(point)
    step, count = int(state.step), 8
    saved = time.monotonic()
    pending = None  # metrics of the chunk before, read while the device works on the next
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as log:
        while step < point.steps:
            begun = time.monotonic()
            count = min(count, point.steps - step)
            starts = window_starts(batches, step, count, point.seq_len)
            state, metrics = programs.chunk(state, data.stream, starts, count, schedule)
            step += count
            if pending is not None and not _write_row(log, point, *pending):
                return state, False
            pending = (step, count, metrics)
            if stop():
                save_state(folder / "state.npz", state)
                _write_row(log, point, *pending)
                raise Stopped
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                save_state(folder / "state.npz", state)
                saved = time.monotonic()
            count = _next_count(count, time.monotonic() - begun)
        return state, pending is None or _write_row(log, point, *pending)


def window_starts(batches: Any, step: int, count: int, seq_len: int) -> jax.Array:
    """First tokens (MAX_CHUNK, B) of the sequences of `count` steps, zero beyond them."""
    starts = np.zeros((MAX_CHUNK, batches.batch_size), np.int32)
    for i in range(count):
        starts[i] = batches.windows_at(step + i) * seq_len
    return jnp.asarray(starts)


def _next_count(count: int, seconds: float) -> int:
    """Chunk length that should take CHUNK_SECONDS, at most doubling: the first one compiles."""
    wanted = int(count * CHUNK_SECONDS / max(seconds, 1e-3))
    return int(np.clip(wanted, max(1, count // 2), min(2 * count, MAX_CHUNK)))


def _write_row(log: Any, point: Point, step: int, count: int, metrics: dict) -> bool:
    """Append a chunk's row; False when a loss was not finite (written as null)."""
    values = {name: np.asarray(column)[:count] for name, column in metrics.items()}
    row = {
        "step": step,
        "tokens": step * point.batch_size * point.seq_len,
        "loss": values["loss"].mean(),  # nats per token, mean over the chunk
        "grad_norm": values["grad_norm"].max(),
        "update_norm": values["update_norm"].max(),
        "lr": values["lr"][-1],
    }
    row = {k: v if isinstance(v, int) else float(v) for k, v in row.items()}
    finite = bool(np.isfinite(values["loss"]).all())
    row = {k: v if np.isfinite(v) else None for k, v in row.items()}
    log.write(json.dumps(row) + "\n")
    log.flush()
    return finite


def precompile(points: list[Point], data: DeviceData, *, threads: int = 8) -> None:
    """Compile the programs of several shapes at once, into JAX's persistent cache.

    XLA compiles outside Python's lock, so this takes about as long as the slowest shape; the first
    real call of each program then only reads it back.
    """

    def compile_one(point: Point) -> None:
        programs = programs_for(point.shape)
        batches = data.dataset.batches(point.batch_size, point.seq_len, seed=point.seed)
        starts = window_starts(batches, 0, 1, point.seq_len)
        state = jax.eval_shape(programs.init, jax.random.key(0))
        programs.init.lower(jax.random.key(0)).compile()
        programs.chunk.lower(state, data.stream, starts, 1, schedule_of(point)).compile()
        heldout = data.heldout(point.seq_len, point.heldout_tokens)
        programs.evaluate.lower(state.params, heldout).compile()

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(compile_one, points):  # iterating raises what a thread raised
            pass


def measure_step(point: Point, data: DeviceData, *, seconds: float = 1.0) -> tuple[float, float]:
    """Seconds of one training step and of everything that comes before the first (compiling).

    The best of several short chunks: what the machine does when nothing disturbs it.
    """
    programs = programs_for(point.shape)
    batches = data.dataset.batches(point.batch_size, point.seq_len, seed=point.seed)
    schedule = schedule_of(point)
    begun = time.monotonic()
    state = programs.init(jax.random.key(0))
    count, best, spent = 1, float("inf"), 0.0
    starts = window_starts(batches, 0, MAX_CHUNK, point.seq_len)
    state, metrics = programs.chunk(state, data.stream, starts, count, schedule)
    jax.block_until_ready(metrics)
    compile_seconds = time.monotonic() - begun
    while spent < seconds:
        begun = time.monotonic()
        state, metrics = programs.chunk(state, data.stream, starts, count, schedule)
        jax.block_until_ready(metrics)
        took = time.monotonic() - begun
        best, spent = min(best, took / count), spent + took
        count = int(np.clip(count * 0.3 * seconds / took, 1, MAX_CHUNK))
    return best, compile_seconds
