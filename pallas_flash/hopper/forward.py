"""The Hopper forward: tiled online softmax, one warpgroup loading, two or three multiplying.

For a tile of query rows i and every key tile j that the mask lets it see, last tile first:

    S  = Q K_j^T                             wgmma, float32
    m' = max(m, c rowmax(S))                 c = scale * log2(e): the base-2 softmax
    P  = exp2(c S - m'),  a = exp2(m - m')
    l  = a l + rowsum(P),  O = a O + P V_j   wgmma, P stays in registers
    out = O / l,  lse = m ln 2 + ln l

A CTA is persistent: it takes query tiles from its own list (`pallas_flash.hopper.work`) until the
list ends. Warpgroup `consumers` only issues TMA loads, the others own 64 query rows each:

    producer    Q          K0 V0   K1 V1   K2 V2 | Q' K0' V0' ...        (ring of `stages` slots)
    consumer     . S0 soft(S0) [S1 | O+=P0 V0] soft(S1) [S2 | O+=P1 V1] soft(S2) ... O/l  store
                              both in flight: wait S1, work on it while O+=P0 V0 runs

`ready` barriers say that a slot has landed, `free` barriers that every consumer is done with it.
A bias has a ring of its own, fetched between K_j and V_j and given back when its logits are made.
In a cluster of two, the CTAs take neighbouring query tiles, each loads half of every key and value
tile and multicasts it; `free` then counts the consumers of both.

Each warpgroup visits its own interval of key tiles, so that under the common masks (none, causal)
only its first tile is partial: that one is done before the loop, which then has no masking code.
For other masks one branch in the loop, which the whole warpgroup takes together, tells full and
partial tiles apart, and O += P V starts behind it: ptxas waits for every wgmma where two branches
meet. Two loops, a masked and an unmasked one, would carry P across: ptxas then moves registers that
wgmma reads and serialises it (its warning C7513).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_flash.call import AttentionCall
from pallas_flash.hopper import softmax, work
from pallas_flash.hopper.bias import bias_form
from pallas_flash.hopper.operands import Operands, operands, static_fields
from pallas_flash.hopper.problem import Barriers, Index, Problem, Refs, Scratch, Tile
from pallas_flash.hopper.softmax import Rows, Softmax
from pallas_flash.hopper.tile_sizes import ROWS, ForwardTiles
from pallas_flash.mask import Mask

TMA_ROWS = 8
"""Rows of a swizzled tile: sequences reach TMA in multiples of this."""


def forward(
    call: AttentionCall, tiles: ForwardTiles, multiprocessors: int = 132
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Output and LSE of a call that `pallas_flash.hopper.attention.unsupported` accepts.

    Args:
      call: bf16 or f16, interval masks and segment ids, soft cap, sinks, ALiBi, bias; head dims
        that are multiples of 64.
      tiles: how to cut it.
      multiprocessors: of the device; one persistent CTA on each.
    """
    sizes = call.sizes
    tiles.check(sizes.H, sizes.Hv, bias_form(call))
    assert call.static_scale is not None  # `unsupported` refuses a traced scale
    query, key, value = (_whole_rows(x) for x in (call.query, call.key, call.value))
    problem = Problem(
        sizes=sizes,
        scale=call.static_scale,
        tiles=tiles,
        multiprocessors=multiprocessors,
        dtype=call.query.dtype,
        **static_fields(call),
    )
    out, lse = _launch(problem, operands(call, problem), query, key, value)
    return out[:, : sizes.T], lse[:, :, : sizes.T]


def _whole_rows(x: Array) -> Array:
    """The sequence padded to a multiple of 8, which TMA's swizzled tiles need; no copy if it is."""
    missing = -x.shape[1] % TMA_ROWS
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else x


def _launch(
    problem: Problem, small: Operands, query: Array, key: Array, value: Array
) -> tuple[Array, Array]:
    sizes, tiles = problem.sizes, problem.tiles
    heads = sizes.B * sizes.N
    costs = _unit_costs(problem)
    workers = work.worker_count(problem.multiprocessors, tiles.cluster, problem.units, heads)
    group = work.heads_in_l2(sizes.S, sizes.H + sizes.Hv, query.dtype.itemsize, sizes.G)
    lists = work.work_lists(heads, costs, workers, group)
    given = {name: x for name, x in small._asdict().items() if x is not None}
    launch = plgpu.kernel(
        functools.partial(_kernel, problem, lists.shape[1], tuple(given)),
        out_type=(
            jax.ShapeDtypeStruct((*query.shape[:3], sizes.Hv), query.dtype),
            # Room for whole tiles, sliced off outside: only TMA drops rows past the end.
            jax.ShapeDtypeStruct((sizes.B, sizes.N, problem.padded_rows), jnp.float32),
        ),
        scratch_types=_scratch(problem),
        grid=(workers,),
        grid_names=("worker",),
        num_threads=tiles.consumers + 1,
        thread_name="warpgroup",
        kernel_name="pallas_flash_hopper_forward",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        cluster=(tiles.cluster,),
        cluster_names=("cta",),
    )
    return launch(jnp.asarray(lists.reshape(-1)), *given.values(), query, key, value)


def _unit_costs(problem: Problem) -> tuple[int, ...]:
    """Work of each unit, as far as it is known while tracing."""
    mask = problem.mask
    if mask.has_segments:
        return (1,) * problem.units
    if mask.has_lengths:
        mask = Mask(is_causal=mask.is_causal)
    rows = problem.tiles.queries * problem.tiles.cluster
    return work.unit_costs(mask, problem.sizes.T, problem.sizes.S, rows, problem.tiles.keys)


def _scratch(problem: Problem) -> Scratch:
    sizes, tiles = problem.sizes, problem.tiles
    stages, consumers = tiles.stages, tiles.consumers

    def tile(*shape: int, dtype: Any = problem.dtype) -> Any:
        itemsize = jnp.dtype(dtype).itemsize
        swizzle = plgpu.find_swizzle(shape[-1] * itemsize * 8)
        transforms = (  # pyright does not see that these classes are concrete
            plgpu.TilingTransform((8, swizzle // itemsize)),  # pyright: ignore[reportAbstractUsage]
            plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
        )
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    def free() -> Any:
        return plgpu.ClusterBarrier(
            collective_axes=("cta",), num_barriers=stages, num_arrivals=consumers
        )

    bias = bias_ready = bias_free = None
    if problem.bias is not None and problem.bias_in_ring:
        bias = plgpu.SMEM((tiles.bias_stages, tiles.keys), jnp.float32)
        if problem.bias.kind == "tile":
            bias = tile(tiles.bias_stages, tiles.queries, tiles.keys, dtype=problem.bias.dtype)
        bias_ready = plgpu.Barrier(num_barriers=tiles.bias_stages)
        bias_free = plgpu.Barrier(num_barriers=tiles.bias_stages, num_arrivals=consumers)
    done = None
    if tiles.cluster == 2:
        done = plgpu.ClusterBarrier(collective_axes=("cta",), num_arrivals=consumers)
    return Scratch(
        query=tile(consumers, ROWS, sizes.H),
        key=tile(stages, tiles.keys, sizes.H),
        value=tile(stages, tiles.keys, sizes.Hv),
        out=None if tiles.output_in_query else tile(consumers, ROWS, sizes.Hv),
        bias=bias,
        barriers=Barriers(
            q_ready=plgpu.Barrier(num_barriers=consumers),
            q_free=plgpu.Barrier(num_barriers=consumers),
            k_ready=plgpu.Barrier(num_barriers=stages),
            k_free=free(),
            v_ready=plgpu.Barrier(num_barriers=stages),
            v_free=free(),
            bias_ready=bias_ready,
            bias_free=bias_free,
            done=done,
        ),
    )


# ---- the kernel ---------------------------------------------------------------------------------


class Inputs(NamedTuple):
    lists: Any  # int32, flat (workers, rounds)
    small: Operands
    query: Any
    key: Any
    value: Any


def _kernel(problem: Problem, rounds: int, names: tuple[str, ...], *refs: Refs) -> None:
    lists, *others = refs
    small = Operands(**dict(zip(names, others, strict=False)))
    query, key, value, out, lse, *scratch = others[len(names) :]
    inputs = Inputs(lists, small, query, key, value)
    scratch = Scratch(*scratch)
    warpgroup = lax.axis_index("warpgroup")
    consumers = problem.tiles.consumers

    @pl.when(warpgroup == consumers)
    def _() -> None:
        plgpu.set_max_registers(problem.tiles.producer_registers, action="decrease")
        _for_each_tile(problem, rounds, inputs, functools.partial(_load, problem, inputs, scratch))

    @pl.when(warpgroup < consumers)
    def _() -> None:
        plgpu.set_max_registers(problem.tiles.consumer_registers, action="increase")
        consume = functools.partial(_consume, problem, small, scratch, out, lse, warpgroup)
        _for_each_tile(problem, rounds, inputs, consume)
        plgpu.wait_smem_to_gmem(0)
        if problem.tiles.cluster == 2:
            plgpu.barrier_arrive(scratch.barriers.done)
            plgpu.barrier_wait(scratch.barriers.done)


def _for_each_tile(
    problem: Problem, rounds: int, inputs: Inputs, body: Callable[[Index, Tile, Index], Index]
) -> None:
    """Runs body(round, tile, step) -> step over this worker's list; `step` counts key tiles."""
    start = lax.axis_index("worker") * rounds

    def cond(carry: tuple[Index, ...]) -> Index:
        return carry[1] >= 0

    def loop(carry: tuple[Index, ...]) -> tuple[Index, ...]:
        position, entry, step = carry
        following = inputs.lists[start + position + 1]  # fetched while this tile runs
        step = body(position, _tile(problem, inputs, entry), step)
        return position + 1, following, step

    lax.while_loop(cond, loop, (jnp.int32(0), inputs.lists[start], jnp.int32(0)))


def _tile(problem: Problem, inputs: Inputs, entry: Index) -> Tile:
    sizes, tiles = problem.sizes, problem.tiles
    batch_head, unit = entry // problem.units, lax.rem(entry, problem.units)
    if problem.batch_first:
        head, batch = batch_head // sizes.B, lax.rem(batch_head, sizes.B)
    else:
        batch, head = batch_head // sizes.N, lax.rem(batch_head, sizes.N)
    q_length: Index = sizes.T
    kv_length: Index = sizes.S
    small = inputs.small
    if small.lengths is not None:
        q_length, kv_length = small.lengths[batch], small.lengths[sizes.B + batch]
    rows = tiles.queries * tiles.cluster
    first = unit * rows
    if small.units is not None:
        place = 2 * (batch * problem.units + unit)
        lo, hi = small.units[place], small.units[place + 1]
    else:
        found = problem.mask.kv_bounds(first, rows, q_length=q_length, kv_length=kv_length)
        found = found.in_tiles(tiles.keys)
        lo = jnp.minimum(found.lo, jnp.int32(pl.cdiv(sizes.S, tiles.keys) - 1))
        hi = jnp.maximum(found.hi, lo + 1)
    row = first if tiles.cluster == 1 else first + lax.axis_index("cta") * tiles.queries
    return Tile(batch, head, row, q_length, kv_length, lo, hi)


def _load(
    problem: Problem, inputs: Inputs, scratch: Scratch, position: Index, tile: Tile, step: Index
) -> Index:
    """The producer's part of one query tile: its queries, then every key, bias and value tile."""
    tiles, barriers = problem.tiles, scratch.barriers
    shared = ("cta",) if tiles.cluster == 2 else None
    for i in range(tiles.consumers):

        @pl.when(position > 0)
        def _(i: int = i) -> None:
            plgpu.barrier_wait(barriers.q_free.at[i])

        rows = pl.ds(tile.row + i * ROWS, ROWS)
        source = inputs.query.at[tile.batch, rows, tile.head]
        plgpu.copy_gmem_to_smem(source, scratch.query.at[i], barriers.q_ready.at[i])

    def load(j: Index, step: Index) -> Index:
        slot = _slot(problem, step)
        index = tile.hi - 1 - j
        keys = pl.ds(index * tiles.keys, tiles.keys)

        def load_shared(source: Refs, target: Refs, ready: Any, free: Any) -> None:
            @pl.when(step >= tiles.stages)
            def _() -> None:
                plgpu.barrier_wait(free.at[slot])

            plgpu.copy_gmem_to_smem(
                source.at[tile.batch, keys, tile.head // problem.sizes.G],
                target.at[slot],
                ready.at[slot],
                collective_axes=shared,
            )

        load_shared(inputs.key, scratch.key, barriers.k_ready, barriers.k_free)
        if problem.bias_in_ring:
            _load_bias(problem, inputs.small, scratch, tile, index, step)
        load_shared(inputs.value, scratch.value, barriers.v_ready, barriers.v_free)
        return step + 1

    return lax.fori_loop(0, tile.count, load, step)


def _load_bias(
    problem: Problem, small: Operands, scratch: Scratch, tile: Tile, index: Index, step: Index
) -> None:
    """The bias of one key tile, for all query rows of this CTA."""
    form, tiles, barriers = problem.bias, problem.tiles, scratch.barriers
    assert form is not None
    slot = _slot(problem, step, tiles.bias_stages)

    @pl.when(step >= tiles.bias_stages)
    def _() -> None:
        plgpu.barrier_wait(barriers.bias_free.at[slot])

    plane = form.plane(tile.batch, tile.head, problem.sizes.N)
    if form.kind == "tile":
        rows, keys = pl.ds(tile.row, tiles.queries), pl.ds(index * tiles.keys, tiles.keys)
        source = small.bias.at[plane, rows, keys]
    else:
        padded = pl.cdiv(problem.sizes.S, tiles.keys) * tiles.keys
        source = small.bias.at[pl.ds(plane * padded + index * tiles.keys, tiles.keys)]
    plgpu.copy_gmem_to_smem(source, scratch.bias.at[slot], barriers.bias_ready.at[slot])


def _consume(
    problem: Problem,
    small: Operands,
    scratch: Scratch,
    out: Refs,
    lse: Refs,
    warpgroup: Index,
    _position: Index,
    tile: Tile,
    step: Index,
) -> Index:
    """A consumer's part of one query tile: 64 rows of output and LSE."""
    tiles, barriers = problem.tiles, scratch.barriers
    rows = softmax.rows_of(problem, small, tile, warpgroup)
    bounds = rows.bounds
    step = _drop(problem, scratch, tile.hi - bounds.hi, step)
    plgpu.barrier_wait(barriers.q_ready.at[warpgroup])
    query = scratch.query.at[warpgroup]
    if tiles.query_in_registers:
        query = plgpu.load(query, layout=plgpu.Layout.WGMMA)
        if not tiles.output_in_query:
            plgpu.barrier_arrive(barriers.q_free.at[warpgroup])
    consumer = Consumer(problem, small, scratch, warpgroup, rows, query)

    def run(acc: Refs) -> tuple[Any, ...]:
        last_slot, state = _key_loop(consumer, acc, step)
        _wait_for_values(consumer, bounds.lo, last_slot)
        plgpu.wgmma(acc, state.p, scratch.value.at[last_slot])
        result = softmax.finish(problem, small, rows, acc, state.m, state.l)
        plgpu.barrier_arrive(barriers.v_free.at[last_slot])
        return result

    result, row_lse = pl.run_scoped(run, plgpu.ACC((ROWS, problem.sizes.Hv)))
    _store(consumer, out, lse, result, row_lse)
    step = step + bounds.hi - bounds.lo
    return _drop(problem, scratch, bounds.lo - tile.lo, step)


def _drop(problem: Problem, scratch: Scratch, count: Index, step: Index) -> Index:
    """Give back key tiles that only other warpgroups need."""
    if problem.same_keys_in_cluster:
        return step
    barriers = scratch.barriers

    def drop(_: Index, step: Index) -> Index:
        slot = _slot(problem, step)
        plgpu.barrier_wait(barriers.k_ready.at[slot])
        plgpu.barrier_arrive(barriers.k_free.at[slot])
        plgpu.barrier_wait(barriers.v_ready.at[slot])
        plgpu.barrier_arrive(barriers.v_free.at[slot])
        if problem.bias_in_ring:
            slot = _slot(problem, step, problem.tiles.bias_stages)
            plgpu.barrier_wait(barriers.bias_ready.at[slot])
            plgpu.barrier_arrive(barriers.bias_free.at[slot])
        return step + 1

    return lax.fori_loop(0, count, drop, step)


class Consumer(NamedTuple):
    """What a consumer works with for one query tile."""

    problem: Problem
    small: Operands
    scratch: Scratch
    warpgroup: Index
    rows: Rows
    query: Any


def _key_loop(consumer: Consumer, acc: Refs, step: Index) -> tuple[Index, Softmax]:
    """All key tiles of one query tile, last first; the last product with V is left to the caller.

    Returns the slot of the value tile that is still to be multiplied, and the softmax state.
    """
    problem, small, scratch, _, rows, query = consumer
    barriers, bounds = scratch.barriers, rows.bounds
    accumulator = plgpu.ACC((ROWS, problem.tiles.keys))
    logits = functools.partial(_logits, consumer)
    mask = functools.partial(softmax.mask_logits, problem, small, rows)

    def first(s_acc: Refs) -> Any:
        plgpu.wgmma(s_acc, query, scratch.key.at[slot].T)
        return s_acc[...]

    slot = _slot(problem, step)
    plgpu.barrier_wait(barriers.k_ready.at[slot])
    _wait_for_bias(consumer, step)
    s = logits(bounds.hi - 1, step, pl.run_scoped(first, accumulator))
    plgpu.barrier_arrive(barriers.k_free.at[slot])
    if not problem.always_full:
        s = mask(bounds.hi - 1, s)
    state, _ = softmax.probabilities(problem, s, None, may_be_empty=problem.first_may_be_empty)
    may_be_empty = problem.later_may_be_empty

    def await_next(j: Index, step: Index) -> None:
        """Wait for the key tile behind the j-th, if there is one.

        In this place it keeps ptxas from moving the wait for O += P V above the exponentials.
        """
        if problem.tiles.early_key_wait:

            @pl.when(j + 1 < bounds.hi - bounds.lo)
            def _() -> None:
                plgpu.barrier_wait(barriers.k_ready.at[_slot(problem, step + 1)])

    await_next(jnp.int32(0), step)

    def next_tile(j: Index, carry: tuple[Index, Softmax]) -> tuple[Index, Softmax]:
        step, old = carry
        index = bounds.hi - 1 - j
        slot, previous = _slot(problem, step), _slot(problem, step - 1)
        if not problem.tiles.early_key_wait:
            plgpu.barrier_wait(barriers.k_ready.at[slot])
        _wait_for_bias(consumer, step)

        def products(s_acc: Refs) -> Softmax:
            plgpu.wgmma(s_acc, query, scratch.key.at[slot].T)
            if problem.masks_first_only:
                s = _add_values(consumer, acc, s_acc, old.p, index + 1, previous)
                plgpu.barrier_arrive(barriers.k_free.at[slot])
                s = logits(index, step, s)
            else:
                # Branches may only meet where no wgmma is in flight: ptxas waits for all there.
                s = logits(index, step, s_acc[...])
                plgpu.barrier_arrive(barriers.k_free.at[slot])
                masked = (index >= bounds.full_hi) | (index < bounds.full_lo)
                s = lax.cond(masked, functools.partial(mask, index), lambda s: s, s)
                _add_values(consumer, acc, None, old.p, index + 1, previous)
            new, moved = softmax.probabilities(problem, s, old.m, may_be_empty=may_be_empty)
            await_next(j, step)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(barriers.v_free.at[previous])
            l = softmax.rescale(acc, old.l, old.m, new.m, moved, may_be_empty=may_be_empty)
            return new._replace(l=l + new.l)

        return step + 1, pl.run_scoped(products, accumulator)

    step, state = lax.fori_loop(1, bounds.hi - bounds.lo, next_tile, (step + 1, state))
    return _slot(problem, step - 1), state


def _add_values(
    consumer: Consumer, acc: Refs, s_acc: Refs | None, p: Any, index: Index, slot: Index
) -> Any:
    """Start O += P V, and wait for the logits in front of it, which it returns."""
    _wait_for_values(consumer, index, slot)
    plgpu.wgmma(acc, p, consumer.scratch.value.at[slot])
    return None if s_acc is None else plgpu.wgmma_accumulator_load(s_acc, wait_n=1)


def _wait_for_bias(consumer: Consumer, step: Index) -> None:
    """Wait for the bias of a key tile; in front of its wgmma, so that none spans the wait."""
    problem, barriers = consumer.problem, consumer.scratch.barriers
    if problem.bias_in_ring:
        plgpu.barrier_wait(barriers.bias_ready.at[_slot(problem, step, problem.tiles.bias_stages)])


def _logits(consumer: Consumer, index: Index, step: Index, products: Any) -> Any:
    """Logits of one key tile; its bias, which has been waited for, is given back."""
    problem, _, scratch, warpgroup, rows, _ = consumer
    if problem.bias is None or not problem.bias_in_ring:
        return softmax.logits(problem, rows, index, products)
    slot = _slot(problem, step, problem.tiles.bias_stages)
    bias = scratch.bias.at[slot]
    if problem.bias.kind == "tile":
        bias = scratch.bias.at[slot, pl.ds(warpgroup * ROWS, ROWS)]
    s = softmax.logits(problem, rows, index, products, bias)
    plgpu.barrier_arrive(scratch.barriers.bias_free.at[slot])
    return s


def _slot(problem: Problem, step: Index, stages: int | None = None) -> Index:
    """Slot of a step that is not negative in a ring, that of the keys by default."""
    stages = stages or problem.tiles.stages
    # Cheaper than a signed remainder, which corrects for negative numbers.
    return step & (stages - 1) if stages & (stages - 1) == 0 else lax.rem(step, stages)


def _wait_for_values(consumer: Consumer, index: Index, slot: Index) -> None:
    """Wait for a value tile; rows behind the length become 0, for memory there may hold NaN.

    A probability of 0 does not silence them: 0 * NaN is NaN. Every consumer writes the same zeros,
    so that none needs to wait for another.
    """
    problem, scratch, tile = consumer.problem, consumer.scratch, consumer.rows.tile
    plgpu.barrier_wait(scratch.barriers.v_ready.at[slot])
    if not problem.mask.has_lengths:
        return
    first = index * problem.tiles.keys

    @pl.when(first + problem.tiles.keys > tile.kv_length)
    def _() -> None:
        shape = (ROWS, ROWS)
        rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        for k in range(0, problem.tiles.keys, ROWS):
            for h in range(0, problem.sizes.Hv, ROWS):
                part = scratch.value.at[slot, pl.ds(k, ROWS), pl.ds(h, ROWS)]
                values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
                seen = rows + (first + k) < tile.kv_length
                part[...] = jnp.where(seen, values, jnp.zeros_like(values))
        plgpu.commit_smem()


def _store(consumer: Consumer, out: Refs, lse: Refs, result: Any, row_lse: Any) -> None:
    """Send 64 rows of output and LSE out through shared memory; TMA drops rows past the end."""
    problem, scratch, warpgroup = consumer.problem, consumer.scratch, consumer.warpgroup
    tile, row = consumer.rows.tile, consumer.rows.row
    tiles, barriers = problem.tiles, scratch.barriers
    if not tiles.query_in_registers and not tiles.output_in_query:
        plgpu.barrier_arrive(barriers.q_free.at[warpgroup])
    staging = (scratch.query if tiles.output_in_query else scratch.out).at[warpgroup]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staging[...] = result
    plgpu.commit_smem()
    rows = pl.ds(row, ROWS)
    plgpu.copy_smem_to_gmem(staging, out.at[tile.batch, rows, tile.head])
    lse[tile.batch, tile.head, rows] = row_lse
    if tiles.output_in_query:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(barriers.q_free.at[warpgroup])
