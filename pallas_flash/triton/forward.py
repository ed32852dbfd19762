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
waits for the end. Logits that are more than products (bias, ALiBi, `score_mod`, soft cap) come from
`tile_logits`, in natural units; a sink starts m and l as a key without a value would; dropout
multiplies P beside V only. Along the keys one program does

      lo           full_lo               full_hi          hi
      |  masked    |   no masking code   |    masked      |         and nothing outside [lo, hi)

or, for segments, positions and block masks, the tiles of a list, all masked.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash.mask import Bounds
from pallas_flash.row_statistics import LOG2_E
from pallas_flash.triton import blocks
from pallas_flash.triton.problem import Operands, Problem, with_visits
from pallas_flash.triton.tile import (
    TileList,
    dot,
    exponential,
    load_key_rows,
    load_lengths,
    load_query_rows,
    load_rows,
    load_scalar,
    loop_tiles,
    store_rows,
    store_vector,
)
from pallas_flash.triton.tile_logits import Logits
from pallas_flash.triton.tile_sizes import Tile, padded_head_dim

# The maximum starts here and not at -inf: a row that has seen nothing yet then needs no guard
# against inf - inf, because its P is 2^(-inf - LOWEST) = 0 all the same.
LOWEST = -1e38


def forward(problem: Problem, operands: Operands, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Output (B, T, N, Hv) in the query's dtype and LSE (B, N, T), float32, natural log."""
    sizes, operands = problem.sizes, with_visits(problem, operands, tile)
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
    sizes, c = problem.sizes, problem.exponent_scale
    own = blocks.query_tile_index(problem, tile, pl.program_id(0))
    q_start, head, batch = own * tile.query, pl.program_id(1), pl.program_id(2)
    q_length, kv_length = load_lengths(problem, refs, batch)
    # The bias's and the mask's blocks hold this head alone, as number 0.
    logits = Logits(problem, tile, refs, batch, head, q_length, kv_length)
    edges = problem.edges(tile)
    exp2 = exponential(problem)

    queries = load_query_rows(refs, q_start, 0, tile.query, q_length if edges else None)
    q = load_rows(refs.query, 0, tile.query, sizes.H, keep=queries.keep)

    def visit(j, carry, masked: bool):
        m, l, o = carry
        k_start = j * tile.key
        below = kv_length if masked and edges else None
        keys = load_key_rows(refs, k_start, k_start, tile.key, below)
        k = load_rows(refs.key, k_start, tile.key, sizes.H, keep=keys.keep)
        s = logits(q, k, queries, keys, masked=masked)
        m_next = jnp.maximum(m, c * jnp.max(s, axis=1))
        p = exp2(c * s - m_next[:, None])
        rescale = exp2(m - m_next)
        l = rescale * l + jnp.sum(p, axis=1)
        if problem.dropout_rate:
            p = jnp.where(logits.keep(queries, keys), p, 0)
        v = load_rows(refs.value, k_start, tile.key, sizes.Hv, keep=keys.keep)
        o = rescale[:, None] * o + dot(p.astype(v.dtype), v)
        return m_next, l, o

    m, l, o = loop_tiles(
        key_tiles(problem, refs, tile, own, q_length, kv_length),
        visit,
        _start(problem, refs, tile, head),
        before=problem.mask.left is not None,
        after=edges or problem.mask.right is not None,
    )

    # A row that saw no key and no sink has l = 0: output 0, LSE -inf. (Not l > 0: NaN must show.)
    unseen = l == 0
    l = jnp.where(unseen, 1.0, l)
    lse = jnp.where(unseen, -jnp.inf, math.log(2) * (m + jnp.log2(l)))
    below = sizes.T - q_start if edges else None
    o = o / ((1 - problem.dropout_rate) * l[:, None])
    store_rows(outputs["out"], o, sizes.Hv, below=below)
    store_vector(outputs["lse"].at[:], lse, below=below)


def key_tiles(
    problem: Problem, refs: Operands, tile: Tile, own: Any, q_length: Any, kv_length: Any
) -> Bounds | TileList:
    """The key tiles that the program of query tile `own` visits."""
    if problem.has_lists:
        return TileList.of(refs.visits, own)
    bounds = problem.mask.kv_bounds(
        own * tile.query, tile.query, q_length=q_length, kv_length=kv_length
    )
    return bounds.in_tiles(tile.key)


def _start(
    problem: Problem, refs: Operands, tile: Tile, head: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Maximum, denominator and output before the first tile."""
    m = jnp.full((tile.query,), LOWEST, jnp.float32)
    l = jnp.zeros((tile.query,), jnp.float32)
    if refs.sinks is not None:
        sink = LOG2_E * load_scalar(refs.sinks, head)
        start = jnp.maximum(sink, LOWEST)
        m, l = jnp.full_like(m, start), jnp.full_like(l, jnp.exp2(sink - start))
    return m, l, jnp.zeros((tile.query, padded_head_dim(problem.sizes.Hv)), jnp.float32)
