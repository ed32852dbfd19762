"""The compiled programs of a run: the state before the first step, and the step.

Steps are compiled ahead of time, one for each shape of batch (and RoPE): a batch of an
unforeseen shape is an error and never a silent second compilation. Their number is the compile
count of a run, which grows by one where a phase of the curriculum begins and not otherwise.
"""

import functools
import time
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.training.config import TrainConfig
from experiments.training.curriculum import Phase
from experiments.training.guard import GuardConfig, empty_window
from experiments.training.optimizer import OptimizerConfig, make_optimizer
from experiments.training.schedule import Schedule
from experiments.training.state import TrainState, init_state
from experiments.training.train_step import Batch, make_loss, make_train_step
from models.config import ModelConfig
from models.decoder import init_params
from models.sharding import BATCH, check_batch, shardings

TOKENS = P(None, BATCH, None)  # A, B, T + 1: a last axis that context does not divide
# Numbers of a schedule are arguments; equal ones keep schedules of one shape in one cache entry.
_NO_STEPS: dict[str, Any] = {"total_steps": 0, "warmup_steps": 0, "cooldown_steps": 0}
ROWS = P(BATCH, "context")  # inputs and targets of a microbatch


@dataclass(frozen=True)
class Recipe:
    """What the programs depend on beside the shape of a batch; the key of their cache."""

    model: ModelConfig
    optimizer: OptimizerConfig
    guard: GuardConfig
    mesh: Mesh
    separator: int | None  # token that opens a document; None for no document mask
    options: tuple[tuple[str, str], ...]  # of XLA
    like: Schedule  # its static fields are part of the program, its numbers are not


@dataclass(frozen=True)
class Compiled:
    """A step for one shape of batch."""

    run: Any  # (state, batch, schedule) -> (state, metrics)
    seconds: float  # that compiling took
    temporary_bytes: int | None  # of one device, beside state and batch


@functools.lru_cache(maxsize=16)
def abstract_state(recipe: Recipe) -> TrainState:
    """Shapes, dtypes and shardings of the state."""
    shapes = jax.eval_shape(functools.partial(_init, recipe), jax.random.key(0))
    places = shardings(shapes, recipe.mesh)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, places
    )


def _init(recipe: Recipe, key: jax.Array) -> TrainState:
    # Two streams from one seed: parameters, and whatever is random in a step.
    params_key, rng = jax.random.split(key)
    params = init_params(recipe.model, params_key)
    optimizer = make_optimizer(recipe.optimizer)
    return init_state(params, optimizer, rng=rng, guard=empty_window(recipe.guard))


@functools.lru_cache(maxsize=16)
def _compile_init(recipe: Recipe) -> Any:
    places = jax.tree.map(lambda x: x.sharding, abstract_state(recipe))
    return jax.jit(
        functools.partial(_init, recipe),
        out_shardings=places,
        compiler_options=dict(recipe.options) or None,
    )


@functools.lru_cache(maxsize=32)
def _compile_step(recipe: Recipe, shapes: tuple[tuple[str, tuple[int, ...], str], ...]) -> Compiled:
    begun = time.monotonic()
    rows = NamedSharding(recipe.mesh, ROWS)
    loss_fn = make_loss(recipe.model, separator=recipe.separator, rows=rows)
    step = make_train_step(loss_fn, make_optimizer(recipe.optimizer), recipe.guard)
    state = abstract_state(recipe)
    places = jax.tree.map(lambda x: x.sharding, state)
    tokens = NamedSharding(recipe.mesh, TOKENS)
    batch = {name: jax.ShapeDtypeStruct(s, dtype, sharding=tokens) for name, s, dtype in shapes}
    everywhere = NamedSharding(recipe.mesh, P())
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(places, everywhere))
    with jax.set_mesh(recipe.mesh):  # attention looks for it
        lowered = jitted.lower(state, batch, recipe.like)
    compiled = lowered.compile(compiler_options=dict(recipe.options) or None)
    memory = compiled.memory_analysis()
    return Compiled(compiled, time.monotonic() - begun, getattr(memory, "temp_size_in_bytes", None))


class Programs:
    """The programs of one run on one mesh."""

    def __init__(self, config: TrainConfig, mesh: Mesh, *, separator: int | None):
        self.config, self.mesh = config, mesh
        self.recipe = Recipe(
            config.model,
            config.optimizer,
            config.guard,
            mesh,
            separator,
            config.xla_options,
            _arguments(replace(config.schedule.make(), peak=1.0, **_NO_STEPS), 1.0),
        )
        self.used: dict[Any, Compiled] = {}
        for phase in config.curriculum().phases:
            check_batch(phase.batch_size // config.accumulation, phase.seq_len, mesh)

    @property
    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of the state."""
        return abstract_state(self.recipe)

    def fresh(self) -> TrainState:
        """The state before the first step, made where it will live."""
        return _compile_init(self.recipe)(jax.random.key(self.config.seed))

    def with_params(self, params: Any) -> TrainState:
        """A fresh state with given parameters in any dtype.

        Raises:
          ValueError: they are not this model's in name or shape.
        """
        wanted = _named(self.abstract.params)
        given = _named(params)
        if given.keys() != wanted.keys():
            raise ValueError(
                f"init_from holds other parameters than this model: "
                f"{sorted(given.keys() ^ wanted.keys())}"
            )
        for name, leaf in given.items():
            if leaf.shape != wanted[name].shape:
                raise ValueError(
                    f"init_from: {name} has shape {list(leaf.shape)}, this model's has "
                    f"{list(wanted[name].shape)}"
                )
        placed = jax.tree.map(
            lambda x, w: jax.device_put(np.asarray(x).astype(w.dtype), w.sharding),
            params,
            self.abstract.params,
        )
        return replace(self.fresh(), params=placed)

    def place(self, batch: dict[str, np.ndarray]) -> Batch:
        """A host's batch on the devices: each takes its rows."""
        sharding = NamedSharding(self.mesh, TOKENS)
        return {
            name: jax.make_array_from_callback(x.shape, sharding, x.__getitem__)
            for name, x in batch.items()
        }

    def step_for(self, phase: Phase, batch: Batch) -> Compiled:
        """The step for batches like this one, in this phase."""
        shapes = tuple((name, x.shape, str(x.dtype)) for name, x in sorted(batch.items()))
        rope = {"rope_theta": phase.rope_theta, "rope_scaling": phase.rope_scaling}
        key = (*rope.values(), shapes)
        if key not in self.used:
            model = replace(self.recipe.model, **rope)
            self.used[key] = _compile_step(replace(self.recipe, model=model), shapes)
        return self.used[key]

    def schedule(self, lr_factor: float) -> Schedule:
        """The schedule as an argument of the step, its peak times a factor."""
        return _arguments(self.config.schedule.make(), lr_factor)

    def counter(self, value: int) -> jax.Array:
        """An integer of the state."""
        return jax.device_put(np.int32(value), NamedSharding(self.mesh, P()))


def _arguments(schedule: Schedule, lr_factor: float) -> Schedule:
    # numpy scalars and not Python's: a weak type would make another program.
    numbers: dict[str, Any] = {
        "peak": np.float32(schedule.peak * lr_factor),
        "total_steps": np.int32(schedule.total_steps),
        "warmup_steps": np.int32(schedule.warmup_steps),
        "cooldown_steps": np.int32(schedule.cooldown_steps),
    }
    return replace(schedule, **numbers)


def _named(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in leaves}
