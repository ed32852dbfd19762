"""The in-step guard: is this step's loss and gradient norm one that training should follow?

It runs inside the compiled step and decides on numbers that are already reduced over all devices,
so every device decides alike. A value x is compared with the accepted values before it by

    z = (x - median) / max(1.4826 * MAD, floor)

and refused above `deviations`. Refused values never enter the window: a spike that did would raise
the threshold and hide the next one, and a NaN would make every later comparison false.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MAD_TO_SIGMA = 1.4826  # of a normal distribution


@dataclass(frozen=True)
class GuardConfig:
    """When a step is refused. Values that are not finite always are."""

    deviations: float = 8.0  # robust deviations above the median; inf refuses non-finite ones only
    window: int = 128  # accepted steps that are remembered
    min_history: int = (
        64  # accepted steps before the threshold applies: the loss falls fast at first
    )
    loss_floor: float = 0.02  # nats; the smallest deviation, so that a flat loss is no hair trigger
    norm_floor: float = 0.1  # the same for the logarithm of the gradient norm

    def __post_init__(self) -> None:
        for name in ("deviations", "loss_floor", "norm_floor"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 2 <= self.min_history <= self.window:
            raise ValueError(
                f"min_history must lie in [2, window={self.window}], got {self.min_history}"
            )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GuardWindow:
    """Ring buffers of the last accepted values, NaN where none is yet.

    Attributes:
      losses: (W,) float32, nats.
      log_norms: (W,) float32, logarithm of the global gradient norm.
      count: accepted steps so far; the next goes to place count % W.
    """

    losses: Float[Array, " W"]
    log_norms: Float[Array, " W"]
    count: Int[Array, ""]


def empty_window(config: GuardConfig) -> GuardWindow:
    """A window that has seen nothing."""
    # Two arrays, since a donated state may not hold one buffer twice.
    return GuardWindow(
        jnp.full(config.window, jnp.nan, jnp.float32),
        jnp.full(config.window, jnp.nan, jnp.float32),
        jnp.int32(0),
    )


@dataclass(frozen=True)
class Judgement:
    """Whether a step is accepted, and how far its values lie above the window's medians."""

    accepted: Bool[Array, ""]
    loss_deviation: Float[Array, ""]
    norm_deviation: Float[Array, ""]


def judge(
    window: GuardWindow,
    config: GuardConfig,
    *,
    loss: Float[Array, ""],
    grad_norm: Float[Array, ""],
    update_norm: Float[Array, ""],
) -> Judgement:
    """The guard's decision. Deviations are NaN while the window is empty."""
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & jnp.isfinite(update_norm)
    z_loss = _deviation(window.losses, loss, config.loss_floor)
    z_norm = _deviation(window.log_norms, _log_norm(grad_norm), config.norm_floor)
    beyond = (z_loss > config.deviations) | (z_norm > config.deviations)
    settled = window.count >= config.min_history
    return Judgement(finite & ~(settled & beyond), z_loss, z_norm)


def remember(
    window: GuardWindow, *, loss: Float[Array, ""], grad_norm: Float[Array, ""]
) -> GuardWindow:
    """The window after an accepted step."""
    place = window.count % window.losses.shape[0]
    return GuardWindow(
        window.losses.at[place].set(loss),
        window.log_norms.at[place].set(_log_norm(grad_norm)),
        window.count + 1,
    )


def _log_norm(grad_norm: Float[Array, ""]) -> Float[Array, ""]:
    # A gradient of zero is legitimate (no token of the batch counts), its logarithm is not.
    return jnp.log(jnp.maximum(grad_norm, 1e-30))


def _deviation(past: Float[Array, " W"], value: Array, floor: float) -> Float[Array, ""]:
    median = jnp.nanmedian(past)
    mad = jnp.nanmedian(jnp.abs(past - median))
    return (value - median) / jnp.maximum(MAD_TO_SIGMA * mad, floor)
