"""What the Hopper backward is compiled for, and the memory and barriers its warpgroups share."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.call import Sizes
from pallas_flash.hopper.backward_tiles import HALF, BackwardTiles
from pallas_flash.mask import Mask
from pallas_flash.row_statistics import LOG2_E

CONSUMERS = 2
Refs = Any
Index = Any


class Problem(NamedTuple):
    """The static side of one call: what the kernel is compiled for."""

    sizes: Sizes
    mask: Mask  # arrays replaced by placeholders: it says which fields there are
    scale: float
    tiles: BackwardTiles
    dtype: Any
    soft_cap: float | None = None
    has_alibi: bool = False
    deterministic: bool = False

    @property
    def warpgroups(self) -> int:
        """Consumers, the producer, and for ordered sums the warpgroup that sends dQ."""
        return CONSUMERS + (2 if self.deterministic else 1)

    @property
    def consumer_registers(self) -> int:
        """What the others, with 24 each, leave of 65,536 registers to a consumer's thread."""
        return 232 if self.deterministic else 240

    @property
    def query_tiles(self) -> int:
        return pl.cdiv(self.sizes.T, self.tiles.queries)

    @property
    def key_tiles(self) -> int:
        return pl.cdiv(self.sizes.S, self.tiles.keys)

    @property
    def product_scale(self) -> float:
        """Factor of q k^T: to units of log2, or to the argument of the soft cap's tanh."""
        return self.scale * (LOG2_E if self.soft_cap is None else 1 / self.soft_cap)

    @property
    def logit_scale(self) -> float:
        """Factor of anything else in natural-log units there."""
        return LOG2_E if self.soft_cap is None else 1 / self.soft_cap

    @property
    def interval_mask(self) -> Mask:
        """The mask without its segment ids, which are no interval of indices."""
        return dataclasses.replace(self.mask, query_segment_ids=None, key_value_segment_ids=None)

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
        plain = mask.is_interval and not mask.has_lengths
        return whole and plain and mask.left is None and mask.right is not None


class Inputs(NamedTuple):
    """Arrays, or refs to them; the first ones None where the call does not have them."""

    lengths: Any = None  # int32, flat (2, B): query and key lengths
    query_ids: Any = None  # int32 (B, whole query tiles): segment ids, -1 where there is none
    key_ids: Any = None  # int32, flat (B, whole key tiles): segment ids, -2 where there is none
    bounds: Any = None  # int32, flat (B, key tiles, 4): `Bounds` in query tiles, with segments
    slopes: Any = None  # float32 (N,): ALiBi's
    query: Any = None  # (B, T, N, H)
    key: Any = None  # (B, S, K, H)
    value: Any = None  # (B, S, K, Hv)
    dout: Any = None  # (B, T, N, Hv)
    lse2: Any = None  # (B, N, whole query tiles), float32: log2(e) LSE, +inf where nothing is seen
    delta: Any = None  # (B, N, whole query tiles), float32: D

    @property
    def present(self) -> tuple[str, ...]:
        return tuple(name for name, x in self._asdict().items() if x is not None)


class Outputs(NamedTuple):
    dkey: Any  # (B, S, K, H)
    dvalue: Any  # (B, S, K, Hv)
    dquery: Any  # (B, T, N, H), float32 and zero at the start
    turns: Any = None  # semaphores (B N query tiles,): key tiles that are done with a tile of dQ


class Barriers(NamedTuple):
    kv_ready: Any
    q_ready: Any
    q_free: Any
    do_ready: Any
    do_free: Any
    exchange: Any  # both warpgroups have written their half of dS
    dq_ready: Any  # both have written a piece of dQ; None if each sends its own
    dq_free: Any


class Scratch(NamedTuple):
    key: Any  # (1, keys, H)
    value: Any  # (1, keys, Hv)
    query: Any  # (stages, queries, H)
    dout: Any  # (dout_stages, queries, Hv)
    lse2: Any  # (stages, queries)
    delta: Any  # (dout_stages, queries)
    query_ids: Any  # (stages, queries) int32, None without segments
    ds: Any  # (2, keys, queries): in turns (by keys), or one for each warpgroup (by head dim)
    dquery: Any  # (2, 64, 64) float32, one for each warpgroup
    barriers: Barriers


class Unit(NamedTuple):
    """The key tile of this CTA and the query tiles that see it."""

    batch: Index
    kv_head: Index
    first_key: Index
    q_length: Index
    kv_length: Index
    lo: Index  # query tiles [lo, hi) see it, in each query head of the group
    full_lo: Index  # those in [full_lo, full_hi) without masking
    full_hi: Index
    hi: Index

    def place(self, step: Index, group: int) -> tuple[Index, Index]:
        """Query head within the group and query tile of a step."""
        if group == 1:
            return jnp.int32(0), self.lo + step
        count = jnp.maximum(self.hi - self.lo, 1)
        return step // count, self.lo + lax.rem(step, count)


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

    # A matrix and what belongs to its rows land together: one arrival for each copy.
    segments = problem.mask.has_segments
    return Scratch(
        key=tile(1, tiles.keys, sizes.H),
        value=tile(1, tiles.keys, sizes.Hv),
        query=tile(tiles.stages, tiles.queries, sizes.H),
        dout=tile(tiles.dout_stages, tiles.queries, sizes.Hv),
        lse2=plgpu.SMEM((tiles.stages, tiles.queries), jnp.float32),
        delta=plgpu.SMEM((tiles.dout_stages, tiles.queries), jnp.float32),
        query_ids=plgpu.SMEM((tiles.stages, tiles.queries), jnp.int32) if segments else None,
        ds=tile(2, tiles.keys, tiles.queries),
        dquery=tile(CONSUMERS, HALF, HALF, dtype=jnp.float32),
        barriers=Barriers(
            kv_ready=plgpu.Barrier(num_arrivals=2),
            q_ready=plgpu.Barrier(num_barriers=tiles.stages, num_arrivals=3 if segments else 2),
            q_free=plgpu.Barrier(num_barriers=tiles.stages, num_arrivals=CONSUMERS),
            do_ready=plgpu.Barrier(num_barriers=tiles.dout_stages, num_arrivals=2),
            do_free=plgpu.Barrier(num_barriers=tiles.dout_stages, num_arrivals=CONSUMERS),
            exchange=plgpu.Barrier(num_arrivals=CONSUMERS),
            dq_ready=plgpu.Barrier(num_arrivals=CONSUMERS) if problem.deterministic else None,
            dq_free=plgpu.Barrier() if problem.deterministic else None,
        ),
    )
