"""The Hopper backward: dQ, dK and dV in one pass, five matrix products a tile.

A CTA owns one tile of keys of one key/value head and walks over the query tiles that see it, of
every query head in the group. Everything is transposed, keys in rows, so that P^T and dS^T leave
the softmax in the layout in which they are the left operands of the products that follow. In base
2 with c = scale * log2(e) (FlashAttention-2, arXiv 2307.08691, algorithm 2; FlashAttention-3's
split of the work between warpgroups, arXiv 2407.08608):

    S^T  = K Q_i^T                            dV   += P^T dO_i           P from registers
    P^T  = exp2(c S^T - log2(e) LSE_i)        dK   += dS^T Q_i           dS from shared memory
    dP^T = V dO_i^T                           dQ_i += dS K               float32, TMA reduce-add
    dS^T = P^T * (dP^T - D_i)                 D = rowsum(dO * O) - dLSE

Two ways to divide a step between the two consumer warpgroups (`BackwardTiles.by_head_dim`):

    by keys      each owns 64 of 128 keys. dQ needs the dS of both: it goes through shared memory,
                 one barrier a step, and each computes one half of dQ.
    by head dim  (256) each owns half of the columns of dK, dV and dQ for all 64 keys, and both
                 compute all of S^T and dP^T: seven products instead of five, but the accumulators
                 fit in registers and the warpgroups never meet.

    producer    K V   Q0 L0 dO0 D0   Q1 L1 dO1 D1   ...                     (ring of `stages` slots)
    consumer      S0 dP0 | exp2 | dV+=P0 dO0 | dS0 -> smem | dK+=dS0 Q0, dQ0 -> smem -> += in L2

An index that the compiler cannot see through (`_opaque_zero`) stands in front of every operand
that does not change in the loop: otherwise their wgmma descriptors, one 64-bit register for each
16 columns, are hoisted out of the loop and spill.

The LSE of a row that sees nothing arrives as +inf, which makes its P exactly 0; so do rows past T.
dQ is summed by atomic additions in an order that changes from run to run, and its last bits with
it, unless the call is `deterministic` (see `pallas_flash.hopper.turns`).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_flash.call import AttentionCall, Gradients
from pallas_flash.hopper import turns
from pallas_flash.hopper.backward_operands import small_operands
from pallas_flash.hopper.backward_problem import (
    CONSUMERS,
    Index,
    Inputs,
    Outputs,
    Problem,
    Refs,
    Scratch,
    Unit,
    scratch_types,
)
from pallas_flash.hopper.backward_softmax import (
    Keys,
    keys_of,
    over_columns,
    own_rows,
    probabilities,
)
from pallas_flash.hopper.backward_tiles import HALF, BackwardTiles
from pallas_flash.mask import Mask
from pallas_flash.row_statistics import row_statistics, sink_gradient
from pallas_flash.varying import vary_like

TMA_ROWS = 8
"""Rows of a swizzled tile: sequences reach TMA in multiples of this."""
MULTIPROCESSORS = 132
"""Of an H100 or H200 (SXM); only the order of the work depends on it."""


def backward(
    call: AttentionCall,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array | None,
    tiles: BackwardTiles,
) -> Gradients:
    """dQ, dK and dV of a call that `pallas_flash.hopper.attention.backward_unsupported` accepts.

    Args:
      call: bf16 or f16, interval masks, equal head dims of 64, 128 or 256.
      out, lse: what the forward returned, (B, T, N, Hv) and (B, N, T) float32.
      dout, dlse: their cotangents; dlse is None when the LSE was not used.
      tiles: how to cut it.

    Memory beyond inputs and outputs: one float32 dQ and two float32 numbers for each query row.
    """
    sizes, dtype = call.sizes, call.query.dtype
    tiles.check(sizes.H)
    assert call.static_scale is not None  # a traced scale is refused before
    problem = Problem(
        sizes=sizes,
        mask=jax.tree.map(lambda _: 0, call.mask),
        scale=call.static_scale,
        tiles=tiles,
        dtype=dtype,
        soft_cap=call.soft_cap,
        has_alibi=call.alibi_slopes is not None,
        deterministic=call.deterministic,
    )
    lse2, delta = row_statistics(out, lse, dout, dlse, call.mask.real_queries(sizes.B, sizes.T))
    rows = ((0, 0), (0, 0), (0, -sizes.T % tiles.queries))
    inputs = small_operands(call, problem)._replace(
        query=_whole_rows(call.query),
        key=_whole_rows(call.key),
        value=_whole_rows(call.value),
        dout=_whole_rows(dout.astype(dtype)),
        lse2=jnp.pad(lse2, rows, constant_values=jnp.inf),
        delta=jnp.pad(delta, rows),
    )
    dkey, dvalue, dquery = _launch(problem, inputs)
    return Gradients(
        query=(dquery[:, : sizes.T] * problem.scale).astype(dtype),
        key=dkey[:, : sizes.S],
        value=dvalue[:, : sizes.S],
        sinks=None if call.sinks is None else sink_gradient(call.sinks, lse2, delta),
    )


def _whole_rows(x: Array) -> Array:
    """The sequence padded to a multiple of 8, which TMA's swizzled tiles need; no copy if it is."""
    missing = -x.shape[1] % TMA_ROWS
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else x


def _launch(problem: Problem, inputs: Inputs) -> tuple[Array, Array, Array]:
    sizes = problem.sizes
    launch = plgpu.kernel(
        functools.partial(_kernel, problem, inputs.present),
        out_type=(
            jax.ShapeDtypeStruct(inputs.key.shape, problem.dtype),
            jax.ShapeDtypeStruct(inputs.value.shape, problem.dtype),
        ),
        scratch_types=scratch_types(problem),
        grid=(problem.key_tiles * sizes.B * sizes.K,),
        grid_names=("unit",),
        num_threads=problem.warpgroups,
        thread_name="warpgroup",
        kernel_name="pallas_flash_hopper_backward",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    given = [getattr(inputs, name) for name in inputs.present]
    # The kernel takes no refs that vary over a shard_map's mesh, so that only the results do.
    dquery = jax.new_ref(jnp.zeros(inputs.query.shape, jnp.float32))
    return vary_like((*launch(*given, dquery), dquery[...]), given)


def _opaque_zero() -> Index:
    """A 0 that the compiler must compute anew in each step of the loop."""
    return lax.optimization_barrier(jnp.int32(0))


# ---- the kernel ---------------------------------------------------------------------------------


def _kernel(problem: Problem, present: tuple[str, ...], *refs: Refs) -> None:
    given, (dquery, dkey, dvalue, *scratch) = refs[: len(present)], refs[len(present) :]
    inputs = Inputs(**dict(zip(present, given, strict=True)))
    outputs, scratch = Outputs(dkey, dvalue, dquery, turns.semaphores(problem)), Scratch(*scratch)
    unit = _unit(problem, inputs)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(24, action="decrease")
        _load(problem, inputs, scratch, unit)

    @pl.when(warpgroup < CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(problem.consumer_registers, action="increase")
        _consume(problem, inputs, scratch, outputs, unit, warpgroup)

    if problem.deterministic:

        @pl.when(warpgroup == CONSUMERS + 1)
        def _() -> None:
            plgpu.set_max_registers(24, action="decrease")
            turns.send_in_turn(problem, scratch, outputs, unit)


def _unit(problem: Problem, inputs: Inputs) -> Unit:
    """Decodes the grid: within a group of heads the key tiles with most work come first."""
    sizes, tiles = problem.sizes, problem.tiles
    index = lax.axis_index("unit")
    together = _heads_together(problem)
    within = lax.rem(index, problem.key_tiles * together)
    batch_head = index // (problem.key_tiles * together) * together + lax.rem(within, together)
    key_tile = within // together
    if problem.deterministic:  # a tile waits for later keys: those must have been launched before
        key_tile = problem.key_tiles - 1 - key_tile
    batch, kv_head = batch_head // sizes.K, lax.rem(batch_head, sizes.K)
    q_length: Index = sizes.T
    kv_length: Index = sizes.S
    if inputs.lengths is not None:
        q_length, kv_length = inputs.lengths[batch], inputs.lengths[sizes.B + batch]
    first_key = key_tile * tiles.keys
    if inputs.bounds is not None:
        start = 4 * (batch * problem.key_tiles + key_tile)
        lo, full_lo, full_hi, hi = (inputs.bounds[start + k] for k in range(4))
    else:
        lengths = {"q_length": q_length, "kv_length": kv_length}
        bounds = problem.mask.q_bounds(first_key, tiles.keys, **lengths)
        lo, full_lo, full_hi, hi = bounds.in_tiles(tiles.queries)
        if not problem.mask.has_lengths:
            # The ragged last query tile needs no mask: its missing rows have P = 0.
            full_hi = jnp.where(bounds.full_hi >= sizes.T, jnp.maximum(hi, full_lo), full_hi)
    return Unit(batch, kv_head, first_key, q_length, kv_length, lo, full_lo, full_hi, hi)


def _heads_together(problem: Problem) -> int:
    """Heads launched together: the longest unit of the last ones must not outlast the rest.

    The last group starts when all but its share of the work is done, so that its share on each
    multiprocessor must be at least one longest unit.
    """
    sizes, tiles = problem.sizes, problem.tiles
    heads, wanted = sizes.B * sizes.K, tiles.heads_together
    if wanted is None:
        mask = Mask(is_causal=problem.mask.is_causal, window=problem.mask.window)  # static part
        costs = []
        for first in range(0, sizes.S, tiles.keys):
            seen = mask.q_bounds(first, tiles.keys, q_length=sizes.T, kv_length=sizes.S)
            seen = seen.in_tiles(tiles.queries)
            costs.append(int(seen.hi - seen.lo) + 1)
        balanced = max(costs) == min(costs)
        wanted = 1 if balanced else pl.cdiv(MULTIPROCESSORS * max(costs), sum(costs))
    return min(n for n in range(1, heads + 1) if heads % n == 0 and (n >= wanted or n == heads))


def _load(problem: Problem, inputs: Inputs, scratch: Scratch, unit: Unit) -> None:
    """The producer: the key and value tile once, then every query and dO tile."""
    sizes, tiles, barriers = problem.sizes, problem.tiles, scratch.barriers
    keys = pl.ds(unit.first_key, tiles.keys)
    for source, target in ((inputs.key, scratch.key), (inputs.value, scratch.value)):
        plgpu.copy_gmem_to_smem(
            source.at[unit.batch, keys, unit.kv_head], target.at[0], barriers.kv_ready
        )

    def step(index: Index, _: None) -> None:
        member, tile = unit.place(index, sizes.G)
        head = unit.kv_head * sizes.G + member
        rows = pl.ds(tile * tiles.queries, tiles.queries)
        for stages, sources, targets, ready, free in (
            (
                tiles.stages,
                (inputs.query, inputs.lse2),
                (scratch.query, scratch.lse2),
                barriers.q_ready,
                barriers.q_free,
            ),
            (
                tiles.dout_stages,
                (inputs.dout, inputs.delta),
                (scratch.dout, scratch.delta),
                barriers.do_ready,
                barriers.do_free,
            ),
        ):
            slot = lax.rem(index, stages)

            @pl.when(index >= stages)
            def _(free: Any = free, slot: Index = slot) -> None:
                plgpu.barrier_wait(free.at[slot])

            matrix, vector = sources
            plgpu.copy_gmem_to_smem(
                matrix.at[unit.batch, rows, head], targets[0].at[slot], ready.at[slot]
            )
            plgpu.copy_gmem_to_smem(
                vector.at[unit.batch, head, rows], targets[1].at[slot], ready.at[slot]
            )
        if inputs.query_ids is not None:
            slot = lax.rem(index, tiles.stages)
            plgpu.copy_gmem_to_smem(
                inputs.query_ids.at[unit.batch, rows],
                scratch.query_ids.at[slot],
                barriers.q_ready.at[slot],
            )

    lax.fori_loop(0, (unit.hi - unit.lo) * sizes.G, step, None)


def _consume(
    problem: Problem,
    inputs: Inputs,
    scratch: Scratch,
    outputs: Outputs,
    unit: Unit,
    warpgroup: Index,
) -> None:
    """A consumer: its part of dK and dV in registers over all steps, dQ out in every step."""
    sizes, tiles = problem.sizes, problem.tiles
    plgpu.barrier_wait(scratch.barriers.kv_ready)
    for ref in (scratch.key, scratch.value):
        _silence(problem, ref.at[0], unit.first_key, unit.kv_length)
    keys = keys_of(problem, inputs, unit, warpgroup)

    def run(dk_acc: Refs, dv_acc: Refs) -> tuple[Any, Any]:
        def step(index: Index, _: None) -> None:
            _step(problem, inputs, scratch, outputs, keys, warpgroup, index, dk_acc, dv_acc)

        steps = (unit.hi - unit.lo) * sizes.G
        lax.fori_loop(0, steps, step, None)
        _send_last_piece(problem, scratch, outputs, unit, warpgroup, steps - 1)
        return dk_acc[...], dv_acc[...]

    # By head dim: 64 keys, half of the columns. By keys: 64 keys, all columns.
    columns = [dim // CONSUMERS if tiles.by_head_dim else dim for dim in (sizes.H, sizes.Hv)]
    dk, dv = pl.run_scoped(run, *(plgpu.ACC((HALF, width)) for width in columns))
    _store(problem, scratch, outputs, unit, warpgroup, dk * problem.scale, dv)


def _step(
    problem: Problem,
    inputs: Inputs,
    scratch: Scratch,
    outputs: Outputs,
    keys: Keys,
    warpgroup: Index,
    index: Index,
    dk_acc: Refs,
    dv_acc: Refs,
) -> None:
    """One query tile: five products, of which the last goes to memory."""
    tiles, barriers, unit = problem.tiles, scratch.barriers, keys.unit
    member, tile = unit.place(index, problem.sizes.G)
    slot, do_slot = _slot(index, tiles.stages), _slot(index, tiles.dout_stages)
    own = own_rows(tiles, warpgroup)
    ds_slot = warpgroup + _opaque_zero() if tiles.by_head_dim else lax.rem(index, 2)
    own_ds = scratch.ds.at[ds_slot, own]
    query, dout = scratch.query.at[slot], scratch.dout.at[do_slot]
    first_query = tile * tiles.queries

    def gradients_of_logits(s_acc: Refs, dp_acc: Refs) -> None:
        plgpu.barrier_wait(barriers.q_ready.at[slot])
        _silence(problem, query, first_query, unit.q_length)
        plgpu.wgmma(s_acc, scratch.key.at[_opaque_zero(), own], query.T)
        plgpu.barrier_wait(barriers.do_ready.at[do_slot])
        _silence(problem, dout, first_query, unit.q_length)
        plgpu.wgmma(dp_acc, scratch.value.at[_opaque_zero(), own], dout.T)
        # The step before left its dQ in shared memory: it goes out behind these products.
        _send_last_piece(problem, scratch, outputs, unit, warpgroup, index - 1)
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        slope = None
        if inputs.slopes is not None:
            slope = inputs.slopes[unit.kv_head * problem.sizes.G + member]
        p, weight = probabilities(problem, scratch, keys, tile, slot, s, slope)
        plgpu.wgmma(dv_acc, p, _columns(tiles, dout, warpgroup))
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
        delta = over_columns(scratch.delta.at[do_slot], tiles.queries)
        ds = weight * (dp - delta)
        own_ds[...] = ds.astype(problem.dtype)

    shape = (HALF, tiles.queries)
    pl.run_scoped(gradients_of_logits, plgpu.ACC(shape), plgpu.ACC(shape))
    plgpu.commit_smem()
    if not tiles.by_head_dim:
        plgpu.barrier_arrive(barriers.exchange)
    plgpu.wgmma(dk_acc, own_ds, _columns(tiles, query, warpgroup))
    plgpu.wgmma_wait(1)
    plgpu.barrier_arrive(barriers.do_free.at[do_slot])
    if not tiles.by_head_dim:
        plgpu.barrier_wait(barriers.exchange)
    _query_gradient(problem, scratch, outputs, unit, warpgroup, index, ds_slot)
    plgpu.barrier_arrive(barriers.q_free.at[slot])


def _slot(index: Index, stages: int) -> Index:
    return _opaque_zero() if stages == 1 else lax.rem(index, stages)


def _columns(tiles: BackwardTiles, ref: Refs, warpgroup: Index) -> Refs:
    """The columns of dO or Q that a warpgroup's part of dV or dK needs."""
    if not tiles.by_head_dim:
        return ref
    half = ref.shape[-1] // CONSUMERS
    return ref.at[:, pl.ds(warpgroup * half, half)]


def _query_gradient(
    problem: Problem,
    scratch: Scratch,
    outputs: Outputs,
    unit: Unit,
    warpgroup: Index,
    index: Index,
    ds_slot: Index,
) -> None:
    """This warpgroup's part of dQ_i, in pieces of 64 x 64; the last stays in shared memory."""
    tiles, width = problem.tiles, problem.tiles.width(problem.sizes.H)
    key = scratch.key.at[_opaque_zero()]
    products = tiles.dquery_products(problem.sizes.H, warpgroup)
    for number, (rows, column) in enumerate(products):

        def product(acc: Refs, rows: Any = rows, column: Any = column) -> Any:
            ds = scratch.ds.at[ds_slot, :, pl.ds(rows, HALF)]
            plgpu.wgmma(acc, ds.T, key.at[:, pl.ds(column, width)])
            return plgpu.wgmma_accumulator_load(acc, wait_n=0)

        dq = pl.run_scoped(product, plgpu.ACC((HALF, width)))

        def piece(start: int, dq: Any = dq) -> Any:
            return lax.slice(dq, (0, start), (HALF, start + HALF)) if width > HALF else dq

        for start in range(0, width, HALF):
            if problem.deterministic:
                first = (number == start == 0) & (index == 0)
                turns.leave_piece(scratch, warpgroup, piece(start), nothing_before=first)
                continue
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            scratch.dquery.at[warpgroup][...] = piece(start)
            if not (number == len(products) - 1 and start == width - HALF):
                place = (rows, column + start)
                _send(problem, scratch, outputs, unit, warpgroup, index, place)


def _send_last_piece(
    problem: Problem,
    scratch: Scratch,
    outputs: Outputs,
    unit: Unit,
    warpgroup: Index,
    index: Index,
) -> None:
    """Send what `_query_gradient` of step `index` left behind, unless there was no such step."""
    if problem.deterministic:
        return
    tiles, width = problem.tiles, problem.tiles.width(problem.sizes.H)
    products = tiles.dquery_products(problem.sizes.H, warpgroup)
    rows, column = products[-1]
    place = (rows, column + width - HALF)
    _send(problem, scratch, outputs, unit, warpgroup, index, place)


def _send(
    problem: Problem,
    scratch: Scratch,
    outputs: Outputs,
    unit: Unit,
    warpgroup: Index,
    index: Index,
    place: tuple[Any, Any],
) -> None:
    """Add the piece in shared memory to the dQ of step `index` (no step: nothing) at its place."""
    member, tile = unit.place(jnp.maximum(index, 0), problem.sizes.G)
    rows, column = place
    target = outputs.dquery.at[
        unit.batch,
        pl.ds(tile * problem.tiles.queries + rows, HALF),
        unit.kv_head * problem.sizes.G + member,
        pl.ds(column, HALF),
    ]
    plgpu.commit_smem()
    staging = scratch.dquery.at[warpgroup]
    plgpu.copy_smem_to_gmem(staging, target, predicate=index >= 0, reduction_op="add")


def _store(
    problem: Problem,
    scratch: Scratch,
    outputs: Outputs,
    unit: Unit,
    warpgroup: Index,
    dk: Any,
    dv: Any,
) -> None:
    """Send dK and dV out through the shared memory of K and V; TMA drops rows past the end."""
    tiles, barriers = problem.tiles, scratch.barriers
    own = own_rows(tiles, warpgroup)

    def meet() -> None:
        plgpu.barrier_arrive(barriers.exchange)
        plgpu.barrier_wait(barriers.exchange)

    meet()  # the other warpgroup has read K for its last dQ
    for ref, result in ((scratch.key, dk), (scratch.value, dv)):
        _columns(tiles, ref.at[0, own], warpgroup)[...] = result.astype(problem.dtype)
    plgpu.commit_smem()
    meet()
    keys = pl.ds(unit.first_key, tiles.keys)
    for first, ref, out in ((0, scratch.key, outputs.dkey), (1, scratch.value, outputs.dvalue)):

        @pl.when(warpgroup == first)
        def _(ref: Refs = ref, out: Refs = out) -> None:
            plgpu.copy_smem_to_gmem(ref.at[0], out.at[unit.batch, keys, unit.kv_head])

    plgpu.wait_smem_to_gmem(0)


def _silence(problem: Problem, ref: Refs, first: Index, length: Index) -> None:
    """Zeros in the rows of a tile behind the length, where memory may hold NaN.

    A probability of 0 does not silence them: 0 * NaN is NaN. Both warpgroups write the same zeros,
    so that neither needs to wait for the other.
    """
    if not problem.mask.has_lengths:
        return
    size, width = ref.shape

    @pl.when(first + size > length)
    def _() -> None:
        rows = plgpu.broadcasted_iota(jnp.int32, (HALF, HALF), 0, layout=plgpu.Layout.WGMMA)
        for row in range(0, size, HALF):
            for column in range(0, width, HALF):
                part = ref.at[pl.ds(row, HALF), pl.ds(column, HALF)]
                values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
                seen = rows + (first + row) < length
                part[...] = jnp.where(seen, values, jnp.zeros_like(values))
        plgpu.commit_smem()
