"""A tiny training run for the tests, faults for it, and a process that is killed in the middle.

python training_runs.py FOLDER '{"rows": 7}'     trains in FOLDER and dies after 7 rows
"""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.data import TokenDataset
from experiments.data.tokenizer import ByteTokenizer
from experiments.training import run_checkpoints
from experiments.training.config import ScheduleConfig, TrainConfig
from experiments.training.curriculum import BatchSource
from experiments.training.guard import GuardConfig
from experiments.training.loop import Trainer
from experiments.training.processes import join_processes
from experiments.training.programs import Programs
from experiments.training.run_checkpoints import Checkpoints, RetentionConfig
from experiments.training.run_folder import Events
from experiments.training.spikes import RollbackConfig
from experiments.training.watch import MetricsLog
from models import ModelConfig
from models.sharding import make_mesh

MODEL = ModelConfig(
    vocab_size=256,
    num_layers=1,
    d_model=16,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    ffn_dim=32,
    max_seq_len=32,
    compute_dtype="float32",
    z_loss=1e-4,
    attention_implementation="reference",
)
TINY = TrainConfig(
    model=MODEL,
    batch_size=8,
    seq_len=16,
    schedule=ScheduleConfig(
        peak=1e-2, total_steps=60, warmup_steps=5, cooldown_steps=15, shape="1-sqrt", final=0.0
    ),
    guard=GuardConfig(window=16, min_history=8),
    rollback=RollbackConfig(margin=10, extra=20, recent=10, linger_steps=10, lr_steps=10),
    checkpoint=RetentionConfig(every=10, latest=2, margin=10),
    xla_options=(("xla_backend_optimization_level", "0"),),  # compiles faster
)
POISON = (35, 36, 37, 38)  # batches


def make_dataset() -> TokenDataset:
    """The bytes of this file: text that needs no corpus."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.uint16)
    cut = len(text) * 3 // 4
    return TokenDataset(
        name="this file",
        train=text[:cut],
        heldout=text[cut:],
        vocab_size=256,
        bytes_per_token=1.0,
        tokenizer=ByteTokenizer(),
        fingerprint="0" * 64,
        meta={},
    )


def nan_batch(tokens: np.ndarray) -> np.ndarray:
    """Tokens outside the vocabulary: the loss is NaN."""
    return np.full_like(tokens, 10_000)


def noise_batch(tokens: np.ndarray) -> np.ndarray:
    """Random bytes: a finite loss far above that of text."""
    return np.random.default_rng(0).integers(128, 256, tokens.shape, tokens.dtype)


class Poisoned(BatchSource):
    """The tiny run's batches, some of them replaced."""

    def __init__(
        self,
        config: TrainConfig,
        bad: Any = POISON,
        poison: Callable[[np.ndarray], np.ndarray] = nan_batch,
    ):
        super().__init__(
            make_dataset(),
            config.curriculum(),
            seed=config.data.seed,
            accumulation=config.accumulation,
        )
        self.bad, self.poison = bad, poison

    def at(self, data_index: int) -> dict[str, np.ndarray]:
        batch = super().at(data_index)
        return {"tokens": self.poison(batch["tokens"])} if data_index in self.bad else batch


def in_folder(folder: Path, **changes: Any) -> TrainConfig:
    return dataclasses.replace(TINY, out=str(folder), **changes)


def run(config: TrainConfig, **options: Any) -> Trainer:
    """Train to the end."""
    trainer = Trainer(config, make_dataset(), **options)
    assert trainer.run() == "done"
    return trainer


def final_state(config: TrainConfig) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The newest checkpoint of a run as named arrays, and its record."""
    programs = Programs(config, make_mesh(config.mesh), separator=None)
    found = Checkpoints(Path(config.out) / "checkpoints", config.checkpoint).load_newest(
        programs.abstract
    )
    assert found is not None
    state, saved = found

    def plain(x: jax.Array) -> np.ndarray:
        is_key = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(p): plain(x) for p, x in leaves}, saved.record


def different(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[str]:
    """Names of the arrays that are not equal bit for bit."""
    assert a.keys() == b.keys()
    return [k for k in a if a[k].tobytes() != b[k].tobytes()]


def rows_of(config: TrainConfig) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (Path(config.out) / "metrics.jsonl").read_text().splitlines()]


def events_of(config: TrainConfig) -> list[dict[str, Any]]:
    return Events(Path(config.out)).read()


# ---- a process that dies ---------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(fault: dict[str, int]) -> None:
    """Let this process be killed at a point of the program:

    rows: n        after the n-th row of metrics
    writing: n     while Orbax writes the n-th checkpoint
    unsealed: n    after Orbax has written the n-th checkpoint, before its seal
    decided: n     after the n-th rollback was recorded, before anything was done about it
    restored: n    after the n-th rollback was carried out, before any step
    """
    left = dict(fault)

    def count(name: str) -> None:
        if name in left:
            left[name] -= 1
            if left[name] == 0:
                die()

    def after(owner: Any, method: str, name: str, when: Callable[..., bool] = lambda *_: True):
        original = getattr(owner, method)

        def patched(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if when(*args):
                count(name)
            return result

        setattr(owner, method, patched)

    after(MetricsLog, "append", "rows")
    after(Checkpoints, "save", "writing")
    after(Events, "append", "decided", lambda _, kind: kind == "rollback")
    after(Trainer, "go_back", "restored")
    original = run_checkpoints.seal

    def seal(path: Path, record: dict[str, Any]) -> None:
        count("unsealed")
        original(path, record)

    run_checkpoints.seal = seal


def main() -> None:
    join_processes(os.environ)
    config = in_folder(Path(sys.argv[1]))
    arm(json.loads(sys.argv[2]))
    run(config, source=Poisoned(config))
    print("done")


if __name__ == "__main__":
    main()
