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
In a cluster of two, the CTAs take neighbouring query tiles, each loads half of every key and value
tile and multicasts it; `free` then counts the consumers of both.

Nothing tells full tiles and partial ones apart but one branch that the whole warpgroup takes
together. Two loops, a masked and an unmasked one, would carry P across: ptxas then moves registers
that wgmma reads and serialises it (its warning C7513).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_flash.call import AttentionCall, Sizes
from pallas_flash.hopper import work
from pallas_flash.hopper.tile_sizes import ROWS, ForwardTiles
from pallas_flash.mask import Bounds, Mask, row_lengths

LOG2_E = math.log2(math.e)
TMA_ROWS = 8
"""Rows of a swizzled tile: sequences reach TMA in multiples of this."""
CHUNK = 8
"""Columns masked at a time: their indices take four registers, a whole tile's would spill."""
Refs = Any
Index = Any


class Problem(NamedTuple):
    """The static side of one call: what the kernel is compiled for."""

    sizes: Sizes
    mask: Mask  # arrays replaced by placeholders: it says which fields there are
    scale: float
    tiles: ForwardTiles
    multiprocessors: int
    dtype: Any

    @property
    def units(self) -> int:
        return work.units(self.sizes.T, self.tiles.queries, self.tiles.cluster)

    @property
    def folds_scale(self) -> bool:
        """A positive scale commutes with the maximum, so it joins the exponent's one FMA."""
        return self.scale > 0

    @property
    def always_full(self) -> bool:
        """True when no key tile is ever partial, so that the loop needs no branch."""
        return self.mask.is_trivial and self.sizes.S % self.tiles.keys == 0

    @property
    def same_keys_in_cluster(self) -> bool:
        """True when both CTAs of a cluster always visit the same key tiles."""
        return self.mask.is_trivial and self.sizes.T % (2 * self.tiles.queries) == 0


class Barriers(NamedTuple):
    q_ready: Any
    q_free: Any
    k_ready: Any
    k_free: Any
    v_ready: Any
    v_free: Any
    turn: Any  # pingpong: whose turn it is to issue
    done: Any  # cluster: neither CTA leaves while the other may still signal it


class Scratch(NamedTuple):
    query: Any  # (consumers, 64, H)
    key: Any  # (stages, keys, H)
    value: Any  # (stages, keys, Hv)
    lse: Any  # (consumers, 64)
    out: Any  # (consumers, 64, Hv), None when it goes through `query`
    barriers: Barriers


class Inputs(NamedTuple):
    lists: Any  # int32, flat (workers, rounds)
    lengths: Any  # int32, flat (2, B): query and key lengths; None without lengths
    query: Any
    key: Any
    value: Any


def forward(
    call: AttentionCall, tiles: ForwardTiles, multiprocessors: int = 132
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Output and LSE of a call that `pallas_flash.hopper.attention.unsupported` accepts.

    Args:
      call: bf16 or f16, interval masks, head dims that are multiples of 64.
      tiles: how to cut it.
      multiprocessors: of the device; one persistent CTA on each.
    """
    sizes, mask = call.sizes, call.mask
    tiles.check(sizes.H, sizes.Hv)
    assert call.static_scale is not None  # `unsupported` refuses a traced scale
    query, key, value = (_whole_rows(x) for x in (call.query, call.key, call.value))
    fields = jax.tree.map(lambda _: 0, mask)
    dtype = call.query.dtype
    problem = Problem(sizes, fields, call.static_scale, tiles, multiprocessors, dtype)
    lengths = None
    if mask.has_lengths:
        lengths = jnp.concatenate(
            [
                row_lengths(mask.query_lengths, sizes.B, sizes.T),
                row_lengths(mask.key_value_lengths, sizes.B, sizes.S),
            ]
        )
    out, lse = _launch(problem, lengths, query, key, value)
    return out[:, : sizes.T], lse[:, :, : sizes.T]


def _whole_rows(x: Array) -> Array:
    """The sequence padded to a multiple of 8, which TMA's swizzled tiles need; no copy if it is."""
    missing = -x.shape[1] % TMA_ROWS
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else x


def _launch(
    problem: Problem, lengths: Array | None, query: Array, key: Array, value: Array
) -> tuple[Array, Array]:
    sizes, tiles, mask = problem.sizes, problem.tiles, problem.mask
    heads = sizes.B * sizes.N
    costs = work.unit_costs(
        Mask(is_causal=mask.is_causal) if mask.has_lengths else mask,
        sizes.T,
        sizes.S,
        tiles.queries * tiles.cluster,
        tiles.keys,
    )
    workers = work.worker_count(problem.multiprocessors, tiles.cluster, problem.units, heads)
    group = work.heads_in_l2(sizes.S, sizes.H + sizes.Hv, query.dtype.itemsize, sizes.G)
    lists = work.work_lists(heads, costs, workers, group)
    padded_rows = problem.units * tiles.queries * tiles.cluster
    launch = plgpu.kernel(
        functools.partial(_kernel, problem, lists.shape[1]),
        out_type=(
            jax.ShapeDtypeStruct((*query.shape[:3], sizes.Hv), query.dtype),
            # A one-dimensional TMA store is not clipped at the end of the row: room for whole
            # tiles instead, sliced off outside.
            jax.ShapeDtypeStruct((sizes.B, sizes.N, padded_rows), jnp.float32),
        ),
        scratch_types=_scratch(problem),
        grid=(workers,),
        grid_names=("worker",),
        num_threads=tiles.consumers + 1,
        thread_name="warpgroup",
        kernel_name="pallas_flash_hopper_forward",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        **({"cluster": (2,), "cluster_names": ("cta",)} if tiles.cluster == 2 else {}),
    )
    given = () if lengths is None else (lengths,)
    return launch(jnp.asarray(lists.reshape(-1)), *given, query, key, value)


def _scratch(problem: Problem) -> Scratch:
    sizes, tiles = problem.sizes, problem.tiles
    stages, consumers = tiles.stages, tiles.consumers

    def tile(*shape: int) -> Any:
        swizzle = plgpu.find_swizzle(shape[-1] * 16)
        transforms = (  # pyright does not see that these classes are concrete
            plgpu.TilingTransform((8, swizzle // 2)),  # pyright: ignore[reportAbstractUsage]
            plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
        )
        return plgpu.SMEM(shape, problem.dtype, transforms=transforms)

    def free() -> Any:
        if tiles.cluster == 1:
            return plgpu.Barrier(num_barriers=stages, num_arrivals=consumers)
        return plgpu.ClusterBarrier(
            collective_axes=("cta",), num_barriers=stages, num_arrivals=consumers
        )

    done = None
    if tiles.cluster == 2:
        done = plgpu.ClusterBarrier(collective_axes=("cta",), num_arrivals=consumers)
    return Scratch(
        query=tile(consumers, ROWS, sizes.H),
        key=tile(stages, tiles.keys, sizes.H),
        value=tile(stages, tiles.keys, sizes.Hv),
        lse=plgpu.SMEM((consumers, ROWS), jnp.float32),
        out=None if tiles.output_in_query else tile(consumers, ROWS, sizes.Hv),
        barriers=Barriers(
            q_ready=plgpu.Barrier(num_barriers=consumers),
            q_free=plgpu.Barrier(num_barriers=consumers),
            k_ready=plgpu.Barrier(num_barriers=stages),
            k_free=free(),
            v_ready=plgpu.Barrier(num_barriers=stages),
            v_free=free(),
            turn=plgpu.Barrier(num_barriers=consumers) if tiles.pingpong else None,
            done=done,
        ),
    )


# ---- the kernel ---------------------------------------------------------------------------------


class Tile(NamedTuple):
    """One query tile of this CTA: where it is and what its key loop visits."""

    batch: Index
    head: Index
    row: Index  # first query row of the CTA
    q_length: Index
    kv_length: Index
    bounds: Bounds  # key tiles, this CTA's own
    hi: Index  # one past the last key tile that the whole cluster loads
    lo: Index  # first key tile that the whole cluster loads

    @property
    def count(self) -> Index:
        return self.hi - self.lo


def _kernel(problem: Problem, rounds: int, *refs: Refs) -> None:
    names = 2 if problem.mask.has_lengths else 1
    lists, *lengths = refs[:names]
    query, key, value, out, lse, *scratch = refs[names:]
    inputs = Inputs(lists, lengths[0] if lengths else None, query, key, value)
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
        if problem.tiles.pingpong:

            @pl.when(warpgroup == 1)
            def _() -> None:
                plgpu.barrier_arrive(scratch.barriers.turn.at[0])

        consume = functools.partial(_consume, problem, scratch, out, lse, warpgroup)
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
    batch, head = batch_head // sizes.N, lax.rem(batch_head, sizes.N)
    q_length: Index = sizes.T
    kv_length: Index = sizes.S
    if inputs.lengths is not None:
        q_length, kv_length = inputs.lengths[batch], inputs.lengths[sizes.B + batch]

    def bounds(row: Index, rows: int) -> Bounds:
        found = problem.mask.kv_bounds(row, rows, q_length=q_length, kv_length=kv_length)
        found = found.in_tiles(tiles.keys)
        # A tile that sees nothing still visits one (masked) tile, so that every loop has a first.
        lo = jnp.minimum(found.lo, jnp.int32(pl.cdiv(sizes.S, tiles.keys) - 1))
        hi = jnp.where(found.hi > found.lo, found.hi, lo + 1)
        return Bounds(lo, found.full_lo, found.full_hi, hi)

    first = unit * (tiles.queries * tiles.cluster)
    if tiles.cluster == 1:
        own = bounds(first, tiles.queries)
        return Tile(batch, head, first, q_length, kv_length, own, own.hi, own.lo)
    row = first + lax.axis_index("cta") * tiles.queries
    own, whole = bounds(row, tiles.queries), bounds(first, 2 * tiles.queries)
    # The union of two intervals, each widened to one tile, need not be an interval of `whole`.
    other = bounds(first + (1 - lax.axis_index("cta")) * tiles.queries, tiles.queries)
    hi = jnp.maximum(whole.hi, jnp.maximum(own.hi, other.hi))
    lo = jnp.minimum(whole.lo, jnp.minimum(own.lo, other.lo))
    return Tile(batch, head, row, q_length, kv_length, own, hi, lo)


def _load(
    problem: Problem, inputs: Inputs, scratch: Scratch, position: Index, tile: Tile, step: Index
) -> Index:
    """The producer's part of one query tile: its queries, then every key and value tile."""
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
        slot = lax.rem(step, tiles.stages)
        keys = pl.ds((tile.hi - 1 - j) * tiles.keys, tiles.keys)
        for source, target, ready, free in (
            (inputs.key, scratch.key, barriers.k_ready, barriers.k_free),
            (inputs.value, scratch.value, barriers.v_ready, barriers.v_free),
        ):

            @pl.when(step >= tiles.stages)
            def _(free: Any = free) -> None:
                plgpu.barrier_wait(free.at[slot])

            plgpu.copy_gmem_to_smem(
                source.at[tile.batch, keys, tile.head // problem.sizes.G],
                target.at[slot],
                ready.at[slot],
                collective_axes=shared,
            )
        return step + 1

    return lax.fori_loop(0, tile.count, load, step)


class Softmax(NamedTuple):
    """Running statistics of 64 rows, base 2, and the probabilities that still wait for their V."""

    p: Any  # (64, keys), input dtype
    m: Any  # (64,) maximum of c S
    l: Any  # (64,) denominator


def _consume(
    problem: Problem,
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
    row = tile.row + warpgroup * ROWS
    step = _drop(problem, scratch, tile.hi - tile.bounds.hi, step)
    plgpu.barrier_wait(barriers.q_ready.at[warpgroup])
    query = scratch.query.at[warpgroup]
    if tiles.query_in_registers:
        query = plgpu.load(query, layout=plgpu.Layout.WGMMA)
        if not tiles.output_in_query:
            plgpu.barrier_arrive(barriers.q_free.at[warpgroup])

    def run(acc: Refs) -> tuple[Any, ...]:
        last_slot, state = _key_loop(problem, scratch, warpgroup, tile, row, query, acc, step)
        _wait_for_values(problem, scratch, tile, tile.bounds.lo, last_slot)
        plgpu.wgmma(acc, state.p, scratch.value.at[last_slot])
        denominator = jnp.where(state.l == 0.0, 1.0, state.l)
        inverse = lax.broadcast_in_dim(1.0 / denominator, (ROWS, problem.sizes.Hv), [0])
        result = acc[...] * inverse
        plgpu.barrier_arrive(barriers.v_free.at[last_slot])
        return result.astype(problem.dtype), state.m * (1 / LOG2_E) + jnp.log(state.l)

    result, row_lse = pl.run_scoped(run, plgpu.ACC((ROWS, problem.sizes.Hv)))
    _store(problem, scratch, out, lse, warpgroup, tile, row, result, row_lse)
    step = step + tile.bounds.hi - tile.bounds.lo
    return _drop(problem, scratch, tile.bounds.lo - tile.lo, step)


def _drop(problem: Problem, scratch: Scratch, count: Index, step: Index) -> Index:
    """Give back key tiles that only the other CTA of the cluster needs."""
    if problem.tiles.cluster == 1 or problem.same_keys_in_cluster:
        return step
    barriers = scratch.barriers

    def drop(_: Index, step: Index) -> Index:
        slot = lax.rem(step, problem.tiles.stages)
        plgpu.barrier_wait(barriers.k_ready.at[slot])
        plgpu.barrier_arrive(barriers.k_free.at[slot])
        plgpu.barrier_wait(barriers.v_ready.at[slot])
        plgpu.barrier_arrive(barriers.v_free.at[slot])
        return step + 1

    return lax.fori_loop(0, count, drop, step)


def _key_loop(
    problem: Problem,
    scratch: Scratch,
    warpgroup: Index,
    tile: Tile,
    row: Index,
    query: Any,
    acc: Refs,
    step: Index,
) -> tuple[Index, Softmax]:
    """All key tiles of one query tile, last first; the last product with V is left to the caller.

    Returns the slot of the value tile that is still to be multiplied, and the softmax state.
    """
    tiles, barriers = problem.tiles, scratch.barriers
    stages, keys = tiles.stages, tiles.keys
    bounds = tile.bounds

    def masked(j: Index) -> Index:
        return (j >= bounds.full_hi) | (j < bounds.full_lo)

    def first(s_acc: Refs) -> Any:
        plgpu.wgmma(s_acc, query, scratch.key.at[slot].T)
        return s_acc[...]

    slot = lax.rem(step, stages)
    plgpu.barrier_wait(barriers.k_ready.at[slot])
    s = pl.run_scoped(first, plgpu.ACC((ROWS, keys)))
    plgpu.barrier_arrive(barriers.k_free.at[slot])
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    m = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), row_layout)
    l = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row_layout)
    state, _ = _softmax(problem, tile, row, bounds.hi - 1, True, s, m, l)

    def next_tile(j: Index, carry: tuple[Index, Softmax]) -> tuple[Index, Softmax]:
        step, state = carry
        index = bounds.hi - 1 - j
        slot, previous = lax.rem(step, stages), lax.rem(step - 1, stages)
        plgpu.barrier_wait(barriers.k_ready.at[slot])

        def products(s_acc: Refs) -> Softmax:
            if tiles.pingpong:
                plgpu.barrier_wait(barriers.turn.at[warpgroup])
            plgpu.wgmma(s_acc, query, scratch.key.at[slot].T)
            _wait_for_values(problem, scratch, tile, index + 1, previous)
            plgpu.wgmma(acc, state.p, scratch.value.at[previous])
            if tiles.pingpong:
                following = lax.rem(warpgroup + 1, tiles.consumers)
                plgpu.barrier_arrive(barriers.turn.at[following])
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
            plgpu.barrier_arrive(barriers.k_free.at[slot])
            needs_mask = False if problem.always_full else masked(index)
            new, alpha = _softmax(problem, tile, row, index, needs_mask, s, state.m, state.l)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(barriers.v_free.at[previous])
            acc[...] = acc[...] * lax.broadcast_in_dim(alpha, (ROWS, problem.sizes.Hv), [0])
            return new

        return step + 1, pl.run_scoped(products, plgpu.ACC((ROWS, keys)))

    count = bounds.hi - bounds.lo
    step, state = lax.fori_loop(1, count, next_tile, (step + 1, state))
    return lax.rem(step - 1, stages), state


def _softmax(
    problem: Problem,
    tile: Tile,
    row: Index,
    index: Index,
    masked: Any,
    s: Any,
    m: Any,
    l: Any,
) -> tuple[Softmax, Any]:
    """The online softmax of one tile of logits; returns the new state and alpha.

    Args:
      index: which key tile.
      masked: whether it needs masking: False, True, or a scalar that the warpgroup branches on.
    """
    exponent_scale = problem.scale * LOG2_E
    if not problem.folds_scale:
        s, exponent_scale = s * exponent_scale, 1.0
    mask = functools.partial(_mask, problem, tile, row, index)
    if masked is True:
        s = mask(s)
    elif masked is not False:
        s = lax.cond(masked, mask, lambda s: s, s)
    m_new = jnp.maximum(m, jnp.max(s, axis=1) * exponent_scale)
    # A row that has seen nothing yet has m = -inf, and -inf - -inf would be NaN.
    m_safe = m_new if masked is False else jnp.where(m_new == -jnp.inf, 0.0, m_new)
    alpha = jnp.exp2(m - m_safe)
    p = jnp.exp2(s * exponent_scale - lax.broadcast_in_dim(m_safe, s.shape, [0]))
    l = l * alpha + jnp.sum(p, axis=1)
    return Softmax(p.astype(problem.dtype), m_new, l), alpha


def _mask(problem: Problem, tile: Tile, row: Index, index: Index, s: Any) -> Any:
    """The logits with -inf where the mask hides the key, a few columns at a time."""
    layout = plgpu.Layout.WGMMA
    rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=layout.reduce(1)) + row
    columns = plgpu.broadcasted_iota(jnp.int32, (ROWS, CHUNK), 1, layout=layout)
    lo, hi = problem.mask.row_bounds(rows, q_length=tile.q_length, kv_length=tile.kv_length)

    def from_here(bound: Any, column: Index) -> Any:
        """A bound of each row, counted from the chunk's first column."""
        start = index * problem.tiles.keys + column
        return lax.broadcast_in_dim(bound - start, (ROWS, CHUNK), [0])

    parts = []
    for column in range(0, problem.tiles.keys, CHUNK):
        seen = columns < from_here(hi, column)
        if lo is not None:
            seen &= columns >= from_here(lo, column)
        part = lax.slice(s, (0, column), (ROWS, column + CHUNK))
        parts.append(jnp.where(seen, part, -jnp.inf))
    return jnp.concatenate(parts, axis=1)


def _wait_for_values(
    problem: Problem, scratch: Scratch, tile: Tile, index: Index, slot: Index
) -> None:
    """Wait for a value tile; rows behind the length become 0, for memory there may hold NaN.

    A probability of 0 does not silence them: 0 * NaN is NaN. Every consumer writes the same zeros,
    so that none needs to wait for another.
    """
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


def _store(
    problem: Problem,
    scratch: Scratch,
    out: Refs,
    lse: Refs,
    warpgroup: Index,
    tile: Tile,
    row: Index,
    result: Any,
    row_lse: Any,
) -> None:
    """Send 64 rows of output and LSE out through shared memory; TMA drops rows past the end."""
    tiles, barriers = problem.tiles, scratch.barriers
    if not tiles.query_in_registers and not tiles.output_in_query:
        plgpu.barrier_arrive(barriers.q_free.at[warpgroup])
    staging = (scratch.query if tiles.output_in_query else scratch.out).at[warpgroup]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staging[...] = result
    scratch.lse.at[warpgroup][...] = row_lse
    plgpu.commit_smem()
    rows = pl.ds(row, ROWS)
    plgpu.copy_smem_to_gmem(staging, out.at[tile.batch, rows, tile.head], commit_group=False)
    plgpu.copy_smem_to_gmem(scratch.lse.at[warpgroup], lse.at[tile.batch, tile.head, rows])
    if tiles.output_in_query:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(barriers.q_free.at[warpgroup])
