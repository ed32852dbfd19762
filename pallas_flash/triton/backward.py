"""Backward kernels: dQ over query tiles, dK and dV over key tiles; both recompute P from the LSE.

With D_i = rowsum(dO_i * O_i) - dLSE_i (the LSE's own cotangent enters there and nowhere else), in
base 2 with c = scale * log2(e) (FlashAttention-2, arXiv 2307.08691, algorithm 2):

    P  = 2^(c S - log2(e) LSE)         dV_j = sum_i P^T dO_i
    dP = dO V^T                        dQ_i = scale * sum_j dS K_j
    dS = P * (dP - D)                  dK_j = scale * sum_i dS^T Q_i

Two kernels, so that every sum stays in registers and the result is the same bit for bit every
time, at the price of computing S and dP twice (7 products instead of 5):

    dQ     one program per query tile and query head, loops over key tiles
    dK dV  one program per key tile and key/value head, loops over the G query heads that read it
           and over their query tiles, on transposed tiles (keys, queries), so that P^T and dS^T
           are already laid out as the left operands of the products that follow

A bias's gradient is dS, summed over the axes along which it was broadcast: the sum over keys is
taken in the first kernel and the sum over queries in the second, so that only a bias that is itself
(T, S) takes memory of that size.

A fully masked row has LSE -inf. It is passed on as +inf, which makes its P exactly 0.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_flash.triton import problem as blocks
from pallas_flash.triton.problem import LOG2_E, Operands, Problem
from pallas_flash.triton.tile import (
    Logits,
    dot,
    exponential,
    load_lengths,
    load_rows,
    load_vector,
    loop_tiles,
    store_rows,
    store_vector,
)
from pallas_flash.triton.tile_sizes import Tile, padded_head_dim

DsOutput = Literal["full", "rows"]


class Saved(NamedTuple):
    """What the backward kernels read beside the call's operands."""

    dout: Any  # (B, T, N, Hv)
    lse2: Any  # (B, N, T), float32: log2(e) LSE, +inf for a fully masked row
    delta: Any  # (B, N, T), float32: D above, 0 for a fully masked row


def prepare(out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None) -> Saved:
    """The row statistics, in XLA: one pass over the output and its cotangent."""
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    delta = delta.transpose(0, 2, 1)
    if dlse is not None:
        delta -= dlse
    unseen = lse == -jnp.inf
    # dO may be NaN behind a sequence's end, and 0 * NaN would pass it on.
    delta = jnp.where(unseen, 0.0, delta)
    return Saved(dout.astype(out.dtype), jnp.where(unseen, jnp.inf, lse * LOG2_E), delta)


# ---- dQ -----------------------------------------------------------------------------------------


def query_gradient(
    problem: Problem, operands: Operands, saved: Saved, tile: Tile, ds: DsOutput | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """dQ, and dS in full ("full", (B, N, T, S)) or summed over keys ("rows", (B, N, T)).

    Both are float32 but dQ, which is of the query's dtype.
    """
    sizes = problem.sizes
    vector = blocks.query_vector(problem, tile)
    inputs: tuple[Any, ...] = (operands, saved)
    specs: tuple[Any, ...] = (
        blocks.query_tile_specs(problem, operands, tile),
        Saved(blocks.query_rows(problem, tile, sizes.Hv), vector, vector),
    )
    outputs = {
        "dq": (
            jax.ShapeDtypeStruct.like(operands.query),
            blocks.query_rows(problem, tile, sizes.H),
        )
    }
    aliases = {}
    if ds == "rows":
        outputs["ds_rows"] = (_float32(sizes.B, sizes.N, sizes.T), vector)
    elif ds == "full":
        # Tiles that are skipped are not written, so dS starts as zeros.
        shape, spec = (
            _float32(sizes.B, sizes.N, sizes.T, sizes.S),
            blocks.logit_rows(problem, tile),
        )
        aliases = {len(jax.tree.leaves(inputs)): len(outputs)}
        inputs, specs = (*inputs, jnp.zeros_like(shape)), (*specs, spec)
        outputs["ds_full"] = (shape, spec)
    results = blocks.launch(
        functools.partial(_dq_kernel, problem=problem, tile=tile),
        *inputs,
        specs=specs,
        outputs=outputs,
        grid=blocks.query_grid(problem, tile),
        tile=tile,
        name="flash_dq",
        interpret=problem.interpret,
        aliases=aliases,
    )
    return results["dq"], results.get(f"ds_{ds}")


def _dq_kernel(refs: Operands, saved: Saved, *rest: Any, problem: Problem, tile: Tile) -> None:
    outputs = rest[-1]  # the zeros that a full dS starts from come first, if there are any
    sizes, mask, c = problem.sizes, problem.mask, problem.exponent_scale
    q_start = blocks.query_tile_index(problem, tile, pl.program_id(0)) * tile.query
    q_length, kv_length = load_lengths(problem, refs, pl.program_id(2))
    logits = Logits(problem, tile, refs, q_length, kv_length)
    edges = problem.edges(tile)
    exp2 = exponential(problem)

    below = q_length - q_start if edges else None
    q = load_rows(refs.query, 0, tile.query, sizes.H, rows_below=below)
    do = load_rows(saved.dout, 0, tile.query, sizes.Hv, rows_below=below)
    lse2 = load_vector(saved.lse2.at[:], 0, below=below, other=jnp.inf)[:, None]
    delta = load_vector(saved.delta.at[:], 0, below=below, other=0.0)[:, None]

    def visit(j, carry, masked: bool):
        dq, ds_rows = carry
        k_start = j * tile.key
        rows_below = kv_length if masked and edges else None
        k = load_rows(refs.key, k_start, tile.key, sizes.H, rows_below=rows_below)
        v = load_rows(refs.value, k_start, tile.key, sizes.Hv, rows_below=rows_below)
        p = exp2(c * logits(q, k, q_start, k_start, masked=masked) - lse2)
        ds = p * (dot(do, v, transpose_b=True) - delta)
        if "ds_full" in outputs:
            _store_logits(outputs["ds_full"], ds, q_start, k_start, problem, masked)
        if ds_rows is not None:
            ds_rows += jnp.sum(ds, axis=1)
        return dq + dot(ds.astype(k.dtype), k), ds_rows

    bounds = mask.kv_bounds(q_start, tile.query, q_length=q_length, kv_length=kv_length)
    dq, ds_rows = loop_tiles(
        bounds.in_tiles(tile.key),
        visit,
        (
            jnp.zeros((tile.query, padded_head_dim(sizes.H)), jnp.float32),
            jnp.zeros((tile.query,), jnp.float32) if "ds_rows" in outputs else None,
        ),
        before=mask.left is not None,
        after=edges or mask.right is not None,
    )
    below = sizes.T - q_start if edges else None
    store_rows(outputs["dq"], problem.scale * dq, sizes.H, rows_below=below)
    if ds_rows is not None:
        store_vector(outputs["ds_rows"].at[:], ds_rows, below=below)


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _store_logits(
    ref: Any, ds: jax.Array, q_start: Any, k_start: Any, problem: Problem, masked: bool
) -> None:
    """Store one tile of dS in a ref of this query tile's rows and all keys."""
    keep = None
    if masked:
        rows = q_start + lax.broadcasted_iota(jnp.int32, ds.shape, 0) < problem.sizes.T
        keep = rows & (k_start + lax.broadcasted_iota(jnp.int32, ds.shape, 1) < problem.sizes.S)
    plgpu.store(ref.at[:, pl.ds(k_start, ds.shape[1])], ds, mask=keep)


# ---- dK and dV -----------------------------------------------------------------------------------


def key_value_gradients(
    problem: Problem, operands: Operands, saved: Saved, tile: Tile, *, with_ds: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """dK and dV in their dtypes and, `with_ds`, dS summed over queries, float32 (B, N, S).

    The sums over a group's query heads are in float32.
    """
    sizes = problem.sizes
    vectors = blocks.group_vectors(problem, tile)
    outputs = {
        "dk": (jax.ShapeDtypeStruct.like(operands.key), blocks.key_rows(tile, sizes.H)),
        "dv": (jax.ShapeDtypeStruct.like(operands.value), blocks.key_rows(tile, sizes.Hv)),
    }
    if with_ds:
        outputs["ds_keys"] = (
            _float32(sizes.B, sizes.N, sizes.S),
            pl.BlockSpec((None, sizes.G, tile.key), lambda j, k, b: (b, k, j)),
        )
    results = blocks.launch(
        functools.partial(_dkv_kernel, problem=problem, tile=tile),
        operands,
        saved,
        specs=(
            blocks.key_tile_specs(problem, operands, tile),
            Saved(blocks.group_rows(problem, tile, sizes.Hv), vectors, vectors),
        ),
        outputs=outputs,
        grid=blocks.key_grid(problem, tile),
        tile=tile,
        name="flash_dkv",
        interpret=problem.interpret,
    )
    return results["dk"], results["dv"], results.get("ds_keys")


def _dkv_kernel(
    refs: Operands, saved: Saved, outputs: dict[str, Any], *, problem: Problem, tile: Tile
) -> None:
    sizes, mask, c = problem.sizes, problem.mask, problem.exponent_scale
    k_start = pl.program_id(0) * tile.key
    q_length, kv_length = load_lengths(problem, refs, pl.program_id(2))
    logits = Logits(problem, tile, refs, q_length, kv_length, keys_first=True)
    edges = problem.edges(tile)
    exp2 = exponential(problem)

    below = kv_length - k_start if edges else None
    k = load_rows(refs.key, 0, tile.key, sizes.H, rows_below=below)
    v = load_rows(refs.value, 0, tile.key, sizes.Hv, rows_below=below)
    bounds = mask.q_bounds(k_start, tile.key, q_length=q_length, kv_length=kv_length)
    bounds = bounds.in_tiles(tile.query)
    stored = sizes.S - k_start if edges else None

    def visit(head, i, carry, masked: bool):
        dk, dv, ds_keys = carry
        q_start = i * tile.query
        rows = pl.ds(q_start, tile.query)
        below = q_length if masked and edges else None
        q = load_rows(refs.query, q_start, tile.query, sizes.H, rows_below=below, head=head)
        do = load_rows(saved.dout, q_start, tile.query, sizes.Hv, rows_below=below, head=head)
        lse2 = load_vector(saved.lse2.at[head, rows], q_start, below=below, other=jnp.inf)
        delta = load_vector(saved.delta.at[head, rows], q_start, below=below, other=0.0)
        s = logits(k, q, q_start, k_start, masked=masked, head=head)
        p = exp2(c * s - lse2[None, :])
        dv += dot(p.astype(do.dtype), do)
        ds = p * (dot(v, do, transpose_b=True) - delta[None, :])
        dk += dot(ds.astype(q.dtype), q)
        if ds_keys is not None:
            ds_keys += jnp.sum(ds, axis=1)
        return dk, dv, ds_keys

    def visit_head(head, carry):
        ds_keys = jnp.zeros((tile.key,), jnp.float32) if "ds_keys" in outputs else None
        dk, dv, ds_keys = loop_tiles(
            bounds,
            functools.partial(visit, head),
            (*carry, ds_keys),
            before=mask.right is not None,
            after=edges or mask.left is not None,
        )
        if ds_keys is not None:
            store_vector(outputs["ds_keys"].at[head, :], ds_keys, below=stored)
        return dk, dv

    carry = tuple(
        jnp.zeros((tile.key, padded_head_dim(columns)), jnp.float32)
        for columns in (sizes.H, sizes.Hv)
    )
    if sizes.G == 1:
        dk, dv = visit_head(jnp.int32(0), carry)
    else:
        dk, dv = lax.fori_loop(jnp.int32(0), jnp.int32(sizes.G), visit_head, carry)
    store_rows(outputs["dk"], problem.scale * dk, sizes.H, rows_below=stored)
    store_rows(outputs["dv"], dv, sizes.Hv, rows_below=stored)
