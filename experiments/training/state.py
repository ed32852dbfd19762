"""Everything that a training run is, as one pytree."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, Key

from experiments.training.guard import GuardWindow


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """State between two steps.

    Attributes:
      params: the model's parameters (the float32 master copy).
      opt_state: the optimizer's moments.
      step: optimizer steps taken; drives the schedule.
      data_index: batches consumed; drives the data. Apart from `step`, so that batches can be
        skipped without moving the schedule.
      rng: key of whatever is random in a step; None in a sweep, whose steps are not.
      guard: what the in-step guard knows; None in a sweep, which ends a point at the first NaN.
    """

    params: Any
    opt_state: optax.OptState
    step: Int[Array, ""]
    data_index: Int[Array, ""]
    rng: Key[Array, ""] | None = None
    guard: GuardWindow | None = None


def init_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    *,
    rng: Key[Array, ""] | None = None,
    guard: GuardWindow | None = None,
) -> TrainState:
    """State before the first step."""
    return TrainState(params, optimizer.init(params), jnp.int32(0), jnp.int32(0), rng, guard)
