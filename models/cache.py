"""The decoder over a cache of keys and values: new tokens in, their final states out.

    prefill   many new tokens a row, nothing cached:  T queries and T keys
    decode    one new token (or a few) a row:         T queries and the row's whole cache

Rows of a batch differ in length. New tokens of a row lie at the left of its T columns and the rest
is padding, which is neither cached nor seen; so a row's results do not depend on its neighbours.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.config import ModelConfig
from models.decoder import Decoder, config_rotary_table, window_runs
from pallas_flash import dot_product_attention


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys, after RoPE, and values of every layer, in the compute dtype.

    Attributes:
        keys, values: row b holds its tokens at columns [0, lengths[b]). What lies behind is not
            read, whatever it is, NaN too.
        lengths: tokens of each row.
    """

    keys: Float[Array, "L B S K H"]
    values: Float[Array, "L B S K H"]
    lengths: Int[Array, " B"]

    @property
    def capacity(self) -> int:
        """S: tokens that a row has room for."""
        return self.keys.shape[2]


def empty_cache(config: ModelConfig, batch: int, capacity: int) -> KVCache:
    """A cache of no tokens: `2 · L · B · S · K · H` numbers of `config.compute_dtype`."""
    shape = (config.num_layers, batch, capacity, config.num_kv_heads, config.head_dim)
    zeros = jnp.zeros(shape, config.compute_dtype)
    return KVCache(zeros, zeros, jnp.zeros((batch,), jnp.int32))


def cached_states(
    decoder: Decoder,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    new_lengths: Int[Array, " B"],
    *,
    rope_seq_len: int,
    is_empty: bool = False,
) -> tuple[Float[Array, "B T D"], KVCache]:
    """Final states of new tokens that follow the cached ones, and the cache with them.

    Args:
        decoder: the model, see `models.bind`.
        cache: tokens so far. A token for which a row has no room is not cached.
        tokens: new ones, the first `new_lengths[b]` of row b.
        new_lengths: in [0, T]; a row of 0 stays as it is.
        rope_seq_len: what "dynamic" and "longrope" scaling choose frequencies by, the same for the
            whole life of a cache.
        is_empty: nothing is cached yet, so that attention is among the new tokens alone.

    Returns:
        States `[B, T, D]`, defined in the first `new_lengths[b]` columns, and the cache, of
        `cache.lengths + new_lengths` tokens.
    """
    config = decoder.config
    columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions = cache.lengths[:, None] + columns
    rotary = config_rotary_table(config, positions, seq_len=rope_seq_len)
    # Padding goes to a column past the end, where a scatter drops it.
    places = jnp.where(columns < new_lengths[:, None], positions, cache.capacity)
    rows = jnp.arange(tokens.shape[0])[:, None]
    lengths = cache.lengths + new_lengths
    graphdef, stack = nnx.split(decoder.blocks)
    # A padding token may be any number: token 0 keeps its states finite.
    real = columns < new_lengths[:, None]
    x = decoder.embedding(jnp.where(real, tokens, 0))
    carry = (x, cache.keys, cache.values)
    for window, start, stop in window_runs(config.windows):

        def step(carry: tuple, layer: tuple, window=window) -> tuple[tuple, None]:
            x, keys, values = carry
            state, index = layer
            block = nnx.merge(graphdef, state)
            query, key, value = block.attention.heads(block.attention_norm(x), rotary)
            # The whole cache is carried, so that the loop writes in place.
            keys = keys.at[index, rows, places].set(key, mode="drop")
            values = values.at[index, rows, places].set(value, mode="drop")
            seen = (key, value) if is_empty else (keys[index], values[index])
            attended = cached_attention(
                query,
                *seen,
                lengths,
                new_lengths,
                window=window,
                implementation=config.attention_implementation,
            )
            x = x + block.attention.output(attended)
            return (x + block.mlp(block.mlp_norm(x)), keys, values), None

        layers = jnp.arange(config.num_layers, dtype=jnp.int32)
        carry = decoder.through(step, carry, (stack, layers), start, stop)
    x, keys, values = carry
    return decoder.final_norm(x), KVCache(keys, values, lengths)


def cached_attention(
    query: Float[Array, "B T N H"],
    keys: Float[Array, "B S K H"],
    values: Float[Array, "B S K H"],
    lengths: Int[Array, " B"],
    new_lengths: Int[Array, " B"],
    *,
    window: int | None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Causal attention of each row's last `new_lengths[b]` tokens over its first `lengths[b]`."""
    return dot_product_attention(
        query,
        keys,
        values,
        is_causal=True,
        causal_alignment="bottom_right",
        query_seq_lengths=new_lengths,
        key_value_seq_lengths=lengths,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )


def last_logits(
    decoder: Decoder, states: Float[Array, "B T D"], new_lengths: Int[Array, " B"]
) -> Float[Array, "B V"]:
    """Float32 logits after the last new token of each row (of a row without one: of column 0)."""
    last = jnp.maximum(new_lengths - 1, 0)[:, None, None]
    return decoder.logits(jnp.take_along_axis(states, last, axis=1))[:, 0]
