"""How a run begins: from nothing, from somebody's parameters, or from another run's state."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.training.checkpoint import read_json
from experiments.training.config import TrainConfig, run_of
from experiments.training.guard import GuardConfig
from experiments.training.optimizer import OptimizerConfig
from experiments.training.programs import Programs, abstract_state
from experiments.training.run_checkpoints import Checkpoints, RetentionConfig, Saved, load
from experiments.training.run_folder import RunError
from experiments.training.state import TrainState
from models.config import ModelConfig

# Fields in which a model may differ from the one whose parameters it takes: how far it sees, how it
# computes. Everything else would make other weights of the same numbers.
FREE_MODEL_FIELDS = (
    *("rope_theta", "rope_scaling", "max_seq_len", "z_loss", "compute_dtype", "param_dtype"),
    *("attention_implementation", "remat", "scan_layers", "loss_chunk"),
)


def begin(config: TrainConfig, programs: Programs) -> tuple[TrainState, Saved | None]:
    """The first state of a run, and the checkpoint that it is, when it is one.

    Raises:
      RunError: there is no such checkpoint.
      ValueError: it holds another model.
    """
    if config.branch_from:
        return branch(config, programs)
    if config.init_from:
        theirs, params = read_params(Path(config.init_from), programs)
        check_model(theirs, config.model)
        return programs.with_params(params), None
    return programs.fresh(), None


def branch(config: TrainConfig, programs: Programs) -> tuple[TrainState, Saved]:
    """The whole state of another run at a step: optimizer, counters, cursor, key, guard."""
    folder = run_of(str(config.branch_from))
    checkpoints = Checkpoints(folder / "checkpoints", RetentionConfig())
    wanted = [
        s for s in checkpoints.saved() if config.branch_step is None or s.step == config.branch_step
    ]
    if not wanted:
        steps = [s.step for s in checkpoints.saved()]
        raise RunError(
            f"{folder} has no checkpoint at step {config.branch_step}, only {steps}; "
            "checkpoint.keep_every keeps some for this"
        )
    saved = wanted[-1]
    if saved.step >= config.schedule.total_steps:
        raise RunError(
            f"branch_from step {saved.step} is not before schedule.total_steps "
            f"{config.schedule.total_steps}: nothing would be trained"
        )
    # Rollbacks of the parent are behind this run; its own begin with none.
    record = saved.record | {"generation": 0}
    return load(saved.path, programs.abstract), replace(saved, record=record)


def read_params(path: Path, programs: Programs) -> tuple[ModelConfig, Any]:
    """A model from a run of ours (its newest whole checkpoint), a Hugging Face folder or a GGUF.

    Raises:
      RunError: it is none of them, or has no whole checkpoint.
    """
    foreign = (path / "config.json").is_file() and not (path / "checkpoints").is_dir()
    if foreign or path.suffix == ".gguf":
        from models import hf

        checkpoint = hf.load(path)
        return checkpoint.config, checkpoint.params
    try:
        return _own_params(run_of(path), programs)
    except ValueError as error:
        raise RunError(f"init_from: {error}, nor is it a Hugging Face folder") from None


def _own_params(folder: Path, programs: Programs) -> tuple[ModelConfig, Any]:
    """A checkpoint is read whole, so its optimizer's state has to be described as well."""
    fixed = read_json(folder / "config.json")["fixed"]
    model: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in fixed["model"].items()
    }
    theirs = replace(
        programs.recipe,
        model=ModelConfig(**model),
        optimizer=OptimizerConfig(**fixed["optimizer"]),
        guard=GuardConfig(**fixed["guard"]),
    )
    checkpoints = Checkpoints(folder / "checkpoints", RetentionConfig())
    found = checkpoints.load_newest(abstract_state(theirs))
    if found is None:
        raise RunError(f"{folder} holds no whole checkpoint to take parameters from")
    return theirs.model, found[0].params


def check_model(theirs: ModelConfig, ours: ModelConfig) -> None:
    """Refuse to give a model the parameters of another.

    Raises:
      ValueError: they differ in more than `FREE_MODEL_FIELDS`; the message has the options that
        make them agree.
    """
    given, wanted = dataclasses.asdict(theirs), dataclasses.asdict(ours)
    differing = [k for k in given if k not in FREE_MODEL_FIELDS and given[k] != wanted[k]]
    if differing:
        options = ", ".join(f"model.{k} {given[k]} (not {wanted[k]})" for k in differing)
        raise ValueError(f"init_from holds another model than this run's: it has {options}")
