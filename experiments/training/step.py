"""One training step, and many of them in one compiled call.

Small models are launch-bound: the time goes into starting work, not doing it. So the token stream
lives on the device, the host sends only where each sequence starts, and `make_chunk` runs many
steps in one call. The number of steps is an argument of that call, not part of its shape: one
program serves runs of every length, and the last, shorter chunk needs no other.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from experiments.training.schedule import Schedule, learning_rate
from experiments.training.state import TrainState

LossFn = Callable[[Any, Array], Array]  # params, tokens (B, T+1) -> scalar loss
Metrics = dict[str, Array]
METRICS = ("loss", "grad_norm", "update_norm", "lr")


def make_step(
    loss_fn: LossFn, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Int[Array, "B T+1"], Schedule], tuple[TrainState, Metrics]]:
    """A pure training step: state, batch, schedule -> next state, metrics.

        g = grad loss(params, batch),   params <- params - lr(step) * direction(g)

    Metrics are float32 scalars: `loss` before the update, `grad_norm` before clipping,
    `update_norm` of what was added to the parameters (it rises before a loss spike does), `lr`.
    """

    def step(
        state: TrainState, batch: Int[Array, "B T+1"], schedule: Schedule
    ) -> tuple[TrainState, Metrics]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        direction, opt_state = optimizer.update(grads, state.opt_state, state.params)
        lr = learning_rate(schedule, state.step)
        updates = jax.tree.map(lambda d: -lr * d, direction)
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "update_norm": optax.tree.norm(updates),
            "lr": lr,
        }
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.step + 1, state.data_index + 1), metrics

    return step


def gather_batch(
    stream: Int[Array, " M"], starts: Int[Array, "B"], seq_len: int
) -> Int[Array, "B T+1"]:
    """Sequences of `seq_len + 1` tokens from `starts`, as int32: inputs and shifted targets."""
    return stream[starts[:, None] + jnp.arange(seq_len + 1)].astype(jnp.int32)


def make_chunk(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, *, seq_len: int
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Compiled `chunk(state, stream, starts, count, schedule)`: `count` steps in one call.

    Args of the result:
      state: donated; use the returned one.
      stream: (M,) the token stream, on the device.
      starts: (C, B) int32, first token of each sequence of each step; C is the longest chunk.
      count: how many of the C steps to take.
      schedule: learning rates.

    Returns of the result: the state after `count` steps and metrics of shape (C,), NaN from
    `count` on.
    """
    step = make_step(loss_fn, optimizer)

    def chunk(
        state: TrainState,
        stream: Int[Array, " M"],
        starts: Int[Array, "C B"],
        count: Int[Array, ""],
        schedule: Schedule,
    ) -> tuple[TrainState, Metrics]:
        def body(i: Array, carry: tuple[TrainState, Metrics]) -> tuple[TrainState, Metrics]:
            state, log = carry
            state, metrics = step(state, gather_batch(stream, starts[i], seq_len), schedule)
            log = {name: log[name].at[i].set(metrics[name]) for name in METRICS}
            return state, log

        empty = {name: jnp.full(starts.shape[0], jnp.nan, jnp.float32) for name in METRICS}
        return jax.lax.fori_loop(0, count, body, (state, empty))

    return jax.jit(chunk, donate_argnums=0)


def make_evaluate(loss_fn: LossFn) -> Callable[[Any, Int[Array, "E B T+1"]], Float[Array, ""]]:
    """Compiled mean of `loss_fn` over E equal batches, one after another to bound memory."""

    def evaluate(params: Any, batches: Int[Array, "E B T+1"]) -> Float[Array, ""]:
        return jax.lax.map(lambda batch: loss_fn(params, batch), batches).mean()

    return jax.jit(evaluate)
