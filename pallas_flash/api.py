"""The public function: checks, choice of implementation, and one custom derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_flash import checks, dropout, implementations, reference, vjp
from pallas_flash.block_mask import BlockMask
from pallas_flash.call import AttentionCall, PerHead
from pallas_flash.mask import Alignment, PerRow
from pallas_flash.varying import vary_like

Window = int | tuple[int | None, int | None]
Rows = Sequence[int] | Sequence[Sequence[int]]


def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    bias: Float[Array, "#B #N #T #S"] | None = None,
    mask: Bool[Array, "#B #N #T #S"] | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    is_causal: bool = False,
    query_seq_lengths: PerRow | Sequence[int] | None = None,
    key_value_seq_lengths: PerRow | Sequence[int] | None = None,
    local_window_size: Window | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    causal_alignment: Alignment = "top_left",
    query_segment_ids: Int[Array, "*B T"] | Rows | None = None,
    key_value_segment_ids: Int[Array, "*B S"] | Rows | None = None,
    query_positions: Int[Array, "*B T"] | Rows | None = None,
    key_value_positions: Int[Array, "*B S"] | Rows | None = None,
    logits_soft_cap: float | None = None,
    sinks: PerHead | None = None,
    alibi_slopes: PerHead | None = None,
    score_mod: Callable[..., Array] | None = None,
    mask_mod: Callable[..., Array] | BlockMask | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    deterministic: bool = False,
) -> Any:
    r"""Exact attention in O(n) memory, with the names and meaning of `jax.nn`'s function.

    For each query i, over the keys j that it sees:

        out_i = sum_j p_ij v_j,   p_ij = exp(logit_ij - lse_i),   lse_i = log sum_j exp(logit_ij)
        logit_ij = cap(score_mod(scale * q_i . k_j + bias_ij - slope |i' - j|))

    Dimensions: B batch, T query length, S key/value length, N query heads, K key/value heads
    (N a multiple of K; query head n reads key/value head n // (N / K)), H and Hv head dims.

    Differs from `jax.nn.dot_product_attention`: a query that sees no key has output 0, LSE -inf and
    zero gradients (there: the mean of the values, or NaN); memory behind `key_value_seq_lengths`
    may hold NaN; `value` may have its own head dim; the LSE is float32 and differentiable.

    Lengths, ids and positions may be arrays or (nested) lists of ints.

    Args:
      query: (B, T, N, H), or (T, N, H) for a batch of one; float32, bfloat16, float16 or float64.
      key: (B, S, K, H) or (S, K, H), of the query's dtype.
      value: (B, S, K, Hv) or (S, K, Hv), of the query's dtype.
      bias: added to the logits, natural-log units; any floating dtype, rank 2 to 4, broadcastable
        to (B, N, T, S). An entry of -inf hides the key.
      mask: boolean, True is visible; rank 2 to 4, broadcastable to (B, N, T, S).
      scale: factor of q . k, a number or a scalar array; 1 / sqrt(H) if None.
      is_causal: hide the keys after each query.
      query_seq_lengths: (B,) integers, clipped to [0, T]; later queries see nothing.
      key_value_seq_lengths: (B,) integers, clipped to [0, S]; later keys are seen by nobody.
      local_window_size: (left, right) numbers of keys visible beside the query's own place, or one
        number for both; None in a pair is unbounded.
      implementation: "reference", "xla", "triton" or "mosaic"; None takes the fastest that serves
        the call on this device (see also `default_implementation`).
      return_residual: return (out, lse).
      causal_alignment: where query i stands for causal, window and ALiBi: "top_left" at key i,
        "bottom_right" at key i + S_b - T_b, with the lengths of its batch row.
      query_segment_ids, key_value_segment_ids: (B, T) and (B, S) integers; a query sees the keys of
        its own segment. Negative ids are padding.
      query_positions, key_value_positions: (B, T) and (B, S) integers below 2^30 in size; causal,
        window and ALiBi compare them instead of indices. Either may be given alone.
      logits_soft_cap: cap * tanh(logits / cap), after bias, ALiBi and score_mod, before masks.
      sinks: (N,) logits that join the denominator and bring no value. The LSE includes them.
      alibi_slopes: (N,) factors of -|i' - j|.
      score_mod: function (score, b, n, q_index, k_index) -> score of scalars, traced into the
        tile. Arrays it captures get gradients. A result of -inf hides the key.
      mask_mod: function (b, n, q_index, k_index) -> bool of scalars, traced into the tile; or what
        `block_mask` made of one, whose empty tiles are then skipped.
      dropout_rate: probability that a p_ij is dropped; the kept are divided by 1 - rate. The LSE
        is that without dropout.
      dropout_rng: random key, needed iff dropout_rate > 0. What is dropped depends on this key and
        on (b, n, i, j) alone, not on the implementation.
      deterministic: promise bitwise repeatable gradients. "reference" and "xla" always are.

    Returns:
      (B, T, N, Hv) or (T, N, Hv) in the query's dtype; with `return_residual` also the LSE,
      (B, T, N) or (T, N), float32 (float64 for float64 inputs), natural log.

    Raises:
      ValueError, TypeError: an argument's shape, dtype or value; the message names it.
      NotImplementedError: the named implementation cannot serve the call.

    Sources: Dao et al. 2022 (arXiv:2205.14135), Dao 2023 (arXiv:2307.08691).

    >>> import jax.numpy as jnp
    >>> q = jnp.ones((1, 4, 2, 8))
    >>> out, lse = dot_product_attention(q, q, q, is_causal=True, return_residual=True)
    >>> out.shape, lse.shape, lse.dtype.name
    ((1, 4, 2, 8), (1, 4, 2), 'float32')
    """
    call = build_call(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        causal_alignment=causal_alignment,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        query_positions=query_positions,
        key_value_positions=key_value_positions,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        score_mod=score_mod,
        mask_mod=mask_mod,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        deterministic=deterministic,
    )
    out, lse = attend(call, implementation)
    lse = jnp.swapaxes(lse, 1, 2)
    if jnp.ndim(query) == 3:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out


def build_call(
    query: Any,
    key: Any,
    value: Any,
    *,
    bias: Any = None,
    mask: Any = None,
    scale: Any = None,
    is_causal: Any = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    causal_alignment: Any = "top_left",
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
    query_positions: Any = None,
    key_value_positions: Any = None,
    logits_soft_cap: Any = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    dropout_rate: Any = 0.0,
    dropout_rng: Any = None,
    deterministic: Any = False,
) -> AttentionCall:
    """The arguments of `dot_product_attention`, checked, as one call."""
    q, k, v = checks.qkv(query, key, value)
    sizes = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    the_mask = checks.build_mask(
        sizes,
        is_causal=is_causal,
        local_window_size=local_window_size,
        causal_alignment=causal_alignment,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        query_positions=query_positions,
        key_value_positions=key_value_positions,
        mask=mask,
        mask_mod=mask_mod,
    )
    static_scale, traced_scale = checks.scale(scale, q.shape[3])
    dropout_rate = checks.dropout(dropout_rate, dropout_rng)
    return AttentionCall(
        query=q,
        key=k,
        value=v,
        bias=checks.bias(bias, sizes),
        mask=the_mask,
        static_scale=static_scale,
        traced_scale=traced_scale,
        soft_cap=checks.soft_cap(logits_soft_cap),
        sinks=checks.per_head("sinks", sinks, q.shape[2]),
        alibi_slopes=checks.per_head("alibi_slopes", alibi_slopes, q.shape[2]),
        score_mod=checks.score_mod(score_mod, q.dtype),
        dropout_rate=dropout_rate,
        dropout_seed=dropout.seed_from_key(dropout_rng) if dropout_rate > 0 else None,
        deterministic=bool(deterministic),
    )


def attend(
    call: AttentionCall, implementation: str | None = None
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Output and LSE of a checked call, by the implementation that serves it."""
    call = vary_like(call, call)
    module = implementations.choose(call, implementation)
    if module is reference:
        # JAX differentiates the reference itself, to any order.
        out, lse = reference.forward(call)
        return vjp.named(out, lse)
    return vjp.attention(module, call)
