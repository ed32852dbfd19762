"""The step of a training run: accumulate, clip, update, and keep nothing that the guard refuses.

    sums over microbatches -> / number of tokens -> clip -> optimizer -> guard -> next state

It differs from the step of a sweep (`step.py`) in what it survives, not in the mathematics.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Key

from experiments.training import guard
from experiments.training.guard import GuardConfig
from experiments.training.schedule import Schedule, learning_rate
from experiments.training.state import TrainState
from models.chunked_loss import decoder_loss
from models.config import ModelConfig

Batch = dict[str, Array]
"""`tokens` (A, B, T+1) int32 and, where not every target counts, `weights` (A, B, T) float32.

A is the number of microbatches of a step.
"""
Sums = dict[str, Float[Array, ""]]
LossFn = Callable[[Any, Batch, Key[Array, ""]], tuple[Float[Array, ""], Sums]]
"""params, one microbatch, key -> sum of the losses of its tokens, and sums by part.

The sums are `cross_entropy` and `z_loss`, which add up to the loss, and `weight`, the tokens.
"""
Step = Callable[[TrainState, Batch, Schedule], tuple[TrainState, dict[str, Array]]]


def make_loss(
    model: ModelConfig,
    *,
    separator: int | None = None,
    rows: jax.sharding.Sharding | None = None,
) -> LossFn:
    """Sum of the next-token losses of a microbatch, z-loss included (`model.z_loss`).

    Large vocabularies go through the head chunk by chunk (`model.loss_chunk`).

    Args:
      model: the decoder. With bfloat16 as compute dtype its float32 parameters are the master
        copy: they are cast where they are used, and gradients come back in float32.
      separator: token that opens a document; attention and positions then start anew at each.
      rows: how inputs and targets (B, T) lie on devices; None for one device.
    """

    def placed(x: Array) -> Array:
        return x if rows is None else jax.lax.with_sharding_constraint(x, rows)

    def loss_fn(params: Any, batch: Batch, key: Key[Array, ""]) -> tuple[Array, Sums]:
        del key  # the decoder has no dropout
        inputs, targets = placed(batch["tokens"][:, :-1]), placed(batch["tokens"][:, 1:])
        segments = None
        if separator is not None:
            segments = jnp.cumsum(inputs == separator, axis=1, dtype=jnp.int32)
        loss, parts = decoder_loss(
            model, params, inputs, targets, segment_ids=segments, mask=batch.get("weights")
        )
        weight = parts["weight"]
        sums = {name: parts[name] * weight for name in ("cross_entropy", "z_loss")}
        return loss * weight, sums | {"weight": weight}

    return loss_fn


def accumulate(loss_fn: LossFn, params: Any, batch: Batch, key: Key[Array, ""]) -> tuple[Any, Sums]:
    """Gradient and parts of the mean loss over all tokens of all microbatches.

    Sums are added up and divided once by the number of tokens, so that microbatches of different
    weight give what one big batch gives: averaging their means would not. Gradients add up in
    float32. A batch in which no token counts gives zeros.
    """
    gradient = jax.grad(loss_fn, has_aux=True)
    count = batch["tokens"].shape[0]
    keys = jax.random.split(key, count)
    first = jax.tree.map(lambda x: x[0], batch)
    if count == 1:
        grads, sums = gradient(params, first, keys[0])
    else:

        def add(total: Any, part: tuple[Batch, Array]) -> tuple[Any, None]:
            new = gradient(params, *part)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, new), None

        shapes = jax.eval_shape(gradient, params, first, keys[0])
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
        (grads, sums), _ = jax.lax.scan(add, zeros, (batch, keys))
    tokens = jnp.where(sums["weight"] > 0, sums["weight"], 1.0)
    grads = jax.tree.map(lambda g, p: (g / tokens).astype(p.dtype), grads, params)
    means = {name: sums[name] / tokens for name in ("cross_entropy", "z_loss")}
    return grads, means | {"weight": sums["weight"]}


def make_train_step(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, config: GuardConfig
) -> Step:
    """A pure training step: state, batch, schedule -> next state, metrics.

        g = grad of the mean loss,   params <- params - lr(step) * direction(clip(g))

    When the guard refuses, nothing of the state changes but `data_index`: the batch was used up.
    Old and new are selected, never blended: 0 * NaN is NaN.

    Metrics are scalars of the state that the step began with: `step`, `data_index`, `loss`
    (= `cross_entropy` + `z_loss`, nats a token), `weight` (tokens that count), `grad_norm` before
    clipping, `update_norm`, `param_norm`, `lr`, `accepted`, `loss_deviation`, `norm_deviation`.
    """

    def step(
        state: TrainState, batch: Batch, schedule: Schedule
    ) -> tuple[TrainState, dict[str, Array]]:
        if state.rng is None or state.guard is None:
            raise ValueError("the state needs rng and guard: pass both to init_state")
        rng, key = jax.random.split(state.rng)
        grads, parts = accumulate(loss_fn, state.params, batch, key)
        loss = parts["cross_entropy"] + parts["z_loss"]
        direction, opt_state = optimizer.update(grads, state.opt_state, state.params)
        lr = learning_rate(schedule, state.step)
        updates = jax.tree.map(lambda d: -lr * d, direction)
        norms = {"grad_norm": optax.tree.norm(grads), "update_norm": optax.tree.norm(updates)}
        judgement = guard.judge(state.guard, config, loss=loss, **norms)
        proposed = TrainState(
            optax.apply_updates(state.params, updates),
            opt_state,
            state.step + 1,
            state.data_index,
            rng,
            guard.remember(state.guard, loss=loss, grad_norm=norms["grad_norm"]),
        )
        kept = select(judgement.accepted, proposed, state)
        metrics = {
            "step": state.step,
            "data_index": state.data_index,
            "loss": loss,
            **parts,
            **norms,
            "param_norm": optax.tree.norm(state.params),
            "lr": lr,
            "accepted": judgement.accepted,
            "loss_deviation": judgement.loss_deviation,
            "norm_deviation": judgement.norm_deviation,
        }
        return replace(kept, data_index=state.data_index + 1), metrics

    return step


def select(accepted: Array, new: TrainState, old: TrainState) -> TrainState:
    """`new` where accepted, else `old`, leaf by leaf."""
    return jax.tree.map(lambda a, b: jnp.where(accepted, a, b), new, old)


def reset_guard(state: TrainState, config: GuardConfig) -> TrainState:
    """The state with an empty guard window: the loss has a new level."""
    fresh = guard.empty_window(config)
    # By way of the host: a device array of one process cannot be put on all of them.
    placed = jax.tree.map(
        lambda a, b: jax.device_put(np.asarray(a), b.sharding), fresh, state.guard
    )
    return replace(state, guard=placed)
