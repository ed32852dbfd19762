"""One call as the Triton kernels see it: static sizes, operands, their blocks, the launch.

A kernel sees each head as a matrix of rows (queries or keys) by columns (head dim). Triton's
blocks have power-of-two sizes, so a block may reach past the last row or column; nothing is padded
in memory, and `pallas_flash.triton.tile` masks the loads instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_flash.call import AttentionCall, Sizes
from pallas_flash.mask import Mask, row_lengths
from pallas_flash.triton.tile_sizes import Tile, padded_head_dim

LOG2_E = math.log2(math.e)
Index = Any
Specs = Any


class Operands(NamedTuple):
    """What every kernel reads: the arrays, their block specs, or their refs; None where absent."""

    query: Any  # (B, T, N, H)
    key: Any  # (B, S, K, H)
    value: Any  # (B, S, K, Hv)
    bias: Any = None  # (B|1, N|1, T|1, S|1), added to the logits
    dense: Any = None  # (B|1, N|1, T|1, S|1), True is visible
    query_lengths: Any = None  # int32 (B,)
    key_value_lengths: Any = None  # int32 (B,)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static side of one call: what a kernel is compiled for.

    Attributes:
      mask: the mask with every array replaced by a placeholder: it still says which fields it has.
      interpret: run in the Pallas interpreter.
    """

    sizes: Sizes
    scale: float
    mask: Mask
    has_bias: bool
    interpret: bool

    @property
    def defers_scale(self) -> bool:
        """True when logits stay unscaled until the exponent: a maximum commutes with scale > 0."""
        return self.scale > 0 and not self.has_bias

    @property
    def exponent_scale(self) -> float:
        """The factor that turns logits into powers of two."""
        return self.scale * LOG2_E if self.defers_scale else LOG2_E

    def edges(self, tile: Tile) -> bool:
        """True when tiles may cross the end of a sequence, or hold a mask that is no interval."""
        ragged = self.sizes.T % tile.query or self.sizes.S % tile.key
        return bool(ragged) or self.mask.has_lengths or not self.mask.is_interval


def split_call(call: AttentionCall, interpret: bool | None) -> tuple[Problem, Operands]:
    """Split a call into what kernels are compiled for and the arrays that they read.

    Args:
      interpret: run in the interpreter; None does so where JAX's device is not a GPU.
    """
    sizes, mask = call.sizes, call.mask
    assert call.static_scale is not None  # `unsupported` refuses a traced scale
    problem = Problem(
        sizes=sizes,
        scale=call.static_scale,
        mask=jax.tree.map(lambda _: 0, mask),
        has_bias=call.bias is not None,
        interpret=not plgpu.is_gpu_device() if interpret is None else interpret,
    )
    lengths = (None, None)
    if mask.has_lengths:
        lengths = (
            row_lengths(mask.query_lengths, sizes.B, sizes.T),
            row_lengths(mask.key_value_lengths, sizes.B, sizes.S),
        )
    return problem, Operands(call.query, call.key, call.value, call.bias, mask.dense, *lengths)


# ---- programs that hold one query tile (forward, dQ): grid (query tile, N, B) -------------------


def query_grid(problem: Problem, tile: Tile) -> tuple[int, int, int]:
    return pl.cdiv(problem.sizes.T, tile.query), problem.sizes.N, problem.sizes.B


def query_tile_index(problem: Problem, tile: Tile, program: Index) -> Index:
    """Query tile of a program: the last first, which have the most work under a causal mask."""
    return pl.cdiv(problem.sizes.T, tile.query) - 1 - program


def query_rows(problem: Problem, tile: Tile, columns: int) -> pl.BlockSpec:
    """The program's rows of a (B, T, N, columns) array."""
    return pl.BlockSpec(
        (None, tile.query, None, padded_head_dim(columns)),
        lambda i, n, b: (b, query_tile_index(problem, tile, i), n, 0),
    )


def query_vector(problem: Problem, tile: Tile) -> pl.BlockSpec:
    """The program's elements of a (B, N, T) array."""
    return pl.BlockSpec(
        (None, None, tile.query),
        lambda i, n, b: (b, n, query_tile_index(problem, tile, i)),
    )


def logit_rows(problem: Problem, tile: Tile) -> pl.BlockSpec:
    """The program's rows of a (B, N, T, S) array."""
    return pl.BlockSpec(
        (None, None, tile.query, round_up(problem.sizes.S, tile.key)),
        lambda i, n, b: (b, n, query_tile_index(problem, tile, i), 0),
    )


def query_tile_specs(problem: Problem, operands: Operands, tile: Tile) -> Operands:
    """One query tile, and all the keys and values of its key/value head."""
    sizes = problem.sizes

    def key_rows(columns: int) -> pl.BlockSpec:
        block = (None, round_up(sizes.S, tile.key), None, padded_head_dim(columns))
        return pl.BlockSpec(block, lambda i, n, b: (b, 0, n // sizes.G, 0))

    return Operands(
        query=query_rows(problem, tile, sizes.H),
        key=key_rows(sizes.H),
        value=key_rows(sizes.Hv),
        **_shared_specs(problem, operands, tile, heads=1),
    )


# ---- programs that hold one key tile (dK, dV): grid (key tile, K, B) ----------------------------


def key_grid(problem: Problem, tile: Tile) -> tuple[int, int, int]:
    return pl.cdiv(problem.sizes.S, tile.key), problem.sizes.K, problem.sizes.B


def key_rows(tile: Tile, columns: int) -> pl.BlockSpec:
    """The program's rows of a (B, S, K, columns) array."""
    return pl.BlockSpec(
        (None, tile.key, None, padded_head_dim(columns)), lambda j, k, b: (b, j, k, 0)
    )


def group_rows(problem: Problem, tile: Tile, columns: int) -> pl.BlockSpec:
    """All rows of the program's G query heads, of a (B, T, N, columns) array."""
    rows = round_up(problem.sizes.T, tile.query)
    block = (None, rows, problem.sizes.G, padded_head_dim(columns))
    return pl.BlockSpec(block, lambda j, k, b: (b, 0, k, 0))


def group_vectors(problem: Problem, tile: Tile) -> pl.BlockSpec:
    """All elements of the program's G query heads, of a (B, N, T) array."""
    block = (None, problem.sizes.G, round_up(problem.sizes.T, tile.query))
    return pl.BlockSpec(block, lambda j, k, b: (b, k, 0))


def key_tile_specs(problem: Problem, operands: Operands, tile: Tile) -> Operands:
    """One key tile, and all the queries of the heads that read it."""
    sizes = problem.sizes
    return Operands(
        query=group_rows(problem, tile, sizes.H),
        key=key_rows(tile, sizes.H),
        value=key_rows(tile, sizes.Hv),
        **_shared_specs(problem, operands, tile, heads=sizes.G),
    )


# ---- both ---------------------------------------------------------------------------------------


def round_up(size: int, multiple: int) -> int:
    return pl.cdiv(size, multiple) * multiple


def _shared_specs(problem: Problem, operands: Operands, tile: Tile, *, heads: int) -> dict:
    """Specs of what is not query, key or value; a program's second grid index counts `heads`."""

    def everything(array: jax.Array | None) -> pl.BlockSpec | None:
        return None if array is None else pl.BlockSpec(array.shape, lambda *_: (0,))

    return {
        "bias": _dense_spec(problem, operands.bias, tile, heads),
        "dense": _dense_spec(problem, operands.dense, tile, heads),
        "query_lengths": everything(operands.query_lengths),
        "key_value_lengths": everything(operands.key_value_lengths),
    }


def _dense_spec(
    problem: Problem, array: jax.Array | None, tile: Tile, heads: int
) -> pl.BlockSpec | None:
    """A bias or dense mask as (heads, T, S) of one batch row, its broadcast axes kept at 1."""
    if array is None:
        return None
    one_batch, one_head, one_query, one_key = (size == 1 for size in array.shape)
    block = (
        None,
        1 if one_head else heads,
        1 if one_query else round_up(problem.sizes.T, tile.query),
        1 if one_key else round_up(problem.sizes.S, tile.key),
    )
    return pl.BlockSpec(
        block, lambda _, head, b: (0 if one_batch else b, 0 if one_head else head, 0, 0)
    )


def launch(
    kernel: Callable[..., None],
    *inputs: Any,
    specs: tuple[Specs, ...],
    outputs: dict[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    grid: tuple[int, int, int],
    tile: Tile,
    name: str,
    interpret: bool,
    aliases: dict[int, int] | None = None,
) -> dict[str, jax.Array]:
    """`pl.pallas_call` for the Triton lowering.

    The kernel is called with one tree of refs for each of `inputs` and a dict of output refs.

    Args:
      outputs: name -> (shape and dtype, block spec).
      aliases: flat input index -> flat output index, for outputs that are not written everywhere.
    """
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=specs,
        out_specs={key: spec for key, (_, spec) in outputs.items()},
        out_shape={key: shape for key, (shape, _) in outputs.items()},
        input_output_aliases=aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name=name,
    )(*inputs)
