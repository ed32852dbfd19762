"""AdamW and Muon with global-norm clipping and decoupled decay that spares norms and embeddings."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import optax
from optax.contrib import MuonDimensionNumbers

Name = Literal["adamw", "muon"]
# RMS of an AdamW update in practice: at this scale Muon takes AdamW's learning rates and decay
# (Liu et al. 2025, arXiv 2502.16982, section 2.2).
MUON_RMS = 0.2


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, everything but the learning rate.

    `adamw` is Loshchilov & Hutter 2019 (arXiv 1711.05101). `muon` (Jordan et al. 2024) replaces the
    momentum of each matrix of a block by its nearest semi-orthogonal one, scaled to an update RMS
    of 0.2; embedding, head and norms stay with Adam, there with Nesterov momentum too.
    """

    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.99  # decay of the second; .99 below about 0.5M tokens a batch (Porian 2024)
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.1  # per step, times the learning rate
    clip_norm: float = 1.0  # largest global gradient norm
    name: Name = "adamw"
    momentum: float = 0.95  # of Muon, Nesterov

    def __post_init__(self) -> None:
        if self.name not in get_args(Name):
            raise ValueError(f"name must be one of {get_args(Name)}, got {self.name!r}")
        for name in ("beta1", "beta2", "momentum"):
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
    if config.name == "muon":
        direction = _muon(config)
    else:
        direction = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        direction,
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
    )


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.contrib.muon(
        learning_rate=-1.0,  # optax turns the sign; the step turns it
        beta=config.momentum,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        eps=config.eps,
        muon_weight_dimension_numbers=muon_axes,
        consistent_rms=MUON_RMS,
    )


def muon_axes(params: Any) -> Any:
    """Which axes of each block matrix are contracted with its input, and which it produces.

    None marks what AdamW serves. Axis 0 of a block's parameter counts layers: each layer's matrix
    is orthogonalised by itself, over all of its heads together.
    """

    def axes(path: tuple, leaf: Any) -> MuonDimensionNumbers | None:
        names = jax.tree_util.keystr(path, simple=True, separator="/").lower()
        if not names.startswith("blocks/") or not names.endswith("kernel"):
            return None
        rest = tuple(range(1, leaf.ndim))
        # The output projection contracts heads and head dim; all others contract their first axis.
        split = len(rest) - 1 if "attention/output" in names else 1
        return MuonDimensionNumbers(rest[:split], rest[split:])

    return jax.tree_util.tree_map_with_path(axes, params)


def decayed(params: Any) -> Any:
    """True for what weight decay pulls on: not norm scales, not biases, not token embeddings.

    Decided by name, because the scales of stacked layers are matrices too.
    """

    def is_decayed(path: tuple, _: Any) -> bool:
        names = jax.tree_util.keystr(path, simple=True, separator="/").lower()
        return not any(spared in names for spared in ("norm", "bias", "embedding"))

    return jax.tree_util.tree_map_with_path(is_decayed, params)
