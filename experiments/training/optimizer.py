"""AdamW with global-norm clipping and decoupled decay that spares norms and embeddings."""

from dataclasses import dataclass
from typing import Any

import jax
import optax


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101), everything but the learning rate."""

    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.99  # decay of the second; .99 below about 0.5M tokens a batch (Porian 2024)
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.1  # per step, times the learning rate
    clip_norm: float = 1.0  # largest global gradient norm

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        for name in ("eps", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must be 0 or more, got {self.weight_decay}")


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Gradients to the update direction; the step multiplies it by minus the learning rate.

    Leaving the learning rate out lets one compiled step serve any schedule.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
    )


def decayed(params: Any) -> Any:
    """True for the matrices that weight decay pulls on: not norm scales, not token embeddings.

    Decided by name, because the scales of stacked layers are matrices too.
    """

    def is_decayed(path: tuple, _: Any) -> bool:
        names = jax.tree_util.keystr(path, simple=True, separator="/").lower()
        return not ("norm" in names or "embedding" in names)

    return jax.tree_util.tree_map_with_path(is_decayed, params)
