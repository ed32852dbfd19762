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

Where logits are more than products, dS is the cotangent of the logits and `tile_logits` takes it
back to that of the scaled products, which goes on in its place. Dropout multiplies P beside dO and
dP by the same factor.

The bias's gradient is dS, summed over the axes along which it was broadcast: the sum over keys is
taken in the first kernel and the sum over queries in the second, so that only a bias that is itself
(T, S) takes memory of that size. Where batch rows or heads share such a bias they add to its
gradient atomically, in an order that varies, unless the call asks for `deterministic`. The first
kernel also takes the gradients of the slopes, of the scale and of what `score_mod` captured.

A fully masked row has LSE -inf. It is passed on as +inf, which makes its P exactly 0.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_flash.mask import Bounds
from pallas_flash.triton import blocks
from pallas_flash.triton.forward import key_tiles
from pallas_flash.triton.mods import add_to_tables
from pallas_flash.triton.problem import Operands, Problem, with_visits
from pallas_flash.triton.tile import (
    TileList,
    dot,
    exponential,
    load_key_rows,
    load_lengths,
    load_query_rows,
    load_rows,
    load_vector,
    loop_tiles,
    store_rows,
    store_vector,
)
from pallas_flash.triton.tile_logits import Logits
from pallas_flash.triton.tile_sizes import Tile, padded_head_dim


class Saved(NamedTuple):
    """What the backward kernels read beside the call's operands."""

    dout: Any  # (B, T, N, Hv)
    lse2: Any  # (B, N, T), float32: log2(e) LSE, +inf for a fully masked row
    delta: Any  # (B, N, T), float32: D above, 0 for a fully masked row


# ---- dQ -----------------------------------------------------------------------------------------


class RowGradients(NamedTuple):
    """What the first kernel makes beside dQ, float32; None where not asked for."""

    ds_rows: Any = None  # (B, N, T): dS summed over keys
    ds_full: Any = None  # (B, N, T, S)
    ds_shared: Any = None  # dS summed over the batch or the heads: (B|1, N|1, T, S), as the bias
    slopes: Any = None  # (B, N, T): the slope's gradient by query
    scale: Any = None  # (B, N, T): the scale's gradient by query
    tables: Any = None  # {captured array's number: its gradient}


def query_gradient(
    problem: Problem,
    operands: Operands,
    saved: Saved,
    tile: Tile,
    wanted: frozenset[str] = frozenset(),
) -> tuple[jax.Array, RowGradients]:
    """dQ in the query's dtype, and the `RowGradients` whose names are wanted."""
    sizes, operands = problem.sizes, with_visits(problem, operands, tile)
    vector = blocks.query_vector(problem, tile)
    outputs = {
        "dq": (
            jax.ShapeDtypeStruct.like(operands.query),
            blocks.query_rows(problem, tile, sizes.H),
        )
    }
    for name in ("ds_rows", "slopes", "scale"):
        if name in wanted:
            outputs[name] = (_float32(sizes.B, sizes.N, sizes.T), vector)
    # Not every element of these is written, or one is added to many times: they start as zeros.
    zeros = {}
    for name, shape in (
        ("ds_full", (sizes.B, sizes.N, sizes.T, sizes.S)),
        ("ds_shared", () if operands.bias is None else operands.bias.shape),
    ):
        if name in wanted:
            zeros[name] = (_float32(*shape), blocks.logit_rows(problem, tile, shape))
    tables = ()
    if problem.score_mod is not None and "tables" in wanted:
        tables = problem.score_mod.tables_with_gradients
    for table in tables:
        shape = operands.score_tables[table].shape
        zeros[f"table{table}"] = (_float32(*shape), blocks.everything(shape))
    inputs = (operands, saved, {name: jnp.zeros_like(shape) for name, (shape, _) in zeros.items()})
    results = blocks.launch(
        functools.partial(_dq_kernel, problem=problem, tile=tile),
        *inputs,
        specs=(
            blocks.query_tile_specs(problem, operands, tile),
            Saved(blocks.query_rows(problem, tile, sizes.Hv), vector, vector),
            {name: spec for name, (_, spec) in zeros.items()},
        ),
        outputs=outputs | zeros,
        grid=blocks.query_grid(problem, tile),
        tile=tile,
        name="flash_dq",
        interpret=problem.interpret,
        zeros=tuple(zeros),
    )
    found = RowGradients(
        *(results.get(name) for name in RowGradients._fields[:-1]),
        tables={table: results[f"table{table}"] for table in tables},
    )
    return results["dq"], found


def _dq_kernel(
    refs: Operands, saved: Saved, zeros: Any, outputs: dict[str, Any], *, problem: Problem,
    tile: Tile,
) -> None:  # fmt: skip
    del zeros  # the same memory as the outputs that start from them
    sizes, c = problem.sizes, problem.exponent_scale
    own = blocks.query_tile_index(problem, tile, pl.program_id(0))
    q_start, head, batch = own * tile.query, pl.program_id(1), pl.program_id(2)
    q_length, kv_length = load_lengths(problem, refs, batch)
    logits = Logits(problem, tile, refs, batch, head, q_length, kv_length)
    edges = problem.edges(tile)
    exp2 = exponential(problem)
    tables = {int(name[5:]): ref for name, ref in outputs.items() if name.startswith("table")}
    beside = {"alibi_slopes": "slopes" in outputs, "score_mod": bool(tables)}
    by = frozenset(name for name, wanted in beside.items() if wanted)

    queries = load_query_rows(refs, q_start, 0, tile.query, q_length if edges else None)
    q = load_rows(refs.query, 0, tile.query, sizes.H, keep=queries.keep)
    do = load_rows(saved.dout, 0, tile.query, sizes.Hv, keep=queries.keep)
    lse2 = load_vector(saved.lse2.at[:], keep=queries.keep, other=jnp.inf)[:, None]
    delta = load_vector(saved.delta.at[:], keep=queries.keep, other=0.0)[:, None]

    def visit(j, carry, masked: bool):
        dq, sums = carry
        k_start = j * tile.key
        below = kv_length if masked and edges else None
        keys = load_key_rows(refs, k_start, k_start, tile.key, below)
        k = load_rows(refs.key, k_start, tile.key, sizes.H, keep=keys.keep)
        v = load_rows(refs.value, k_start, tile.key, sizes.Hv, keep=keys.keep)
        chain = logits.chain(q, k, queries, keys, masked=masked, by=by)
        p = exp2(c * chain.logits - lse2)
        dp = dot(do, v, transpose_b=True)
        if problem.dropout_rate:
            dp = jnp.where(logits.keep(queries, keys), dp / (1 - problem.dropout_rate), 0)
        back = chain.pull_back(p * (dp - delta))
        ds = back.scores
        for name in ("ds_full", "ds_shared"):
            if name in outputs:
                add = name == "ds_shared"
                _store_logits(outputs[name], ds, q_start, k_start, problem, masked, add)
        if problem.score_mod is not None and tables:
            add_to_tables(
                problem.score_mod, tables, chain.places, back.lookups, interpret=problem.interpret
            )
        sums = dict(sums)
        if "ds_rows" in sums:
            sums["ds_rows"] += jnp.sum(ds, axis=1)
        if "slopes" in sums:
            assert back.slopes is not None
            sums["slopes"] += back.slopes[:, 0]
        return dq + dot(ds.astype(k.dtype), k), sums

    dq, sums = loop_tiles(
        key_tiles(problem, refs, tile, own, q_length, kv_length),
        visit,
        (
            jnp.zeros((tile.query, padded_head_dim(sizes.H)), jnp.float32),
            {
                name: jnp.zeros((tile.query,), jnp.float32)
                for name in ("ds_rows", "slopes")
                if name in outputs
            },
        ),
        before=problem.mask.left is not None,
        after=edges or problem.mask.right is not None,
    )
    below = sizes.T - q_start if edges else None
    if "scale" in outputs:
        # d logits / d scale = q k^T, so the sum over ds * q k^T is that over q * (ds k).
        sums["scale"] = jnp.sum(q.astype(jnp.float32) * dq, axis=1)
    store_rows(outputs["dq"], logits.scale * dq, sizes.H, below=below)
    for name, values in sums.items():
        store_vector(outputs[name].at[:], values, below=below)


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _store_logits(
    ref: Any, ds: jax.Array, q_start: Any, k_start: Any, problem: Problem, masked: bool, add: bool
) -> None:
    """Store one tile of dS in a ref of this query tile's rows and all keys, or add to it."""
    keep = None
    if masked:
        rows = q_start + lax.broadcasted_iota(jnp.int32, ds.shape, 0) < problem.sizes.T
        keep = rows & (k_start + lax.broadcasted_iota(jnp.int32, ds.shape, 1) < problem.sizes.S)
    columns = pl.ds(k_start, ds.shape[1])
    view = ref.at[:, columns]
    if add and not problem.interpret:
        plgpu.atomic_add(ref, (slice(None), columns), ds, mask=keep)
        return
    if add:  # the interpreter runs one program at a time
        ds += plgpu.load(view, mask=keep, other=None if keep is None else jnp.float32(0))
    plgpu.store(view, ds, mask=keep)


# ---- dK and dV -----------------------------------------------------------------------------------


def key_value_gradients(
    problem: Problem, operands: Operands, saved: Saved, tile: Tile, *, with_ds: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """dK and dV in their dtypes and, `with_ds`, dS summed over queries, float32 (B, N, S).

    The sums over a group's query heads are in float32.
    """
    sizes, operands = problem.sizes, with_visits(problem, operands, tile, by_key=True)
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
    sizes, c = problem.sizes, problem.exponent_scale
    own, group, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    k_start = own * tile.key
    q_length, kv_length = load_lengths(problem, refs, batch)
    logits = Logits(
        problem, tile, refs, batch, group * sizes.G, q_length, kv_length, keys_first=True
    )
    edges = problem.edges(tile)
    exp2 = exponential(problem)

    keys = load_key_rows(refs, k_start, 0, tile.key, kv_length if edges else None)
    k = load_rows(refs.key, 0, tile.key, sizes.H, keep=keys.keep)
    v = load_rows(refs.value, 0, tile.key, sizes.Hv, keep=keys.keep)
    stored = sizes.S - k_start if edges else None

    def visit(head, i, carry, masked: bool):
        dk, dv, ds_keys = carry
        q_start = i * tile.query
        rows = pl.ds(q_start, tile.query)
        below = q_length if masked and edges else None
        queries = load_query_rows(refs, q_start, q_start, tile.query, below)
        keep = queries.keep
        q = load_rows(refs.query, q_start, tile.query, sizes.H, keep=keep, head=head)
        do = load_rows(saved.dout, q_start, tile.query, sizes.Hv, keep=keep, head=head)
        lse2 = load_vector(saved.lse2.at[head, rows], keep=keep, other=jnp.inf)
        delta = load_vector(saved.delta.at[head, rows], keep=keep, other=0.0)
        chain = logits.chain(k, q, queries, keys, masked=masked, head=head, by=frozenset())
        p = exp2(c * chain.logits - lse2[None, :])
        dp = dot(v, do, transpose_b=True)
        kept_p = p
        if problem.dropout_rate:
            kept = logits.keep(queries, keys, head)
            factor = 1 / (1 - problem.dropout_rate)
            kept_p, dp = jnp.where(kept, p * factor, 0), jnp.where(kept, dp * factor, 0)
        dv += dot(kept_p.astype(do.dtype), do)
        ds = chain.pull_back(p * (dp - delta[None, :])).scores
        dk += dot(ds.astype(q.dtype), q)
        if ds_keys is not None:
            ds_keys += jnp.sum(ds, axis=1)
        return dk, dv, ds_keys

    def visit_head(head, carry):
        ds_keys = jnp.zeros((tile.key,), jnp.float32) if "ds_keys" in outputs else None
        dk, dv, ds_keys = loop_tiles(
            query_tiles(problem, refs, tile, own, q_length, kv_length),
            functools.partial(visit, head),
            (*carry, ds_keys),
            before=problem.mask.right is not None,
            after=edges or problem.mask.left is not None,
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
    store_rows(outputs["dk"], logits.scale * dk, sizes.H, below=stored)
    store_rows(outputs["dv"], dv, sizes.Hv, below=stored)


def query_tiles(
    problem: Problem, refs: Operands, tile: Tile, own: Any, q_length: Any, kv_length: Any
) -> Bounds | TileList:
    """The query tiles that the program of key tile `own` visits."""
    if problem.has_lists:
        return TileList.of(refs.visits, own)
    bounds = problem.mask.q_bounds(own * tile.key, tile.key, q_length=q_length, kv_length=kv_length)
    return bounds.in_tiles(tile.query)
