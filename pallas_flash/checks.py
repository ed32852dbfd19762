"""Checks of the user's arguments: from what was passed to one `AttentionCall`, or a clear error.

Every message names the argument, what was got and what is accepted.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_flash.block_mask import BlockMask
from pallas_flash.mask import Mask
from pallas_flash.mods import INDICES, Mod

ALIGNMENTS = ("top_left", "bottom_right")
FLOATS = ("float64", "float32", "bfloat16", "float16")


def qkv(query: Any, key: Any, value: Any) -> tuple[Array, Array, Array]:
    """q, k, v as (B, T, N, H), (B, S, K, H), (B, S, K, Hv), one floating dtype."""
    q, k, v = as_array("query", query), as_array("key", key), as_array("value", value)
    for name, x in (("query", q), ("key", k), ("value", v)):
        floating(name, x)
        if x.ndim not in (3, 4):
            raise ValueError(f"{name} must have shape (B, T, N, H) or (T, N, H), got {x.shape}")
    for name, x in (("key", k), ("value", v)):
        if x.dtype != q.dtype:
            raise TypeError(
                f"{name} has dtype {x.dtype} but query has {q.dtype}: cast them to one dtype"
            )
        if x.ndim != q.ndim:
            raise ValueError(
                f"{name} has shape {x.shape} but query has {q.shape}: all three take a batch axis "
                "or none does"
            )
    if q.ndim == 3:
        q, k, v = q[None], k[None], v[None]
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"key and value must agree in batch, length and heads, got {k.shape} and {v.shape}"
        )
    if k.shape[0] != q.shape[0]:
        raise ValueError(
            f"key has batch size {k.shape[0]} but query has {q.shape[0]}: they must be equal"
        )
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"key has head dim {k.shape[3]} but query has {q.shape[3]}")
    heads, kv_heads = q.shape[2], k.shape[2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"query has {heads} heads, which is not a multiple of key's {kv_heads}: query head n "
            "reads key/value head n // (N / K)"
        )
    return q, k, v


def matrix(name: str, x: Any, sizes: tuple[int, int, int, int]) -> Array | None:
    """A bias or mask of rank 2 to 4 as (B|1, N|1, T|1, S|1)."""
    if x is None:
        return None
    x = as_array(name, x)
    if not 2 <= x.ndim <= 4:
        raise ValueError(f"{name} must have rank 2 to 4, (B, N, T, S) broadcastable, got {x.shape}")
    full = x.reshape((1,) * (4 - x.ndim) + x.shape)
    if any(have not in (1, want) for have, want in zip(full.shape, sizes, strict=True)):
        raise ValueError(f"{name} of shape {x.shape} does not broadcast to (B, N, T, S) = {sizes}")
    return full


def bias(x: Any, sizes: tuple[int, int, int, int]) -> Array | None:
    if x is not None and jnp.asarray(x).dtype == jnp.bool_:
        raise TypeError("bias is boolean: pass a boolean array as mask (True is visible)")
    x = matrix("bias", x, sizes)
    return None if x is None else floating("bias", x)


def dense_mask(x: Any, sizes: tuple[int, int, int, int]) -> Array | None:
    if x is not None and (dtype := jnp.asarray(x).dtype) != jnp.bool_:
        raise TypeError(
            f"mask must be boolean (True is visible), got {dtype}: an additive mask goes to bias, "
            "an integer one needs mask.astype(bool)"
        )
    return matrix("mask", x, sizes)


def integers(name: str, x: Any, shape: tuple[int, ...], letters: str) -> Array | None:
    """Lengths, ids or positions as int32 of exactly this shape; lists of ints are taken too."""
    if x is None:
        return None
    given = x
    x = _integer_list(name, x) if isinstance(x, list | tuple) else as_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be an integer array, got {x.dtype}")
    if isinstance(given, np.ndarray) and (given.astype(np.int32) != given).any():
        raise ValueError(f"{name} must fit in 32 bits, got an array that holds more")
    if x.ndim == len(shape) - 1 and shape[0] == 1:
        x = x[None]
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {letters} = {shape}, got {x.shape}")
    return x.astype(jnp.int32)


def _integer_list(name: str, x: list | tuple) -> Array:
    """A (nested) list of ints as an int32 array; nothing is rounded, wrapped or padded."""
    for item in jax.tree.leaves(x, is_leaf=lambda item: not isinstance(item, list | tuple)):
        # Under jit the ints of a list are traced scalars.
        traced = isinstance(item, jax.Array) and not item.ndim
        dtype = item.dtype if traced else np.dtype(type(item))
        if not jnp.issubdtype(dtype, jnp.integer):
            raise TypeError(
                f"{name} must be an integer array or a list of ints, got a list that holds {item!r}"
            )
    try:
        return jnp.asarray(x, jnp.int32)
    except OverflowError as error:
        raise ValueError(f"{name} must fit in 32 bits, got a list that holds more") from error
    except ValueError as error:
        raise ValueError(
            f"{name} must be a list of rows of one length: pad the shorter ones"
        ) from error


def per_head(name: str, x: Any, heads: int) -> Array | None:
    if x is None:
        return None
    x = floating(name, as_array(name, x))
    if x.shape != (heads,):
        raise ValueError(f"{name} must have shape (N,) = ({heads},), got {x.shape}")
    return x


def scale(x: Any, head_dim: int) -> tuple[float | None, Array | None]:
    """(static, traced): a Python number stays static, an array stays an operand."""
    if x is None:
        return 1 / math.sqrt(max(head_dim, 1)), None
    if isinstance(x, bool | complex):
        raise TypeError(f"scale must be a real number, got {x!r}")
    if isinstance(x, numbers.Real | np.number):
        return float(x), None
    x = floating("scale", as_array("scale", x))
    if x.shape != ():
        raise ValueError(f"scale must be a number or a scalar array, got shape {x.shape}")
    return None, x


def window(x: Any) -> tuple[int | None, int | None]:
    """(left, right), None where unbounded."""
    if x is None:
        return None, None
    pair = tuple(x) if isinstance(x, tuple | list) else (x, x)
    if len(pair) != 2:
        raise ValueError(f"local_window_size must be an int or (left, right), got {x!r}")
    for side in pair:
        if side is None:
            continue
        if isinstance(side, bool) or not isinstance(side, int | np.integer):
            raise TypeError(
                f"local_window_size must hold static ints (or None for unbounded), got {side!r}"
            )
        if side < 0:
            raise ValueError(
                f"local_window_size must not be negative, got {x!r}: None means unbounded"
            )
    left, right = (None if side is None else int(side) for side in pair)
    return left, right


def build_mask(
    sizes: tuple[int, int, int, int],
    *,
    is_causal: bool,
    local_window_size: Any,
    causal_alignment: Any,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    query_segment_ids: Any,
    key_value_segment_ids: Any,
    query_positions: Any,
    key_value_positions: Any,
    mask: Any,
    mask_mod: Any,
) -> Mask:
    """All mask arguments of a call with sizes (B, N, T, S) as one object."""
    B, _, T, S = sizes
    per_row, queries, keys = ((B,), "(B,)"), ((B, T), "(B, T)"), ((B, S), "(B, S)")
    built = Mask(
        is_causal=bool(is_causal),
        window=window(local_window_size),
        causal_alignment=one_of("causal_alignment", causal_alignment, ALIGNMENTS),
        query_lengths=integers("query_seq_lengths", query_seq_lengths, *per_row),
        key_value_lengths=integers("key_value_seq_lengths", key_value_seq_lengths, *per_row),
        query_segment_ids=integers("query_segment_ids", query_segment_ids, *queries),
        key_value_segment_ids=integers("key_value_segment_ids", key_value_segment_ids, *keys),
        query_positions=integers("query_positions", query_positions, *queries),
        key_value_positions=integers("key_value_positions", key_value_positions, *keys),
        dense=dense_mask(mask, sizes),
        mask_mod=mask_function(mask_mod),
        blocks=block_kinds(mask_mod, sizes),
    )
    mask_fields(built)
    return built


def mask_function(x: Any) -> Mod | None:
    if x is None or isinstance(x, Mod):
        return x
    return x.mod if isinstance(x, BlockMask) else Mod.trace("mask_mod", x, *INDICES)


def block_kinds(x: Any, sizes: tuple[int, int, int, int]) -> BlockMask | None:
    """The block mask among `mask_mod`'s possible values, if it fits the call."""
    if not isinstance(x, BlockMask):
        return None
    B, N, T, S = sizes
    if x.sizes != (T, S) or x.kinds.shape[0] not in (1, B) or x.kinds.shape[1] not in (1, N):
        raise ValueError(
            f"mask_mod is a block mask of T, S = {x.sizes} with batch and heads "
            f"{x.kinds.shape[:2]}, but the call has B, N, T, S = {sizes}: make it with these sizes"
        )
    return x


def score_mod(x: Any, dtype: Any) -> Mod | None:
    if x is None:
        return None
    return Mod.trace("score_mod", x, jnp.promote_types(dtype, jnp.float32), *INDICES)


def mask_fields(mask: Mask) -> None:
    """Combinations of mask arguments that contradict each other."""
    if (mask.query_segment_ids is None) != (mask.key_value_segment_ids is None):
        raise ValueError(
            "query_segment_ids and key_value_segment_ids must be given together, got one alone"
        )
    if mask.has_positions and mask.causal_alignment == "bottom_right":
        raise ValueError(
            'causal_alignment="bottom_right" moves indices, but query_positions or '
            "key_value_positions say where they stand: use one or the other"
        )


def soft_cap(x: Any) -> float | None:
    if x is None:
        return None
    x = static_number("logits_soft_cap", x)
    if not (math.isfinite(x) and x > 0):
        raise ValueError(f"logits_soft_cap must be positive and finite, got {x} (None is no cap)")
    return x


def dropout(rate: Any, rng: Any) -> float:
    rate = static_number("dropout_rate", rate)
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate must be in [0, 1), got {rate}")
    if rate > 0 and rng is None:
        raise ValueError(f"dropout_rate={rate} needs dropout_rng, a key of jax.random")
    return rate


def static_number(name: str, x: Any) -> float:
    if isinstance(x, bool) or not isinstance(x, numbers.Real | np.number):
        raise TypeError(f"{name} must be a static number, got {type(x).__name__}")
    return float(x)


def one_of(name: str, x: Any, accepted: tuple[Any, ...]) -> Any:
    if x not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, accepted))}, got {x!r}")
    return x


def as_array(name: str, x: Any) -> Array:
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    return jnp.asarray(x)


def floating(name: str, x: Array) -> Array:
    if x.dtype.name not in FLOATS:
        raise TypeError(f"{name} must have a dtype of {', '.join(FLOATS)}, got {x.dtype}")
    return x
