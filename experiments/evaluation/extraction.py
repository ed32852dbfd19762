"""Which training sequences a model gives back, word for word or nearly.

Carlini et al. 2022 (arXiv:2202.07646, section 3.1): a sequence is extractable with k tokens of
context if the k tokens before it make the model emit it under greedy decoding. The continuation
of a passage is the same for every k, so that prompts of different lengths are compared on the
same text:

    passage   . . . . . . . . . . . . [ prompt of k tokens ][ continuation of n tokens ]
                                                            ^ longest k
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int, Int32, Int64

from models.config import ModelConfig
from models.decoder import bind

CHUNK = 1 << 24  # tokens of a stream that are searched at once


@dataclass(frozen=True)
class Continuations:
    """What a model made of the prompts of one length.

    Attributes:
      tokens: (B, n) the greedy continuations.
      matched: (B,) leading tokens that are those of the text; n is an exact match.
      similarity: (B,) 1 - edit distance / n to the text, in [0, 1].
      loss: (B,) mean cross-entropy of the text's own continuation, nats per token.
    """

    tokens: Int32[np.ndarray, "B n"]
    matched: Int64[np.ndarray, " B"]
    similarity: Float64[np.ndarray, " B"]
    loss: Float64[np.ndarray, " B"]


def continue_sequences(
    config: ModelConfig,
    params: Any,
    sequences: Int[np.ndarray, "B S"],
    *,
    prompt: int,
    continuation: int,
    batch_size: int = 64,
) -> Continuations:
    """Greedy continuations of the prompts of sequences, compared with the text.

    Args:
      config: the model's.
      params: its parameters.
      sequences: tokens; the last `continuation` are the text to be found, before them the prompt.
      prompt: k, tokens shown.
      continuation: n, tokens asked for.
      batch_size: sequences at once; results do not depend on it but for rounding.

    Raises:
      ValueError: lengths do not fit, or the model's logits are not finite.
    """
    for name, value in (("prompt", prompt), ("continuation", continuation)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    length = prompt + continuation
    if sequences.ndim != 2 or not len(sequences) or sequences.shape[1] < length:
        raise ValueError(
            f"sequences must be at least one of at least {length} tokens (prompt {prompt} and "
            f"continuation {continuation}), got shape {list(sequences.shape)}"
        )
    if length > config.max_seq_len:
        raise ValueError(
            f"prompt {prompt} and continuation {continuation} are longer than the model's "
            f"max_seq_len {config.max_seq_len}: use shorter prompts"
        )
    rows = np.asarray(sequences[:, -length:], np.int32)
    made, losses = [], []
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        # One shape of batch, so one compilation for each length.
        padded = np.resize(part, (batch_size, length))
        tokens, loss = _continue(config, prompt, params, jnp.asarray(padded))
        made.append(np.asarray(tokens)[: len(part)])
        losses.append(np.asarray(loss, np.float64)[: len(part)])
    loss = np.concatenate(losses)
    if not np.isfinite(loss).all():
        bad = int((~np.isfinite(loss)).sum())
        raise ValueError(f"params: the loss of {bad} of {len(loss)} sequences is not finite")
    tokens, text = np.concatenate(made), rows[:, prompt:]
    same = np.cumprod(tokens == text, axis=1).sum(axis=1)
    return Continuations(tokens, same, 1.0 - edit_distances(tokens, text) / continuation, loss)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _continue(
    config: ModelConfig, prompt: int, params: Any, rows: Int[Array, "B S"]
) -> tuple[Int[Array, "B n"], Float[Array, " B"]]:
    """Greedy tokens after the first `prompt` of each row, and the loss of the rows' own.

    Every new token costs a pass over the whole row: no cache of keys and values, which for rows
    this short would save seconds. What stands behind a position is not seen from it.
    """
    model = bind(config, params)
    length = rows.shape[1]

    def states(tokens: Array) -> Array:
        return model.backbone(model.embedding(tokens))

    def step(i: Array, tokens: Array) -> Array:
        last = jax.lax.dynamic_slice_in_dim(states(tokens), i - 1, 1, axis=1)
        best = jnp.argmax(model.logits(last)[:, 0], axis=-1).astype(tokens.dtype)
        return jax.lax.dynamic_update_slice_in_dim(tokens, best[:, None], i, axis=1)

    empty = rows.at[:, prompt:].set(0)
    made = jax.lax.fori_loop(prompt, length, step, empty)[:, prompt:]
    logits = model.logits(states(rows)[:, prompt - 1 : -1])
    chances = jax.nn.log_softmax(logits.astype(jnp.float32))
    own = jnp.take_along_axis(chances, rows[:, prompt:, None], axis=-1)[..., 0]
    return made, -jnp.mean(own, axis=1)


def edit_distances(a: Int[np.ndarray, "B n"], b: Int[np.ndarray, "B m"]) -> Int64[np.ndarray, " B"]:
    """Levenshtein distance of each row of `a` to that of `b`: insert, delete or replace a token.

    >>> edit_distances(np.array([[1, 2, 3], [1, 2, 3]]), np.array([[2, 3, 4], [1, 9, 3]]))
    array([2, 1])
    """
    before = np.tile(np.arange(b.shape[1] + 1), (len(a), 1))
    for i in range(a.shape[1]):
        row = np.empty_like(before)
        row[:, 0] = i + 1
        differs = a[:, i, None] != b
        for j in range(b.shape[1]):
            around = np.minimum(before[:, j + 1], row[:, j]) + 1
            row[:, j + 1] = np.minimum(around, before[:, j] + differs[:, j])
        before = row
    return before[:, -1]


def count_occurrences(
    stream: Int[np.ndarray, " n"], sequences: Sequence[Int[np.ndarray, " s"]]
) -> Int64[np.ndarray, " m"]:
    """How often each sequence of tokens occurs in a stream, overlaps included.

    The stream may be a memory map: it is read in pieces.

    Raises:
      ValueError: a sequence is empty.

    >>> count_occurrences(np.array([1, 1, 1, 2]), [np.array([1, 1]), np.array([2, 1])])
    array([2, 0])
    """
    if any(not len(sequence) for sequence in sequences):
        raise ValueError("sequences must hold at least one token each, got an empty one")
    counts = np.zeros(len(sequences), np.int64)
    size = stream.dtype.itemsize
    wanted = [np.asarray(sequence).astype(stream.dtype).tobytes() for sequence in sequences]
    longest = max((len(sequence) for sequence in sequences), default=1)
    for begin in range(0, len(stream), CHUNK):
        data = np.asarray(stream[begin : begin + CHUNK + longest - 1]).tobytes()
        for index, pattern in enumerate(wanted):
            at = data.find(pattern)
            while at != -1:
                # A hit between two tokens is none; one past the piece belongs to the next.
                counts[index] += at % size == 0 and at < CHUNK * size
                at = data.find(pattern, at + 1)
    return counts
