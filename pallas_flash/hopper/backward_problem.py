"""What the Hopper backward is compiled for, and the memory and barriers its warpgroups share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.call import Sizes
from pallas_flash.hopper.backward_tiles import HALF, BackwardTiles
from pallas_flash.mask import Mask

LOG2_E = math.log2(math.e)
CONSUMERS = 2


class Problem(NamedTuple):
    """The static side of one call: what the kernel is compiled for."""

    sizes: Sizes
    mask: Mask  # arrays replaced by placeholders: it says which fields there are
    scale: float
    tiles: BackwardTiles
    dtype: Any

    @property
    def key_tiles(self) -> int:
        return pl.cdiv(self.sizes.S, self.tiles.keys)

    @property
    def exponent_scale(self) -> float:
        return self.scale * LOG2_E

    @property
    def never_masks(self) -> bool:
        """True when no tile is ever partial; query rows past T are silenced by their LSE."""
        return self.mask.is_trivial and self.sizes.S % self.tiles.keys == 0

    @property
    def every_later_query_sees(self) -> bool:
        """True when masked tiles have no upper bound to compare with: plain causal, whole tiles.

        Query rows past T are silenced by their LSE.
        """
        mask = self.mask
        whole = self.sizes.S % self.tiles.keys == 0
        return whole and mask.left is None and mask.right is not None and not mask.has_lengths


class Inputs(NamedTuple):
    lengths: Any  # int32, flat (2, B): query and key lengths; None without lengths
    query: Any  # (B, T, N, H)
    key: Any  # (B, S, K, H)
    value: Any  # (B, S, K, Hv)
    dout: Any  # (B, T, N, Hv)
    lse2: Any  # (B, N, whole query tiles), float32: log2(e) LSE, +inf where nothing is seen
    delta: Any  # (B, N, whole query tiles), float32: D


class Outputs(NamedTuple):
    dkey: Any  # (B, S, K, H)
    dvalue: Any  # (B, S, K, Hv)
    dquery: Any  # (B, T, N, H), float32 and zero at the start


class Barriers(NamedTuple):
    kv_ready: Any
    q_ready: Any
    q_free: Any
    do_ready: Any
    do_free: Any
    exchange: Any  # both warpgroups have written their half of dS


class Scratch(NamedTuple):
    key: Any  # (1, keys, H)
    value: Any  # (1, keys, Hv)
    query: Any  # (stages, queries, H)
    dout: Any  # (dout_stages, queries, Hv)
    lse2: Any  # (stages, queries)
    delta: Any  # (dout_stages, queries)
    ds: Any  # (2, keys, queries): in turns (by keys), or one for each warpgroup (by head dim)
    dquery: Any  # (2, 64, 64) float32, one for each warpgroup
    barriers: Barriers


def scratch_types(problem: Problem) -> Scratch:
    sizes, tiles = problem.sizes, problem.tiles

    def tile(*shape: int, dtype: Any = problem.dtype) -> Any:
        width = jnp.dtype(dtype).itemsize
        swizzle = plgpu.find_swizzle(shape[-1] * width * 8)
        transforms = (  # pyright does not see that these classes are concrete
            plgpu.TilingTransform((8, swizzle // width)),  # pyright: ignore[reportAbstractUsage]
            plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
        )
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    # A matrix and its row statistics land together: two copies, two arrivals.
    return Scratch(
        key=tile(1, tiles.keys, sizes.H),
        value=tile(1, tiles.keys, sizes.Hv),
        query=tile(tiles.stages, tiles.queries, sizes.H),
        dout=tile(tiles.dout_stages, tiles.queries, sizes.Hv),
        lse2=plgpu.SMEM((tiles.stages, tiles.queries), jnp.float32),
        delta=plgpu.SMEM((tiles.dout_stages, tiles.queries), jnp.float32),
        ds=tile(2, tiles.keys, tiles.queries),
        dquery=tile(CONSUMERS, HALF, HALF, dtype=jnp.float32),
        barriers=Barriers(
            kv_ready=plgpu.Barrier(num_arrivals=2),
            q_ready=plgpu.Barrier(num_barriers=tiles.stages, num_arrivals=2),
            q_free=plgpu.Barrier(num_barriers=tiles.stages, num_arrivals=CONSUMERS),
            do_ready=plgpu.Barrier(num_barriers=tiles.dout_stages, num_arrivals=2),
            do_free=plgpu.Barrier(num_barriers=tiles.dout_stages, num_arrivals=CONSUMERS),
            exchange=plgpu.Barrier(num_arrivals=CONSUMERS),
        ),
    )
