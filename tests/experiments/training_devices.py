"""The tiny run on simulated devices; prints what the test compares as JSON.

python training_devices.py MESH...     names in MESHES
"""

import json
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from training_runs import TINY, in_folder, make_dataset, rows_of

from experiments.training.loop import Trainer
from experiments.training.programs import Programs
from models.sharding import MeshConfig, make_mesh

MODEL = replace(TINY.model, num_layers=2, attention_implementation="xla")  # fit for a ring
SCHEDULE = replace(TINY.schedule, total_steps=12, cooldown_steps=4)
MESHES = {
    "one": (1, MeshConfig()),
    "data": (2, MeshConfig(data=2)),
    "fsdp x tensor": (4, MeshConfig(fsdp=2, tensor=2)),
    "fsdp x context x tensor": (8, MeshConfig(fsdp=2, context=2, tensor=2)),
}


def config_in(folder: Path, mesh: MeshConfig):
    config = in_folder(folder, model=MODEL, schedule=SCHEDULE, mesh=mesh)
    return replace(config, checkpoint=replace(config.checkpoint, every=4))


def losses(config, devices: int, stop_after: int | None = None) -> list[float]:
    trainer: Any = None

    def stop() -> bool:
        return stop_after is not None and trainer.position.step >= stop_after - 1

    trainer = Trainer(config, make_dataset(), devices=jax.devices()[:devices], stop=stop)
    trainer.run()
    return [row["loss"] for row in rows_of(config)]


def hlo(devices: int, mesh: MeshConfig) -> str:
    """The program of a step as XLA runs it on one of the devices."""
    trainer = Trainer(
        config_in(Path("unused"), mesh), make_dataset(), devices=jax.devices()[:devices]
    )
    programs: Programs = trainer.programs
    batch = programs.place(trainer.source.at(0))
    return programs.step_for(trainer.curriculum.phase_at(0), batch).run.as_text()


def main() -> None:
    folder, names = Path(tempfile.mkdtemp()), sys.argv[1:]
    results: dict[str, Any] = {}
    for name in names:
        devices, mesh = MESHES[name]
        results[name] = losses(config_in(folder / name, mesh), devices)
    # One run that moves to another number of devices every 4 steps, by its checkpoints.
    for name, until in zip((names[0], names[-1], names[-2]), (4, 8, None), strict=True):
        devices, mesh = MESHES[name]
        results["moved"] = losses(config_in(folder / "moved", mesh), devices, until)
    results["hlo"] = {name: hlo(*MESHES[name]) for name in names}
    results["share"] = {name: share(*MESHES[name]) for name in names}
    json.dump(results, sys.stdout)


def share(devices: int, mesh: MeshConfig) -> list[float]:
    """Which part of a block's matrix, and of its first moment, lies on one device."""
    config = config_in(Path("unused"), mesh)
    programs = Programs(config, make_mesh(mesh, jax.devices()[:devices]), separator=None)
    state: Any = programs.abstract
    arrays = [
        tree["blocks"]["mlp"]["up"]["kernel"] for tree in (state.params, state.opt_state[1].mu)
    ]
    return [math.prod(x.sharding.shard_shape(x.shape)) / math.prod(x.shape) for x in arrays]


if __name__ == "__main__":
    main()
