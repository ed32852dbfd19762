"""Our attention as the `attention_fn` of Flax's MultiHeadAttention, NNX and Linen.

Flax is not imported: the adapter only takes the keyword arguments that Flax passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pallas_flash.api import dot_product_attention


def flax_attention_fn(**options: Any) -> Callable[..., Array]:
    """An `attention_fn` for `flax.nnx.MultiHeadAttention` and `flax.linen`'s.

        flax.nnx.MultiHeadAttention(..., attention_fn=flax_attention_fn(is_causal=True))

    Flax's mask, bias and dropout are honoured. Flax's `deterministic` means "no dropout" and is
    taken as that, not as our `deterministic`. Flax's dropout with `broadcast_dropout=True` (its
    default) drops one pattern for all heads and batch rows; ours draws for each of them, as
    `broadcast_dropout=False` does, so the adapter drops at the same rate but not the same weights.

    With Flax's `decode=True` leave `is_causal` out: Flax then passes one query, the whole cache and
    a mask of its own.

    Args:
      **options: further arguments of `dot_product_attention`, such as `is_causal`,
        `local_window_size` or `implementation`.

    Returns: a function of (query, key, value, ...) of shapes (..., T, N, H), (..., S, K, H),
      (..., S, K, Hv) that returns (..., T, N, Hv).

    Raises (when called):
      ValueError: `is_causal` with fewer queries than keys and no `causal_alignment`: a query at the
        top left of a cache would see its first slot only.
      NotImplementedError: Flax asks for something that exists only with a weight matrix, such as
        `sow_weights`, or for RoPE inside the attention function.
    """

    def attention_fn(
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        is_causal: bool = False,
        module: Any = None,
        input_positions: Array | None = None,
        **others: Any,
    ) -> Array:
        # Precision and a float32 softmax may be asked for and are always given; the einsums that
        # Linen lets users replace are not there to be replaced.
        del broadcast_dropout, others
        _refuse(module, input_positions)
        dtype = dtype or jnp.result_type(query, key, value)
        lead = query.shape[:-3]

        def one_batch_axis(x: Array) -> Array:
            return x.reshape(math.prod(lead), *x.shape[-3:]).astype(dtype)

        def matrix(x: Array | None) -> Array | None:
            if x is None or len(lead) == 1 or x.ndim <= 3:
                return x
            if all(size == 1 for size in x.shape[:-3]):
                return x.reshape(1, *x.shape[-3:])
            return jnp.broadcast_to(x, (*lead, *x.shape[-3:])).reshape(-1, *x.shape[-3:])

        causal = is_causal or options.get("is_causal", False)
        if causal and query.shape[-3] < key.shape[-3] and "causal_alignment" not in options:
            raise ValueError(
                f"is_causal with {query.shape[-3]} queries and {key.shape[-3]} keys: which key "
                "does the first query stand at? When decoding with a cache leave is_causal out "
                "(Flax passes a mask), otherwise give causal_alignment to flax_attention_fn"
            )
        drops = dropout_rate > 0 and not deterministic
        out = dot_product_attention(
            one_batch_axis(query),
            one_batch_axis(key),
            one_batch_axis(value),
            matrix(bias),
            None if mask is None else matrix(mask.astype(bool)),
            dropout_rate=dropout_rate if drops else 0.0,
            dropout_rng=dropout_rng if drops else None,
            **{**options, "is_causal": causal},
        )
        return out.reshape(*lead, *out.shape[1:])

    return attention_fn


def _refuse(module: Any, input_positions: Any) -> None:
    """What would be silently wrong if it were ignored."""
    if module is not None:
        raise NotImplementedError(
            "sow_weights=True needs the (T, S) weights, which are never in memory here: use Flax's "
            "own attention_fn to look at weights"
        )
    if input_positions is not None:
        raise NotImplementedError(
            "input_positions asks the attention function for RoPE: rotate query and key before the "
            "attention, or use Flax's dot_product_attention_with_rope"
        )
