"""The Triton kernels as one implementation of an `AttentionCall` (see `pallas_flash.call`)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_flash import vjp
from pallas_flash.call import AttentionCall, Gradients
from pallas_flash.row_statistics import row_statistics, sink_gradient
from pallas_flash.triton.backward import (
    RowGradients,
    Saved,
    key_value_gradients,
    query_gradient,
)
from pallas_flash.triton.forward import forward as query_tiles
from pallas_flash.triton.mods import split
from pallas_flash.triton.problem import split_call
from pallas_flash.triton.tile_sizes import TileSizes, default_tile_sizes
from pallas_flash.triton.walk import Untraceable

NAME = "triton"
DTYPES = ("bfloat16", "float16", "float32")
# Accumulators of dK and dV, 2 x 64 x H float32, fill the registers of eight warps here.
LARGEST_HEAD_DIM = 256


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The implementation with chosen tile sizes; hashable, so it is a static argument.

    Attributes:
      tiles: tile sizes, or None for `default_tile_sizes`.
      interpret: run in the Pallas interpreter; None does so where JAX's device is not a GPU.
    """

    tiles: TileSizes | None = None
    interpret: bool | None = None
    NAME = NAME

    def unsupported(self, call: AttentionCall, platform: str) -> str | None:
        return unsupported(call, platform)

    def sizes(self, call: AttentionCall) -> TileSizes:
        if self.tiles is not None:
            return self.tiles
        wider = max(call.sizes.H, call.sizes.Hv)
        capability = plgpu.get_gpu_info().compute_capability if plgpu.is_gpu_device() else None
        square = any(
            array is not None and 1 not in array.shape[2:] for array in (call.bias, call.mask.dense)
        )
        return default_tile_sizes(
            wider, call.query.dtype, compute_capability=capability, has_square_input=square
        )

    def forward(self, call: AttentionCall) -> tuple[Array, Array]:
        problem, operands = split_call(call, self.interpret)
        tile = self.sizes(call).forward
        return query_tiles(problem, operands, tile)

    def backward(
        self,
        call: AttentionCall,
        out: Array,
        lse: Array,
        dout: Array,
        dlse: Array | None,
        wanted: frozenset[str],
    ) -> Gradients:
        problem, operands = split_call(call, self.interpret)
        real = call.mask.real_queries(call.sizes.B, call.sizes.T)
        lse2, delta = row_statistics(out, lse, dout, dlse, real)
        saved = Saved(dout.astype(out.dtype), lse2, delta)
        tiles, ds = self.sizes(call), _ds_axes(call) if "bias" in wanted else None
        # Atomic sums need no (B, N, T, S) array, but their order varies.
        shared = call.bias is not None and call.bias.shape[:2] != (call.sizes.B, call.sizes.N)
        shared = shared and not call.deterministic
        found: dict[str, Any] = {}
        rows = frozenset(
            part
            for part, asked in {
                "ds_full": ds == "full" and not shared,
                "ds_shared": ds == "full" and shared,
                "ds_rows": ds == "rows",
                "slopes": "alibi_slopes" in wanted,
                "scale": "traced_scale" in wanted,
                "tables": "score_mod" in wanted,
            }.items()
            if asked
        )
        if rows or "query" in wanted:
            found["query"], row = query_gradient(problem, operands, saved, tiles.dq, rows)
            found |= _from_rows(call, row)
        if wanted & {"key", "value"} or ds == "keys":
            found["key"], found["value"], by_key = key_value_gradients(
                problem, operands, saved, tiles.dkv, with_ds=ds == "keys"
            )
            if by_key is not None:
                found["bias"] = _sum_like(by_key[:, :, None, :], call.bias)
        if call.sinks is not None and "sinks" in wanted:
            found["sinks"] = sink_gradient(call.sinks, lse2, delta)
        return Gradients(**found)


def _from_rows(call: AttentionCall, rows: RowGradients) -> dict[str, Any]:
    """What the first backward kernel made, summed to the shapes of the operands."""
    found: dict[str, Any] = {}
    if rows.ds_full is not None:
        found["bias"] = _sum_like(rows.ds_full, call.bias)
    if rows.ds_shared is not None:
        found["bias"] = _sum_like(rows.ds_shared, call.bias)
    if rows.ds_rows is not None:
        found["bias"] = _sum_like(rows.ds_rows[:, :, :, None], call.bias)
    if rows.slopes is not None:
        found["alibi_slopes"] = jnp.sum(rows.slopes, axis=(0, 2))
    if rows.scale is not None:
        found["traced_scale"] = jnp.sum(rows.scale)
    if rows.tables and call.score_mod is not None:
        captured = enumerate(call.score_mod.captured)
        found["score_mod"] = tuple(
            rows.tables[i].reshape(x.shape).astype(x.dtype) if i in rows.tables else None
            for i, x in captured
        )
    return found


def unsupported(call: AttentionCall, platform: str) -> str | None:
    """Why these kernels cannot serve the call, naming the argument; None when they can."""
    sizes = call.sizes
    if call.query.dtype.name not in DTYPES:
        return (
            f"query has dtype {call.query.dtype.name}, the Triton kernels take "
            f"{', '.join(DTYPES)}; cast, or use 'xla'"
        )
    if max(sizes.H, sizes.Hv) > LARGEST_HEAD_DIM:
        return (
            f"query and value have head dims {sizes.H} and {sizes.Hv}, the Triton kernels hold at "
            f"most {LARGEST_HEAD_DIM} in registers; 'xla' takes any"
        )
    if platform not in ("cpu", "gpu"):
        return f"the Triton kernels are for NVIDIA GPUs, not for platform {platform!r}; use 'xla'"
    if call.bias is not None and call.bias.dtype.name not in DTYPES:
        return f"bias has dtype {call.bias.dtype.name}, the Triton kernels take {', '.join(DTYPES)}"
    if call.mask.dense is not None and 2**31 < call.mask.dense.size <= 2**32:
        # The lowering counts such an array's elements in 32 bits.
        return f"mask has {call.mask.dense.size} elements; 'xla' takes it, or a mask_mod does"
    return _unsupported_functions(call)


def _unsupported_functions(call: AttentionCall) -> str | None:
    for name, mod in (("score_mod", call.score_mod), ("mask_mod", call.mask.mask_mod)):
        if mod is None:
            continue
        for table in mod.captured:
            if table.dtype.itemsize > 4 or table.size == 0:
                return (
                    f"{name} captures an array of dtype {table.dtype.name} and shape "
                    f"{table.shape}; the Triton kernels take elements of at most 32 bits, 'xla' any"
                )
        try:
            parts = split(mod)
        except Untraceable as reason:
            return f"{name} {reason}; 'xla' and 'reference' can"
        if call.deterministic and parts.partials is not None and parts.tables_with_gradients:
            return (
                "deterministic=True with a score_mod that captures floating arrays: the Triton "
                "kernels add up their gradients atomically, in any order; 'xla' in a fixed one"
            )
    return None


def _ds_axes(call: AttentionCall) -> Literal["full", "rows", "keys"] | None:
    """What of dS the bias's gradient needs: all, its sum over keys, or its sum over queries."""
    if call.bias is None:
        return None
    _, _, rows, columns = call.bias.shape
    if columns == 1:
        return "rows"
    return "keys" if rows == 1 else "full"


def _sum_like(ds: Array, bias: Array | None) -> Array:
    """dS, perhaps summed over an axis already, summed over the axes that the bias lacks."""
    assert bias is not None
    lacking = tuple(axis for axis in range(4) if bias.shape[axis] == 1 and ds.shape[axis] != 1)
    return jnp.sum(ds, axis=lacking, keepdims=True).astype(bias.dtype)


forward = Kernels().forward
backward = Kernels().backward


def attention(
    call: AttentionCall, *, tiles: TileSizes | None = None, interpret: bool | None = None
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Output and LSE of a call, differentiable, with these tile sizes: for timing variants.

    >>> import jax.numpy as jnp
    >>> from pallas_flash.triton import Tile, TileSizes
    >>> q = jnp.ones((1, 16, 1, 16))
    >>> tile = Tile(query=16, key=16, warps=4, stages=1)
    >>> call = AttentionCall(query=q, key=q, value=q, static_scale=0.25)
    >>> out, lse = attention(call, tiles=TileSizes(forward=tile, dq=tile, dkv=tile))
    >>> out.shape, lse.shape
    ((1, 16, 1, 16), (1, 1, 16))
    """
    reason = unsupported(call, "cpu" if interpret else "gpu")
    if reason is not None:
        raise NotImplementedError(reason)
    return vjp.attention(Kernels(tiles, interpret), call)
