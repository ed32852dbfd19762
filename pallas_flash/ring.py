"""Context parallelism: attention over a sequence that is sharded over a mesh axis.

Two forms for use inside `jax.shard_map`, each device holding T / n queries and S / n keys:

    all-gather   keys and values are gathered, one attention call; O(S) memory per device
    ring         keys and values travel around the ring in n steps; O(S / n) memory per device

            step 0      step 1      step 2         out, lse = merge of the n partial results
    dev 0   kv 0        kv 2        kv 1           (`online_softmax.merge_outputs`)
    dev 1   kv 1        kv 0        kv 2
    dev 2   kv 2        kv 1        kv 0

The ring's backward runs the same steps again: with the LSE of the whole row, one block's gradients
need nothing from the other blocks, and the gradients of keys and values travel with them until
they are back home.

A causal mask leaves a contiguous shard of early queries with little to do. The "zigzag" layout cuts
the sequence in 2 n chunks and gives device r the chunks r and 2 n - 1 - r: the same work for all;
`zigzag_order` permutes a sequence into it.

Sources: Liu et al. 2023 (arXiv:2310.01889) for the ring; Brandon et al. 2023 (arXiv:2311.09431) for
balancing causal masks.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_flash import api, checks, implementations, online_softmax, vjp
from pallas_flash.call import AttentionCall, Gradients, PerHead
from pallas_flash.varying import vary_like

Layout = Literal["contiguous", "zigzag"]
LAYOUTS = ("contiguous", "zigzag")


def zigzag_order(length: int, shards: int) -> np.ndarray:
    """Indices that permute a sequence into the zigzag layout; `np.argsort` of it undoes that.

    >>> zigzag_order(8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    if length % (2 * shards):
        raise ValueError(f"length={length} must be a multiple of 2 * shards = {2 * shards}")
    chunks = np.arange(length).reshape(2 * shards, -1)
    return np.concatenate([np.r_[chunks[r], chunks[2 * shards - 1 - r]] for r in range(shards)])


def shard_positions(length: int, shard: Int[Array, ""] | int, shards: int, layout: Layout) -> Array:
    """Places in the whole sequence of one shard's elements.

    >>> shard_positions(4, 0, 2, "zigzag").tolist()
    [0, 1, 6, 7]
    """
    index = jnp.arange(length, dtype=jnp.int32)
    if layout == "contiguous":
        return shard * length + index
    half = length // 2
    late = (2 * shards - 1 - shard) * half + index - half
    return jnp.where(index < half, shard * half + index, late)


def ring_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    *,
    axis_name: str,
    layout: Layout = "contiguous",
    scale: float | Float[Array, ""] | None = None,
    is_causal: bool = False,
    local_window_size: api.Window | None = None,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_value_segment_ids: Int[Array, "B S"] | None = None,
    logits_soft_cap: float | None = None,
    sinks: PerHead | None = None,
    alibi_slopes: PerHead | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """Attention of this device's queries to the keys of all devices along a mesh axis.

    Call it inside `jax.shard_map` (or `jax.vmap` with an axis name); all arrays are this device's
    shards, and T, S are their lengths. Segment ids are global. Arguments mean what they mean in
    `dot_product_attention`, for the whole sequence.

    Args:
      query, key, value: (B, T, N, H), (B, S, K, H), (B, S, K, Hv).
      axis_name: mesh axis that the sequence is sharded over, of any size.
      layout: how the sequence lies on the devices, "contiguous" or "zigzag" (`zigzag_order`).
      implementation: of each step; None chooses.
      return_residual: return (out, lse).

    Returns: (B, T, N, Hv), with `return_residual` also the LSE (B, T, N) in float32.

    Raises: as `dot_product_attention`.
    """
    options = {
        "scale": scale,
        "is_causal": is_causal,
        "local_window_size": local_window_size,
        "query_segment_ids": query_segment_ids,
        "key_value_segment_ids": key_value_segment_ids,
        "logits_soft_cap": logits_soft_cap,
        "alibi_slopes": alibi_slopes,
    }
    call, shards = _local_call(query, key, value, options), lax.axis_size(axis_name)
    checks.one_of("layout", layout, LAYOUTS)
    _check_layout(layout, call)
    sinks = checks.per_head("sinks", sinks, call.sizes.N)
    module = implementations.choose(_placed(call, layout, 0, 0, shards), implementation)
    ring = _Ring(axis_name, layout, shards, module)
    result: Any = _ring(ring, vary_like(call, (call, lax.axis_index(axis_name))))
    out, lse = result
    if sinks is not None:
        out, lse = _with_sinks(out, lse, sinks)
    return (out, jnp.swapaxes(lse, 1, 2)) if return_residual else out


def all_gather_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    *,
    axis_name: str,
    layout: Layout = "contiguous",
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_value_segment_ids: Int[Array, "B S"] | None = None,
    **options: Any,
) -> Any:
    """The same as `ring_attention`, by gathering keys and values first.

    Less to wait for on short sequences and fast links; every device holds all keys and values.
    Further options are those of `dot_product_attention`, for the whole sequence, except lengths,
    positions, bias, mask and dropout, which speak of indices that are this device's own.
    """
    checks.one_of("layout", layout, LAYOUTS)
    ours = ("scale", "is_causal", "local_window_size", "logits_soft_cap", "sinks", "alibi_slopes",
            "implementation", "return_residual")  # fmt: skip
    if wrong := sorted(set(options) - set(ours)):
        raise TypeError(
            f"all_gather_attention does not take {wrong[0]}; it takes {', '.join(ours)}"
        )
    shards, shard = lax.axis_size(axis_name), lax.axis_index(axis_name)

    def gather(x: Array | None) -> Array | None:
        return None if x is None else lax.all_gather(x, axis_name, axis=1, tiled=True)

    (B, T), S = query.shape[:2], key.shape[1]
    places = jnp.concatenate([shard_positions(S, r, shards, layout) for r in range(shards)])
    return api.dot_product_attention(
        query,
        gather(key),  # pyright: ignore[reportArgumentType]
        gather(value),  # pyright: ignore[reportArgumentType]
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=gather(key_value_segment_ids),
        query_positions=_rows(shard_positions(T, shard, shards, layout), B),
        key_value_positions=_rows(places, B),
        **options,
    )


class _Ring(NamedTuple):
    """The static part of a ring: hashable, so that it can be an argument of a custom_vjp."""

    axis_name: str
    layout: Layout
    shards: int
    module: ModuleType

    def onward(self, tree: Any) -> Any:
        """Every device sends to the next."""
        if self.shards == 1:
            return tree
        path = [(r, (r + 1) % self.shards) for r in range(self.shards)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, path), tree)

    def blocks(self, call: AttentionCall) -> Any:
        """The call against each device's keys, in the order in which they arrive."""
        me = lax.axis_index(self.axis_name)
        for step in range(self.shards):
            source = (me - step) % self.shards
            yield vary_like(_placed(call, self.layout, me, source, self.shards), call)
            if step + 1 < self.shards:
                travelling = (call.key, call.value, call.mask.key_value_segment_ids)
                key, value, ids = self.onward(travelling)
                mask = dataclasses.replace(call.mask, key_value_segment_ids=ids)
                call = dataclasses.replace(call, key=key, value=value, mask=mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: _Ring, call: AttentionCall) -> tuple[Array, Array]:
    """Output (B, T, N, Hv) and LSE (B, N, T) over the keys of all devices."""
    out = lse = None
    for block in ring.blocks(call):
        block_out, block_lse = ring.module.forward(block)
        block_out = jnp.swapaxes(block_out, 1, 2).astype(block_lse.dtype)
        if out is None or lse is None:
            out, lse = block_out, block_lse
        else:
            out, lse = online_softmax.merge_outputs(
                jnp.stack([out, block_out]), jnp.stack([lse, block_lse])
            )
    assert out is not None
    assert lse is not None
    return jnp.swapaxes(out, 1, 2).astype(call.query.dtype), lse


def _ring_forward(ring: _Ring, call: AttentionCall) -> tuple[Any, Any]:
    result: Any = _ring(ring, call)
    out, lse = vjp.named(*result)
    return (out, lse), (call, out, lse)


def _ring_backward(ring: _Ring, saved: Any, cotangents: tuple[Array, Array]) -> tuple[Any]:
    (call, out, lse), (dout, dlse) = saved, cotangents
    fields = {"query", "key", "value", "traced_scale", "alibi_slopes"}
    wanted = frozenset(name for name in fields if getattr(call, name) is not None)
    mine: dict[str, Any] = {}
    travelling: tuple[Array, Array] | None = None
    for block in ring.blocks(call):
        # The LSE is that of the whole row, so exp(logits - lse) are this block's true weights.
        new = ring.module.backward(block, out, lse, dout, dlse, wanted)
        for name in wanted - {"key", "value"}:
            gradient = getattr(new, name).astype(lse.dtype)
            mine[name] = gradient if name not in mine else mine[name] + gradient
        block_kv = (new.key.astype(lse.dtype), new.value.astype(lse.dtype))
        if travelling is not None:
            block_kv = jax.tree.map(jnp.add, travelling, block_kv)
        travelling = ring.onward(block_kv)
    assert travelling is not None
    key, value = travelling
    return (vjp.cotangent(call, Gradients(key=key, value=value, **mine)),)


_ring.defvjp(_ring_forward, _ring_backward)


def _placed(
    call: AttentionCall, layout: Layout, shard: Any, source: Any, shards: int
) -> AttentionCall:
    """The call with its positions in the whole sequence, where the mask or ALiBi asks for them."""
    if not call.mask.has_diagonal and call.alibi_slopes is None:
        return call
    B, T, S, *_ = call.sizes
    mask = dataclasses.replace(
        call.mask,
        query_positions=_rows(shard_positions(T, shard, shards, layout), B),
        key_value_positions=_rows(shard_positions(S, source, shards, layout), B),
    )
    return dataclasses.replace(call, mask=mask)


def _local_call(query: Any, key: Any, value: Any, options: dict[str, Any]) -> AttentionCall:
    if jnp.ndim(query) != 4:
        raise ValueError(f"query must have shape (B, T, N, H), got {jnp.shape(query)}")
    return api.build_call(query, key, value, **options)


def _check_layout(layout: Layout, call: AttentionCall) -> None:
    for name, size in (("query", call.sizes.T), ("key", call.sizes.S)):
        if layout == "zigzag" and size % 2:
            raise ValueError(
                f'layout="zigzag" needs an even {name} length on each device, got {size}'
            )


def _with_sinks(out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
    """Adds the sinks to the denominator, once for all devices' keys."""
    total = jnp.logaddexp(lse, sinks.astype(lse.dtype)[:, None])
    share = jnp.exp(lse - total)
    return (out * jnp.swapaxes(share, 1, 2)[..., None]).astype(out.dtype), total


def _rows(positions: Array, batch: int) -> Array:
    return jnp.broadcast_to(positions, (batch, len(positions)))
