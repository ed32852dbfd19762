"""Learning-rate schedules as pure functions of the step.

A schedule is a small pytree of scalars and not a Python closure: it is an argument of the compiled
step, so runs of every length share one program.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Shape = Literal["1-sqrt", "linear", "cosine"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """Warm-up, stable, cooldown (WSD): a trapezoid with a choice of falling side.

    With s = 0, 1, ... total_steps - 1, start = total_steps - cooldown_steps, and
    x = (s - start) / cooldown_steps,

        lr(s) = peak * min(1, (s + 1) / warmup_steps)                      for s <  start
        lr(s) = the same * (final + (1 - final) * fall(x))                 for s >= start

        fall(x) = 1 - sqrt(x)  |  1 - x  |  (1 + cos(pi x)) / 2

    The 1 - sqrt cooldown over the last 20% of steps matches a cosine of the same length
    (Haegele et al. 2024, arXiv 2405.18392, sections 3 and 4). Warm-up and cosine without a stable
    part is the case cooldown_steps = total_steps - warmup_steps, shape = "cosine". Before `start`
    the rate does not depend on the cooldown, so a cooldown may branch from any longer stable run.

    Attributes:
      peak: highest learning rate, reached at step warmup_steps - 1.
      total_steps: optimizer steps of the run.
      warmup_steps: steps of the linear rise; 0 for none.
      cooldown_steps: steps of the fall to (just above) zero at the end; 0 for none.
      shape: of the fall: "1-sqrt", "linear" or "cosine".
      final: part of the peak that the fall tends to.
    """

    peak: float | Float[Array, ""]
    total_steps: int | Int[Array, ""]
    warmup_steps: int | Int[Array, ""]
    cooldown_steps: int | Int[Array, ""]
    shape: Shape = field(default="1-sqrt", metadata={"static": True})
    final: float = field(default=0.0, metadata={"static": True})


def make_schedule(
    *,
    peak: float,
    total_steps: int,
    warmup_steps: int,
    cooldown_steps: int,
    shape: Shape = "1-sqrt",
    final: float = 0.0,
) -> Schedule:
    """A checked `Schedule`.

    Raises:
      ValueError: a field is negative, peak is 0, warm-up and cooldown overlap, `shape` is
        unknown or `final` is outside [0, 1].

    >>> schedule = make_schedule(peak=1.0, total_steps=10, warmup_steps=2, cooldown_steps=4)
    >>> [round(float(learning_rate(schedule, s)), 2) for s in range(10)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.29, 0.13]
    """
    if not peak > 0:
        raise ValueError(f"peak must be positive, got {peak}")
    for name, value in (("warmup_steps", warmup_steps), ("cooldown_steps", cooldown_steps)):
        if value < 0:
            raise ValueError(f"{name} must be 0 or more, got {value}")
    if warmup_steps + cooldown_steps > total_steps:
        raise ValueError(
            f"warmup_steps {warmup_steps} + cooldown_steps {cooldown_steps} exceed total_steps "
            f"{total_steps}; shorten one of them"
        )
    if shape not in get_args(Shape):
        raise ValueError(f"shape must be one of {get_args(Shape)}, got {shape!r}")
    if not 0 <= final <= 1:
        raise ValueError(f"final must be a part of the peak, in [0, 1], got {final}")
    return Schedule(peak, total_steps, warmup_steps, cooldown_steps, shape, final)


def learning_rate(schedule: Schedule, step: int | Int[Array, ""]) -> Float[Array, ""]:
    """lr(s) of `Schedule`, float32; 0 from step total_steps on. Works on traced values."""
    # Counts stay integers until the division: a float32 step loses exactness past 2**24.
    step = jnp.asarray(step, jnp.int32)
    rise = (step + 1) / jnp.maximum(schedule.warmup_steps, 1)
    start = schedule.total_steps - schedule.cooldown_steps
    fallen = (step - start) / jnp.maximum(schedule.cooldown_steps, 1)
    fall = _fall(jnp.clip(fallen, 0.0, 1.0), schedule.shape)
    if schedule.final:
        fall = schedule.final + (1.0 - schedule.final) * fall
    rate = schedule.peak * jnp.minimum(rise, 1.0) * fall
    return jnp.where(step < schedule.total_steps, rate, 0.0).astype(jnp.float32)


def _fall(x: Float[Array, ""], shape: Shape) -> Float[Array, ""]:
    if shape == "linear":
        return 1.0 - x
    if shape == "cosine":
        return 0.5 * (1.0 + jnp.cos(jnp.pi * x))
    return 1.0 - jnp.sqrt(x)
