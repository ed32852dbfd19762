"""Counter-based dropout: whether element (b, n, i, j) is kept is a pure function of the seed.

No state and no generator order, so the backward pass recomputes the same decisions, and tile
sizes, implementation and sharding of the loop do not matter. The hash uses 32-bit multiply, xor
and shift alone, which every backend has.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt32

_GOLDEN = 0x9E3779B9  # 2^32 divided by the golden ratio: consecutive counters land far apart


def seed_from_key(key: Any) -> UInt32[Array, 2]:
    """Two seed words from a JAX random key of any implementation, typed or raw."""
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    words = data.astype(jnp.uint32).reshape(-1)
    words = jnp.pad(words, (0, len(words) % 2)).reshape(-1, 2)
    seed = words[0]
    for more in words[1:]:
        seed = seed ^ more
    return seed


def keep(
    seed: UInt32[Array, 2], rate: float, *, head: Any, q_index: Any, k_index: Any
) -> Bool[Array, ...]:
    """True for the elements that survive, each with probability 1 - rate.

    Args:
      seed: two uint32 words (scalars loaded from a ref will do: anything indexable).
      rate: probability of dropping, resolved to 2^-32.
      head: b * N + n, the batch row and query head as one counter.
      q_index, k_index: indices in the whole sequence. All three broadcast.
    """
    head, q_index, k_index = (jnp.asarray(x).astype(jnp.uint32) for x in (head, q_index, k_index))
    # Two independent words per query row, so that two rows never share a whole key pattern.
    row = _mix(_mix(seed[0] ^ head * jnp.uint32(_GOLDEN)) + q_index)
    other = _mix(_mix(seed[1] + head) ^ q_index * jnp.uint32(_GOLDEN))
    bits = _mix(_mix(row ^ k_index * jnp.uint32(_GOLDEN)) + other)
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def _mix(x: Array) -> Array:
    """An invertible 32-bit finaliser: xor-shift, multiply, twice (after Murmur3's)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
