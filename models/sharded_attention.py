"""Attention on a mesh: each device runs the kernel on its rows and heads.

XLA's partitioner cannot look into a Pallas kernel: left to itself it would gather all queries, keys
and values on every device. So where a mesh of `models.sharding` is set (`jax.set_mesh`), the call
goes through `shard_map`, with the batch over data and fsdp, heads over tensor, and, where the
sequence is split over context, keys and values travelling around a ring.
"""

import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from models.sharding import BATCH, active_mesh
from pallas_flash import dot_product_attention
from pallas_flash.ring import ring_attention


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    **options: Any,
) -> Float[Array, "B T N H"]:
    """`dot_product_attention` of a sequence with itself, spread over the mesh that is set, if any.

    Args:
      query, key, value: of the whole batch.
      segment_ids: documents of both queries and keys.
      options: other arguments of `dot_product_attention` that `ring_attention` takes too.

    Raises:
      ValueError: the sequence is split and the implementation is `reference`.
    """
    mesh = active_mesh()
    if mesh is None:
        return _local(query, key, value, segment_ids, **options)
    ways = mesh.shape["tensor"]
    # Whole groups of query heads go with their key/value head, or all heads stay together.
    heads = "tensor" if key.shape[2] % ways == 0 else None
    ring = mesh.shape["context"] > 1
    if ring and options.get("implementation") == "reference":
        raise ValueError(
            "implementation='reference' cannot go around a ring, and the mesh splits sequences "
            "over context; use 'xla', or None to choose"
        )
    whole = P(BATCH, "context", heads, None)
    local = functools.partial(_ring if ring else _local, **options)
    call = jax.shard_map(
        local,
        in_specs=(whole, whole, whole, None if segment_ids is None else P(BATCH, "context")),
        out_specs=whole,
    )
    return call(query, key, value, segment_ids)


def _local(query: Array, key: Array, value: Array, ids: Array | None, **options: Any) -> Array:
    return dot_product_attention(
        query, key, value, query_segment_ids=ids, key_value_segment_ids=ids, **options
    )


def _ring(query: Array, key: Array, value: Array, ids: Array | None, **options: Any) -> Array:
    return ring_attention(
        query,
        key,
        value,
        axis_name="context",
        query_segment_ids=ids,
        key_value_segment_ids=ids,
        **options,
    )
