"""How a run begins: from nothing, from somebody's parameters, or from another run's state."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.training.checkpoint import read_json
from experiments.training.config import TrainConfig, run_of
from experiments.training.guard import GuardConfig
from experiments.training.optimizer import OptimizerConfig
from experiments.training.programs import Programs, abstract_state
from experiments.training.run_checkpoints import (
    Checkpoints,
    RetentionConfig,
    Saved,
    load,
)
from experiments.training.run_folder import RunError
from experiments.training.state import TrainState
from models.config import ModelConfig


def begin(config: TrainConfig, programs: Programs) -> tuple[TrainState, Saved | None]:
    """The first state of a run, and the checkpoint that it is, when it is one.

    Raises:
      RunError: there is no such checkpoint.
      ValueError: it holds another model.
    """
    if config.branch_from:
        return branch(config, programs)
    if config.init_from:
        return programs.with_params(read_params(Path(config.init_from), programs)), None
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


def read_params(path: Path, programs: Programs) -> Any:
    """Parameters from a run of ours (its newest whole checkpoint) or a Hugging Face folder.

    Raises:
      RunError: it is neither, or has no whole checkpoint.
      ValueError: its model is not ours.
    """
    if not (path / "checkpoints").is_dir() and (path / "config.json").is_file():
        from models.hf import load_folder

        return load_folder(path, param_dtype=programs.config.model.param_dtype).params
    try:
        folder = run_of(path)
    except ValueError as error:
        raise RunError(f"init_from: {error}, nor a Hugging Face folder") from None
    return _own_params(folder, programs)


def _own_params(folder: Path, programs: Programs) -> Any:
    """A checkpoint is read whole, so its optimizer's state has to be described as well."""
    fixed = read_json(folder / "config.json")["fixed"]
    theirs = replace(
        programs.recipe,
        model=ModelConfig(**_tuples(fixed["model"])),
        optimizer=OptimizerConfig(**fixed["optimizer"]),
        guard=GuardConfig(**fixed["guard"]),
    )
    found = Checkpoints(folder / "checkpoints", RetentionConfig()).load_newest(
        abstract_state(theirs)
    )
    if found is None:
        raise RunError(f"{folder} holds no whole checkpoint to take parameters from")
    return found[0].params


def _tuples(value: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
