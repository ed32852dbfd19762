"""A trained model from wherever it lies."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from experiments.training.checkpoint import read_json
from experiments.training.config import DataConfig, TrainConfig, run_of
from experiments.training.curriculum import make_curriculum
from experiments.training.programs import Programs
from experiments.training.run_checkpoints import Checkpoints, RetentionConfig
from experiments.training.start import read_params
from models.config import ModelConfig
from models.sharding import MeshConfig, make_mesh

# Stands in for a run's model until its folder has been read; nothing of it is used.
_SMALL = ModelConfig(
    vocab_size=256, num_layers=1, d_model=8, num_heads=1, num_kv_heads=1, head_dim=8, ffn_dim=8,
    max_seq_len=8,
)  # fmt: skip


@dataclass(frozen=True)
class LoadedModel:
    """A model and what it was trained on.

    Attributes:
      config: its shape.
      params: its parameters, on the first device.
      trained_len: tokens of a sequence in its training; of a foreign model, `max_seq_len`.
      data: its corpus; None for a model that is no run of ours.
    """

    config: ModelConfig
    params: Any
    trained_len: int
    data: DataConfig | None


def load_model(path: str | Path) -> LoadedModel:
    """A run folder (its newest whole checkpoint), a Hugging Face folder or a GGUF file.

    Of a run with context switches the model has the RoPE of the phase that it is in.

    Raises:
      RunError: it is none of them, or has no whole checkpoint.
    """
    path = Path(path)
    config = TrainConfig(_SMALL, batch_size=1, seq_len=8)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    model, params = read_params(path, Programs(config, mesh, separator=None))
    params = jax.tree.map(jax.numpy.asarray, params)
    if not (path / "checkpoints").is_dir():
        return LoadedModel(model, params, model.max_seq_len, None)
    fixed = read_json(run_of(path) / "config.json")["fixed"]
    curriculum = make_curriculum(
        batch_size=fixed["batch_size"],
        seq_len=fixed["seq_len"],
        rope_theta=model.rope_theta,
        rope_scaling=model.rope_scaling,
        batch_ramp=[(a, b) for a, b in fixed["batch_ramp"]],
        context=[(at, length, theta) for at, length, theta in fixed["context"]],
        context_rope=fixed.get("context_rope"),
    )
    saved = Checkpoints(path / "checkpoints", RetentionConfig()).saved()[-1]
    phase = curriculum.phase_at(max(saved.data_index - 1, 0))
    model = replace(model, rope_theta=phase.rope_theta, rope_scaling=phase.rope_scaling)
    return LoadedModel(model, params, phase.seq_len, DataConfig(**fixed["data"]))
