"""Loss and greedy hit of every token, without the logits of a whole long sequence in memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.config import ModelConfig
from models.decoder import bind

CHUNK = 1024  # positions whose logits exist at one time


@functools.partial(jax.jit, static_argnums=0)
def token_losses(
    config: ModelConfig, params: Any, tokens: Int[Array, "B T+1"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """-log p(token t+1 | tokens 0 .. t) in nats (float32), and whether it is the likeliest token.

    A run of hits is what greedy decoding would have written: each is right given those before it.

    Raises:
      ValueError: the sequence is longer than `config.max_seq_len`.
    """
    model = bind(config, params)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    states = model.backbone(model.embedding(inputs))
    rows, length, width = states.shape
    chunk = min(CHUNK, length)
    padding = -length % chunk
    states = jnp.pad(states, ((0, 0), (0, padding), (0, 0)))
    padded = jnp.pad(targets, ((0, 0), (0, padding)))

    def score(part: tuple[Array, Array]) -> tuple[Array, Array]:
        logits = model.logits(part[0])
        wanted = jnp.take_along_axis(logits, part[1][..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - wanted, logits.argmax(-1) == part[1]

    parts = states.reshape(rows, -1, chunk, width).swapaxes(0, 1)
    nll, hits = jax.lax.map(score, (parts, padded.reshape(rows, -1, chunk).swapaxes(0, 1)))
    nll, hits = (x.swapaxes(0, 1).reshape(rows, -1)[:, :length] for x in (nll, hits))
    return nll, hits
