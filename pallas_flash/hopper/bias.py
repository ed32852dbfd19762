"""The additive bias of the Hopper forward: which of three forms it takes on its way to the logits.

    logits = scale q k^T + bias[b, n, i, j]          natural-log units, -inf is masked

A bias of one value for each query and key comes by TMA, a tile for each key tile, into a ring of
its own. One that is the same for all queries is a row of keys for each key tile, one that is the
same for all keys a number for each query row: these two are small, so they are made flat, float32
and in the kernel's own unit before the launch.

Not exact: a finite bias whose value in the kernel's unit leaves float32's range (below about -3e38
times the scale) counts as -inf where it comes in tiles. It differs only for a row that sees nothing
else: its output is 0 and its LSE -inf.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_flash.call import AttentionCall, Sizes

TILE_DTYPES = ("bfloat16", "float16", "float32")
"""What tiles are loaded as; others become float32 first."""
SWIZZLE_BYTES = 128
TMA_ROWS = 8


class BiasForm(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
      kind: "tile" for (.., T, S), "keys" for (.., 1, S), "rows" for (.., T, 1) and (.., 1, 1).
      dtype: of the tiles; float32 for the other kinds.
      per_batch, per_head: False where one bias serves all of them.
    """

    kind: Literal["tile", "keys", "rows"]
    dtype: Any
    per_batch: bool
    per_head: bool

    @property
    def width(self) -> int:
        """Keys of one swizzled row of a tile: tiles are read this many columns at a time."""
        return SWIZZLE_BYTES // jnp.dtype(self.dtype).itemsize

    def bytes_per_key(self, queries: int) -> int:
        """Bytes of shared memory for each key of one stage of the ring."""
        if self.kind == "rows":
            return 0
        rows = queries if self.kind == "tile" else 1
        return rows * jnp.dtype(self.dtype).itemsize

    def plane(self, batch: Any, head: Any, heads: int) -> Any:
        """Which (batch, head) plane of the operand belongs to this head."""
        plane = batch if self.per_batch else 0
        if self.per_head:
            plane = plane * heads + head
        return plane


def bias_form(call: AttentionCall) -> BiasForm | None:
    """The form of a call's bias; None without one."""
    if call.bias is None:
        return None
    batch, heads, queries, keys = call.bias.shape
    kind = "rows" if keys == 1 else "keys" if queries == 1 else "tile"
    dtype = jnp.float32
    if kind == "tile" and call.bias.dtype.name in TILE_DTYPES:
        dtype = call.bias.dtype
    return BiasForm(kind, jnp.dtype(dtype), batch > 1, heads > 1)


def bias_operand(
    bias: Float[Array, "#B #N #T #S"],
    form: BiasForm,
    sizes: Sizes,
    *,
    padded_rows: int,
    keys: int,
    factor: float,
    lowest: float,
) -> Array:
    """The bias as the kernel reads it.

    Args:
      bias: of the call.
      form: its form.
      sizes: of the call.
      padded_rows: query rows of all units.
      keys: keys per tile.
      factor: from natural-log units to the kernel's.
      lowest: what finite values of the small forms are kept above, so that they stay finite.

    Returns: (planes, T, S), padded to what TMA takes, in its own unit, for tiles; else flat float32
      (planes * padded length) in the kernel's unit.
    """
    planes = bias.shape[0] * bias.shape[1]
    if form.kind == "tile":
        flat = bias.astype(form.dtype).reshape(planes, sizes.T, sizes.S)
        missing = (-sizes.T % TMA_ROWS, -sizes.S % form.width)
        if any(missing):  # a copy
            flat = jnp.pad(flat, ((0, 0), (0, missing[0]), (0, missing[1])))
        return flat
    rows = form.kind == "rows"
    own, length = (sizes.T, padded_rows) if rows else (sizes.S, math.ceil(sizes.S / keys) * keys)
    flat = bias[:, :, :, 0] if rows else bias[:, :, 0, :]
    flat = jnp.broadcast_to(flat.reshape(planes, -1), (planes, own)).astype(jnp.float32)
    scaled = jnp.where(flat < 0, jnp.maximum(flat * factor, lowest), flat * factor)
    scaled = jnp.where(flat == -jnp.inf, -jnp.inf, scaled)
    return jnp.pad(scaled, ((0, 0), (0, length - own))).reshape(-1)


def dense_as_bias(call: AttentionCall) -> AttentionCall:
    """The call with its dense mask in the bias, -inf where it hides; see `dense_refusal`."""
    dense = call.mask.dense
    if dense is None:
        return call
    bias = jnp.zeros((), jnp.bfloat16) if call.bias is None else call.bias
    merged = jnp.where(dense, bias, jnp.asarray(-jnp.inf, bias.dtype))
    return dataclasses.replace(call, bias=merged, mask=dataclasses.replace(call.mask, dense=None))


def dense_refusal(call: AttentionCall) -> str | None:
    """Why a dense mask cannot join the bias; None when it can, or there is none."""
    if call.mask.dense is None or call.bias is None:
        return None
    shapes = call.mask.dense.shape, call.bias.shape
    if jnp.broadcast_shapes(*shapes) in shapes:
        return None
    return (
        f"mask of shape {shapes[0]} and bias of shape {shapes[1]} make a larger array together, "
        "the Hopper kernels take one that the other broadcasts to; 'triton' takes both"
    )
