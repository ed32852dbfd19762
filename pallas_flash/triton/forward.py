"""Forward kernel: one program per query tile and head, looping over its key tiles.

For a query tile Q_i the program keeps the running maximum m, the denominator l and the output O
before normalisation in registers, and visits key tiles j (FlashAttention-2, arXiv 2307.08691,
algorithm 1), in base 2 with c = scale * log2(e):

    S = Q_i K_j^T
    m' = max(m, c rowmax(S))        a = 2^(m - m')
    P = 2^(c S - m')
    l = a l + rowsum(P)
    O = a O + P V_j

then once O_i = O / l and LSE_i = ln(2) (m + log2 l). The scale never touches Q and the division
waits for the end. Along the keys one program does

      lo           full_lo               full_hi          hi
      |  masked    |   no masking code   |    masked      |         and nothing outside [lo, hi)
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash.triton import problem as blocks
from pallas_flash.triton.problem import Operands, Problem
from pallas_flash.triton.tile import (
    Logits,
    dot,
    exponential,
    load_lengths,
    load_rows,
    loop_tiles,
    store_rows,
    store_vector,
)
from pallas_flash.triton.tile_sizes import Tile, padded_head_dim

# The maximum starts here and not at -inf: a row that has seen nothing yet then needs no guard
# against inf - inf, because its P is 2^(-inf - LOWEST) = 0 all the same.
LOWEST = -1e38


def forward(problem: Problem, operands: Operands, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Output (B, T, N, Hv) in the query's dtype and LSE (B, N, T), float32, natural log."""
    sizes = problem.sizes
    outputs = {
        "out": (
            jax.ShapeDtypeStruct((sizes.B, sizes.T, sizes.N, sizes.Hv), operands.query.dtype),
            blocks.query_rows(problem, tile, sizes.Hv),
        ),
        "lse": (
            jax.ShapeDtypeStruct((sizes.B, sizes.N, sizes.T), jnp.float32),
            blocks.query_vector(problem, tile),
        ),
    }
    results = blocks.launch(
        functools.partial(_kernel, problem=problem, tile=tile),
        operands,
        specs=(blocks.query_tile_specs(problem, operands, tile),),
        outputs=outputs,
        grid=blocks.query_grid(problem, tile),
        tile=tile,
        name="flash_forward",
        interpret=problem.interpret,
    )
    return results["out"], results["lse"]


def _kernel(refs: Operands, outputs: dict, *, problem: Problem, tile: Tile) -> None:
    sizes, mask, c = problem.sizes, problem.mask, problem.exponent_scale
    q_start = blocks.query_tile_index(problem, tile, pl.program_id(0)) * tile.query
    q_length, kv_length = load_lengths(problem, refs, pl.program_id(2))
    logits = Logits(problem, tile, refs, q_length, kv_length)
    edges = problem.edges(tile)
    exp2 = exponential(problem)

    q = load_rows(
        refs.query, 0, tile.query, sizes.H, rows_below=q_length - q_start if edges else None
    )

    def visit(j, carry, masked: bool):
        m, l, o = carry
        k_start = j * tile.key
        rows_below = kv_length if masked and edges else None
        k = load_rows(refs.key, k_start, tile.key, sizes.H, rows_below=rows_below)
        s = logits(q, k, q_start, k_start, masked=masked)
        m_next = jnp.maximum(m, c * jnp.max(s, axis=1))
        p = exp2(c * s - m_next[:, None])
        rescale = exp2(m - m_next)
        l = rescale * l + jnp.sum(p, axis=1)
        v = load_rows(refs.value, k_start, tile.key, sizes.Hv, rows_below=rows_below)
        o = rescale[:, None] * o + dot(p.astype(v.dtype), v)
        return m_next, l, o

    m, l, o = loop_tiles(
        mask.kv_bounds(q_start, tile.query, q_length=q_length, kv_length=kv_length).in_tiles(
            tile.key
        ),
        visit,
        (
            jnp.full((tile.query,), LOWEST, jnp.float32),
            jnp.zeros((tile.query,), jnp.float32),
            jnp.zeros((tile.query, padded_head_dim(sizes.Hv)), jnp.float32),
        ),
        before=mask.left is not None,
        after=edges or mask.right is not None,
    )

    # A row that saw no key has l = 0: output 0 and LSE -inf. (Not l > 0: NaN must show.)
    unseen = l == 0
    l = jnp.where(unseen, 1.0, l)
    lse = jnp.where(unseen, -jnp.inf, math.log(2) * (m + jnp.log2(l)))
    below = sizes.T - q_start if edges else None
    store_rows(outputs["out"], o / l[:, None], sizes.Hv, rows_below=below)
    store_vector(outputs["lse"].at[:], lse, below=below)
