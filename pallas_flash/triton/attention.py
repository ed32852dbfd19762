"""The Triton kernels as one implementation of an `AttentionCall` (see `pallas_flash.call`)."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_flash import vjp
from pallas_flash.call import AttentionCall, Gradients, beyond_foundation
from pallas_flash.triton.backward import key_value_gradients, prepare, query_gradient
from pallas_flash.triton.forward import forward as query_tiles
from pallas_flash.triton.problem import split_call
from pallas_flash.triton.tile_sizes import TileSizes, default_tile_sizes

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
        saved = prepare(out, lse, dout, dlse)
        tiles = self.sizes(call)
        dquery = dkey = dvalue = dbias = None
        ds = _ds_axes(call) if "bias" in wanted else None
        if "query" in wanted or ds in ("full", "rows"):
            kept = ds if ds in ("full", "rows") else None
            dquery, dbias = query_gradient(problem, operands, saved, tiles.dq, kept)
        if wanted & {"key", "value"} or ds == "keys":
            dkey, dvalue, by_key = key_value_gradients(
                problem, operands, saved, tiles.dkv, with_ds=ds == "keys"
            )
            dbias = by_key if ds == "keys" else dbias
        if dbias is not None:
            dbias = _sum_like(dbias, ds, call.bias)
        return Gradients(query=dquery, key=dkey, value=dvalue, bias=dbias)


def unsupported(call: AttentionCall, platform: str) -> str | None:
    """Why these kernels cannot serve the call, naming the argument; None when they can."""
    sizes = call.sizes
    argument = beyond_foundation(call)
    if argument is not None:
        return f"the Triton kernels do not serve {argument}; 'xla' does"
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
    return None


def _ds_axes(call: AttentionCall) -> Literal["full", "rows", "keys"] | None:
    """What of dS the bias's gradient needs: all, its sum over keys, or its sum over queries."""
    if call.bias is None:
        return None
    _, _, rows, columns = call.bias.shape
    if columns == 1:
        return "rows"
    return "keys" if rows == 1 else "full"


def _sum_like(ds: Array, axes: str | None, bias: Array | None) -> Array:
    """dS, already summed to the given axes, summed over the others that the bias lacks."""
    assert bias is not None
    if axes == "rows":
        ds = ds[:, :, :, None]
    elif axes == "keys":
        ds = ds[:, :, None, :]
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
