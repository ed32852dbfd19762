"""Standard attention, written out: the definition of correct for every other implementation.

    logits = scale * q k^T + bias ...            see `pallas_flash.logits` for the order
    lse    = log(sum over visible j of exp(logits) + exp(sink))
    out    = sum over visible j of exp(logits - lse) v

float32 throughout (float64 for float64 inputs), the whole (B, N, T, S) matrix in memory, and
gradients by JAX's own automatic differentiation of these lines, so derivatives of every order and
mode are right by construction.

A row that sees nothing has output 0, LSE -inf (or the sink) and zero gradients. Keys, values and
queries that lie behind a length or in a padding segment may hold NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_flash import dropout
from pallas_flash.call import AttentionCall
from pallas_flash.logits import Terms, Tile, logits, visible
from pallas_flash.mask import Mask, row_lengths

NAME = "reference"


def unsupported(call: AttentionCall, platform: str) -> str | None:
    """The reference serves every call on every platform."""
    del call, platform
    return None


def forward(call: AttentionCall) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Output in the query's dtype and LSE in float32 (float64 for float64)."""
    B, T, S, N, K, H, Hv = call.sizes
    dtype = jnp.promote_types(call.query.dtype, jnp.float32)
    q_real, k_real = real_rows(call.mask, B, T, S)
    # 0 * NaN is NaN: whatever a masked weight multiplies has to be a number.
    q = jnp.where(q_real[:, :, None, None], call.query, 0).astype(dtype)
    k = jnp.where(k_real[:, :, None, None], call.key, 0).astype(dtype)
    v = jnp.where(k_real[:, :, None, None], call.value, 0).astype(dtype)
    q = q.reshape(B, T, K, N // K, H)

    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, precision=highest).reshape(B, N, T, S)
    tile = whole_call(call)
    s, seen = logits(scores * call.scale, _terms(call), visible(call.mask, tile), call, tile)

    m = jnp.max(s, axis=-1, keepdims=True, where=seen, initial=-jnp.inf)
    if call.sinks is not None:
        m = jnp.maximum(m, call.sinks.astype(dtype)[:, None, None])
    m = jax.lax.stop_gradient(jnp.where(m == -jnp.inf, 0, m))
    p = jnp.where(seen, jnp.exp(s - m), 0)
    l = jnp.sum(p, axis=-1, keepdims=True)
    if call.sinks is not None:
        l = l + jnp.exp(call.sinks.astype(dtype)[:, None, None] - m)
    empty = l == 0
    l = jnp.where(empty, 1, l)
    lse = jnp.where(empty, -jnp.inf, m + jnp.log(l))[..., 0]

    p = p / l
    if call.dropout_seed is not None:
        kept = dropout.keep(
            call.dropout_seed,
            call.dropout_rate,
            head=tile.batch * N + tile.head,
            q_index=tile.q_index,
            k_index=tile.k_index,
        )
        p = jnp.where(kept, p / (1 - call.dropout_rate), 0)
    p = p.reshape(B, K, N // K, T, S)
    out = jnp.einsum("bkgts,bskh->btkgh", p, v, precision=highest).reshape(B, T, N, Hv)
    return out.astype(call.query.dtype), lse


def _terms(call: AttentionCall) -> Terms:
    slopes = None if call.alibi_slopes is None else call.alibi_slopes[:, None, None]
    return Terms(call.bias, slopes, call.score_mod)


def whole_call(call: AttentionCall) -> Tile:
    """The whole (B, N, T, S) matrix as one tile."""
    B, T, S, N, *_ = call.sizes
    mask = call.mask

    def along_queries(array: Array | None) -> Array | None:
        return None if array is None else array[:, None, :, None]

    def along_keys(array: Array | None) -> Array | None:
        return None if array is None else array[:, None, None, :]

    return Tile(
        batch=jnp.arange(B)[:, None, None, None],
        head=jnp.arange(N)[:, None, None],
        q_index=jnp.arange(T)[:, None],
        k_index=jnp.arange(S)[None, :],
        q_length=row_lengths(mask.query_lengths, B, T)[:, None, None, None],
        kv_length=row_lengths(mask.key_value_lengths, B, S)[:, None, None, None],
        q_segment=along_queries(mask.query_segment_ids),
        kv_segment=along_keys(mask.key_value_segment_ids),
        q_position=along_queries(mask.query_positions),
        kv_position=along_keys(mask.key_value_positions),
        dense=mask.dense,
    )


def real_rows(
    mask: Mask, batch: int, queries: int, keys: int
) -> tuple[Bool[Array, "B T"], Bool[Array, "B S"]]:
    """Queries and keys that lie before their length and not in a padding segment."""
    q_real = jnp.arange(queries) < row_lengths(mask.query_lengths, batch, queries)[:, None]
    k_real = jnp.arange(keys) < row_lengths(mask.key_value_lengths, batch, keys)[:, None]
    if mask.segments is not None:
        q_ids, k_ids = mask.segments
        q_real, k_real = q_real & (q_ids >= 0), k_real & (k_ids >= 0)
    return q_real, k_real
