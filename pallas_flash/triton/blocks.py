"""Blocks of a call's arrays: what each program of a grid sees, and the launch.

A kernel sees each head as a matrix of rows (queries or keys) by columns (head dim). Triton's
blocks have power-of-two sizes, so a block may reach past the last row or column; nothing is padded
in memory, and `pallas_flash.triton.tile` masks the loads instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_flash.triton.problem import Index, Operands, Problem, Visits
from pallas_flash.triton.tile_sizes import Tile, padded_head_dim
from pallas_flash.varying import vary_like

Specs = Any


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


def logit_rows(problem: Problem, tile: Tile, shape: tuple[int, ...]) -> pl.BlockSpec:
    """The program's rows of a (B|1, N|1, T, S) array."""
    one_batch, one_head = shape[0] == 1, shape[1] == 1
    return pl.BlockSpec(
        (None, None, tile.query, round_up(problem.sizes.S, tile.key)),
        lambda i, n, b: (
            0 if one_batch else b,
            0 if one_head else n,
            query_tile_index(problem, tile, i),
            0,
        ),
    )


def query_tile_specs(problem: Problem, operands: Operands, tile: Tile) -> Operands:
    """One query tile, and all the keys and values of its key/value head."""
    sizes = problem.sizes

    def key_rows(columns: int) -> pl.BlockSpec:
        block = (None, round_up(sizes.S, tile.key), None, padded_head_dim(columns))
        return pl.BlockSpec(block, lambda i, n, b: (b, 0, n // sizes.G, 0))

    def own_vector(array: Array | None) -> pl.BlockSpec | None:
        if array is None:
            return None
        return pl.BlockSpec(
            (None, tile.query), lambda i, n, b: (b, query_tile_index(problem, tile, i))
        )

    return Operands(
        query=query_rows(problem, tile, sizes.H),
        key=key_rows(sizes.H),
        value=key_rows(sizes.Hv),
        query_segments=own_vector(operands.query_segments),
        query_positions=own_vector(operands.query_positions),
        key_segments=_whole_row(operands.key_segments, tile.key),
        key_positions=_whole_row(operands.key_positions, tile.key),
        visits=_visits_specs(operands, lambda i: query_tile_index(problem, tile, i)),
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

    def own_vector(array: Array | None) -> pl.BlockSpec | None:
        return None if array is None else pl.BlockSpec((None, tile.key), lambda j, k, b: (b, j))

    return Operands(
        query=group_rows(problem, tile, sizes.H),
        key=key_rows(tile, sizes.H),
        value=key_rows(tile, sizes.Hv),
        query_segments=_whole_row(operands.query_segments, tile.query),
        query_positions=_whole_row(operands.query_positions, tile.query),
        key_segments=own_vector(operands.key_segments),
        key_positions=own_vector(operands.key_positions),
        visits=_visits_specs(operands, lambda j: j),
        **_shared_specs(problem, operands, tile, heads=sizes.G),
    )


# ---- both ---------------------------------------------------------------------------------------


def round_up(size: int, multiple: int) -> int:
    return pl.cdiv(size, multiple) * multiple


def _shared_specs(problem: Problem, operands: Operands, tile: Tile, *, heads: int) -> dict:
    """Specs of what is not query, key or value; a program's second grid index counts `heads`."""

    small = (
        "query_lengths", "key_value_lengths", "scale", "sinks", "alibi_slopes", "dropout_seed",
        "score_tables", "mask_tables",
    )  # fmt: skip
    return {
        "bias": _dense_spec(problem, operands.bias, tile, heads),
        "dense": _dense_spec(problem, operands.dense, tile, heads),
        **{name: _whole_arrays(getattr(operands, name)) for name in small},
    }


def everything(shape: tuple[int, ...]) -> pl.BlockSpec:
    """All of an array, for every program."""
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def _whole_arrays(arrays: Any) -> Any:
    return jax.tree.map(lambda array: everything(array.shape), arrays)


def _whole_row(array: Array | None, block: int) -> pl.BlockSpec | None:
    """One batch row of a (B, size) array, as whole tiles."""
    if array is None:
        return None
    return pl.BlockSpec((None, round_up(array.shape[1], block)), lambda _, head, b: (b, 0))


def _visits_specs(operands: Operands, own_tile: Callable[[Index], Index]) -> Visits | None:
    """The list of one program's own tile, and all counts of its batch row."""
    if operands.visits is None:
        return None
    rows, own, others = operands.visits.order.shape

    def row(b: Index) -> Index:
        return 0 if rows == 1 else b

    return Visits(
        order=pl.BlockSpec((None, None, others), lambda t, head, b: (row(b), own_tile(t), 0)),
        count=pl.BlockSpec((None, own), lambda t, head, b: (row(b), 0)),
    )


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
    zeros: tuple[str, ...] = (),
) -> dict[str, jax.Array]:
    """`pl.pallas_call` for the Triton lowering.

    The kernel is called with one tree of refs for each of `inputs` and a dict of output refs.

    Args:
      outputs: name -> (shape and dtype, block spec).
      zeros: outputs that start as the arrays of their names in the last input, a dict.
    """
    flat_inputs, flat_outputs = len(jax.tree.leaves(inputs)), sorted(outputs)
    aliases = {
        flat_inputs - len(zeros) + place: flat_outputs.index(name)
        for place, name in enumerate(sorted(zeros))
    }
    # Inside `shard_map` what a kernel reads and writes varies over the same mesh axes.
    inputs = vary_like(inputs, inputs)
    manual = jax.typeof(jax.tree.leaves(inputs)[0]).mat
    shapes = {
        key: jax.ShapeDtypeStruct(shape.shape, shape.dtype, manual_axis_type=manual)
        for key, (shape, _) in outputs.items()
    }
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=specs,
        out_specs={key: spec for key, (_, spec) in outputs.items()},
        out_shape=shapes,
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name=name,
    )(*inputs)
