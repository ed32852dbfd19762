"""Learning-rate schedules as pure functions of the step.

A schedule is a small pytree of scalars and not a Python closure: it is an argument of the compiled
step, so runs of every length share one program.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """Warm-up, stable, cooldown (WSD): a trapezoid whose falling side is 1 - sqrt.

    With s = 0, 1, ... total_steps - 1, and start = total_steps - cooldown_steps,

        lr(s) = peak * min(1, (s + 1) / warmup_steps)                      for s <  start
        lr(s) = the same * (1 - sqrt((s - start) / cooldown_steps))        for s >= start

    The 1 - sqrt cooldown over the last 20% of steps matches a cosine of the same length
    (Haegele et al. 2024, arXiv 2405.18392, sections 3 and 4).

    Attributes:
      peak: highest learning rate, reached at step warmup_steps - 1.
      total_steps: optimizer steps of the run.
      warmup_steps: steps of the linear rise; 0 for none.
      cooldown_steps: steps of the fall to (just above) zero at the end; 0 for none.
    """

    peak: float | Float[Array, ""]
    total_steps: int | Int[Array, ""]
    warmup_steps: int | Int[Array, ""]
    cooldown_steps: int | Int[Array, ""]


def make_schedule(
    *, peak: float, total_steps: int, warmup_steps: int, cooldown_steps: int
) -> Schedule:
    """A checked `Schedule`.

    Raises:
      ValueError: a field is negative, peak is 0, or warm-up and cooldown overlap.

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
    return Schedule(peak, total_steps, warmup_steps, cooldown_steps)


def learning_rate(schedule: Schedule, step: int | Int[Array, ""]) -> Float[Array, ""]:
    """lr(s) of `Schedule`, float32; 0 from step total_steps on. Works on traced values."""
    # Counts stay integers until the division: a float32 step loses exactness past 2**24.
    step = jnp.asarray(step, jnp.int32)
    rise = (step + 1) / jnp.maximum(schedule.warmup_steps, 1)
    start = schedule.total_steps - schedule.cooldown_steps
    fallen = (step - start) / jnp.maximum(schedule.cooldown_steps, 1)
    fall = 1.0 - jnp.sqrt(jnp.clip(fallen, 0.0, 1.0))
    rate = schedule.peak * jnp.minimum(rise, 1.0) * fall
    return jnp.where(step < schedule.total_steps, rate, 0.0).astype(jnp.float32)
