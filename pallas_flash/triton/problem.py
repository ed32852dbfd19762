"""One call as the Triton kernels see it: what they are compiled for, and the arrays they read."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_flash.call import AttentionCall, Sizes
from pallas_flash.mask import Mask, row_lengths
from pallas_flash.mods import Mod
from pallas_flash.row_statistics import LOG2_E
from pallas_flash.schedule import tile_map
from pallas_flash.triton.mods import Split, split
from pallas_flash.triton.tile_sizes import Tile

Index = Any


class Operands(NamedTuple):
    """What every kernel reads: the arrays, their block specs, or their refs; None where absent."""

    query: Any  # (B, T, N, H)
    key: Any  # (B, S, K, H)
    value: Any  # (B, S, K, Hv)
    bias: Any = None  # (B|1, N|1, T|1, S|1), added to the logits
    dense: Any = None  # (B|1, N|1, T|1, S|1), True is visible
    query_lengths: Any = None  # int32 (B,)
    key_value_lengths: Any = None  # int32 (B,)
    query_segments: Any = None  # int32 (B, T)
    key_segments: Any = None  # int32 (B, S)
    query_positions: Any = None  # int32 (B, T)
    key_positions: Any = None  # int32 (B, S)
    scale: Any = None  # float32 (1,), when it is not static
    sinks: Any = None  # float32 (N,)
    alibi_slopes: Any = None  # float32 (N,)
    dropout_seed: Any = None  # uint32 (2,)
    score_tables: tuple[Any, ...] = ()  # what `score_mod` captured; scalars as (1,)
    mask_tables: tuple[Any, ...] = ()  # what `mask_mod` captured
    kinds: Any = None  # int8, of the block mask; only the lists of tiles are made from it
    visits: Any = None  # `Visits` of the tiles of one kernel


class Visits(NamedTuple):
    """Lists of tiles to visit, where the mask is no interval but empty tiles can be told."""

    order: Any  # int32 (B|1, own tiles, other tiles): the visited ones first
    count: Any  # int32 (B|1, own tiles)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static side of one call: what a kernel is compiled for.

    Attributes:
      scale: None when it is an operand.
      mask: the mask with every array replaced by a placeholder: it still says which fields it has.
      soft_cap, dropout_rate: as in the call.
      has_bias, has_alibi: which operands enter the logits.
      score_mod, mask_mod: the user's functions, split for kernels.
      interpret: run in the Pallas interpreter.
    """

    sizes: Sizes
    scale: float | None
    mask: Mask
    soft_cap: float | None
    dropout_rate: float
    has_bias: bool
    has_alibi: bool
    score_mod: Split | None
    mask_mod: Split | None
    interpret: bool

    @property
    def has_plain_logits(self) -> bool:
        """True when logits are the scaled products alone."""
        beyond = self.has_bias or self.has_alibi or self.is_nonlinear
        return not beyond

    @property
    def is_nonlinear(self) -> bool:
        """True when the logits' derivative by the score is not 1."""
        return self.soft_cap is not None or self.score_mod is not None

    @property
    def defers_scale(self) -> bool:
        """True when logits stay unscaled until the exponent: a maximum commutes with scale > 0."""
        return self.scale is not None and self.scale > 0 and self.has_plain_logits

    @property
    def exponent_scale(self) -> float:
        """The factor that turns logits into powers of two."""
        if self.defers_scale:
            assert self.scale is not None
            return self.scale * LOG2_E
        return LOG2_E

    @property
    def has_lists(self) -> bool:
        """True when `Visits` say which tiles to visit, not the mask's bounds."""
        mask = self.mask
        by_position = mask.has_positions and mask.has_diagonal
        return mask.has_segments or by_position or mask.blocks is not None

    def edges(self, tile: Tile) -> bool:
        """True when tiles may cross the end of a sequence, or hold a mask that is no interval."""
        ragged = self.sizes.T % tile.query or self.sizes.S % tile.key
        return bool(ragged) or self.mask.has_lengths or not self.mask.is_interval


def split_call(call: AttentionCall, interpret: bool | None) -> tuple[Problem, Operands]:
    """Split a call into what kernels are compiled for and the arrays that they read.

    Args:
      interpret: run in the interpreter; None does so where JAX's device is not a GPU.
    """
    mask = call.mask
    problem = Problem(
        sizes=call.sizes,
        scale=call.static_scale,
        mask=jax.tree.map(lambda _: 0, mask),
        soft_cap=call.soft_cap,
        dropout_rate=call.dropout_rate,
        has_bias=call.bias is not None,
        has_alibi=call.alibi_slopes is not None,
        score_mod=None if call.score_mod is None else split(call.score_mod),
        mask_mod=None if mask.mask_mod is None else split(mask.mask_mod),
        interpret=not plgpu.is_gpu_device() if interpret is None else interpret,
    )
    return problem, _operands(call)


def _operands(call: AttentionCall) -> Operands:
    sizes, mask = call.sizes, call.mask
    lengths = (None, None)
    if mask.has_lengths:
        lengths = (
            row_lengths(mask.query_lengths, sizes.B, sizes.T),
            row_lengths(mask.key_value_lengths, sizes.B, sizes.S),
        )

    def float32(array: Array | None) -> Array | None:
        return None if array is None else jnp.atleast_1d(array.astype(jnp.float32))

    def tables(mod: Mod | None) -> tuple[Array, ...]:
        return () if mod is None else tuple(jnp.atleast_1d(table) for table in mod.captured)

    return Operands(
        call.query,
        call.key,
        call.value,
        bias=call.bias,
        dense=mask.dense,
        query_lengths=lengths[0],
        key_value_lengths=lengths[1],
        query_segments=mask.query_segment_ids,
        key_segments=mask.key_value_segment_ids,
        query_positions=mask.query_positions,
        key_positions=mask.key_value_positions,
        scale=float32(call.traced_scale),
        sinks=float32(call.sinks),
        alibi_slopes=float32(call.alibi_slopes),
        dropout_seed=call.dropout_seed,
        score_tables=tables(call.score_mod),
        mask_tables=tables(mask.mask_mod),
        kinds=None if mask.blocks is None else mask.blocks.kinds,
    )


def with_visits(
    problem: Problem, operands: Operands, tile: Tile, *, by_key: bool = False
) -> Operands:
    """The operands of one kernel: with the tiles that each of its programs visits.

    Args:
      by_key: programs hold key tiles and visit query tiles, not the other way round.
    """
    if not problem.has_lists:
        return operands._replace(kinds=None)
    sizes, blocks = problem.sizes, problem.mask.blocks
    mask = dataclasses.replace(
        problem.mask,
        query_lengths=operands.query_lengths,
        key_value_lengths=operands.key_value_lengths,
        query_segment_ids=operands.query_segments,
        key_value_segment_ids=operands.key_segments,
        query_positions=operands.query_positions,
        key_value_positions=operands.key_positions,
        blocks=None if blocks is None else dataclasses.replace(blocks, kinds=operands.kinds),
    )
    visit = tile_map(mask, sizes.B, sizes.T, sizes.S, (tile.query, tile.key))
    visit = jnp.swapaxes(visit, 1, 2) if by_key else visit
    order = jnp.argsort(~visit, axis=-1, stable=True).astype(jnp.int32)
    visits = Visits(order, jnp.sum(visit, axis=-1, dtype=jnp.int32))
    return operands._replace(kinds=None, visits=visits)
