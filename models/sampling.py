"""The next token from logits: greedy, or drawn at a temperature from what the filters keep.

With p = softmax(logits / temperature) and tokens ranked by p, equal ones by id:

    top-k     keeps the k first
    top-p     then keeps a token iff those before it, of what is left, sum to less than p:
              the smallest set that reaches p ("nucleus", Holtzman et al., arXiv:1904.09751)
    min-p     keeps tokens of at least min_p times the largest p (Nguyen et al., arXiv:2407.01082)

The first token stays under every filter. The i-th token of a sequence is drawn with a key of the
sequence's seed and i alone, so it does not depend on the batch that the sequence is in.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

NOT_A_TOKEN = -1  # drawn from logits that hold a NaN


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How to draw the tokens of one sequence.

    Args:
        temperature: divides the logits; 0 takes the most probable token.
        top_k: tokens kept; 0 for all.
        top_p: probability that the kept reach, in (0, 1]; 1 for all.
        min_p: share of the largest probability that a token needs, in [0, 1]; 0 for none.
        seed: of the draws, in [0, 2^32).

    Raises:
        ValueError: a field is out of range.
        TypeError: top_k or seed is no int.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, got {value!r}.")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}.")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be 0 (all tokens) or more, got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}; 1 keeps all tokens.")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1], got {self.min_p}; 0 keeps all tokens.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must lie in [0, 2^32), got {self.seed}.")


class Sampling(NamedTuple):
    """`SamplingConfig` of each row of a batch, as arrays of a program's argument."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    seed: UInt[Array, " B"]

    @classmethod
    def of(cls, configs: Sequence[SamplingConfig]) -> "Sampling":
        """Host arrays, one row for each config."""

        def column(name: str, dtype: type) -> Any:
            return np.array([getattr(config, name) for config in configs], dtype)

        return cls(
            column("temperature", np.float32),
            column("top_k", np.int32),
            column("top_p", np.float32),
            column("min_p", np.float32),
            column("seed", np.uint32),
        )


def sample(
    logits: Float[Array, "B V"], sampling: Sampling, index: Int[Array, " B"]
) -> Int[Array, " B"]:
    """One token for each row.

    Args:
        logits: float32; -inf is a token that cannot be. A NaN, or nothing above -inf, gives
            `NOT_A_TOKEN`.
        sampling: how to draw.
        index: which token of its sequence each row draws; with the seed it gives the key.
    """
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    any_drawn = jnp.any(sampling.temperature > 0)
    # Sorting a vocabulary costs more than the argmax: a greedy batch goes without.
    drawn = jax.lax.cond(any_drawn, lambda: _draw(logits, sampling, index), lambda: best)
    token = jnp.where(sampling.temperature > 0, drawn, best)
    defined = ~jnp.any(jnp.isnan(logits), axis=-1) & jnp.any(logits > -jnp.inf, axis=-1)
    return jnp.where(defined, token, NOT_A_TOKEN)


def keep_mask(logits: Float[Array, "B V"], sampling: Sampling) -> Bool[Array, "B V"]:
    """The tokens that can be drawn at a temperature above 0."""
    _, ids, kept = _ranked(logits, sampling)
    rows = jnp.arange(logits.shape[0])[:, None]
    return jnp.zeros(logits.shape, bool).at[rows, ids].set(kept)


def _ranked(logits: Array, sampling: Sampling) -> tuple[Array, Array, Array]:
    """Logits at temperature, from the largest down, their token ids, and which are kept."""
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None]
    # Less the largest first, so that a tiny temperature cannot overflow.
    shifted = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    ids = jnp.broadcast_to(jnp.arange(logits.shape[-1], dtype=jnp.int32), logits.shape)
    # Ranked before the division, which may make neighbours equal.
    _, shifted, ids = jax.lax.sort((-logits, shifted, ids), dimension=-1, num_keys=1)
    rank = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    kept = (rank < sampling.top_k[:, None]) | (sampling.top_k[:, None] == 0)
    weight = jnp.where(kept, jnp.exp(shifted), 0.0)
    before = jnp.cumsum(weight, axis=-1) - weight
    reach = sampling.top_p[:, None]
    kept &= (before < reach * jnp.sum(weight, axis=-1, keepdims=True)) | (reach >= 1)
    kept &= shifted >= jnp.log(sampling.min_p[:, None])
    return shifted, ids, (kept | (rank == 0)) & (shifted > -jnp.inf)


def _draw(logits: Array, sampling: Sampling, index: Array) -> Array:
    shifted, ids, kept = _ranked(logits, sampling)

    def one(seed: Array, index: Array, row: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), index)
        return jax.random.categorical(key, row)

    rank = jax.vmap(one)(sampling.seed, index, jnp.where(kept, shifted, -jnp.inf))
    return jnp.take_along_axis(ids, rank[:, None], axis=-1)[:, 0]
