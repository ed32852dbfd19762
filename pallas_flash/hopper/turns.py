"""Sums of dQ in a fixed order, for gradients that repeat bit for bit.

Every key tile that sees a tile of queries adds its part to their dQ. In the default they add as
they come. Here they take turns, last keys first, counted by one semaphore for each tile of dQ:

    consumers   ... dQ_i -> smem, ready ->  (free ->) dQ_{i+1} -> smem ...
    sender      wait until count(i) = my turn;  dQ[i] += smem by TMA;  until done;  count(i) += 1

Last keys first, because a causal mask lets every key tile begin at its own diagonal: it then is the
first to add there, and each finds that the tile behind it has just left. CTAs are launched in that
order too, so that nobody waits for one that has not begun. Waiting and completing an addition
takes a while, which is why a warpgroup of its own does it, one step behind the products.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.hopper.backward_problem import (
    CONSUMERS,
    Index,
    Outputs,
    Problem,
    Refs,
    Scratch,
    Unit,
)
from pallas_flash.hopper.backward_tiles import HALF


def semaphores(problem: Problem) -> Refs:
    """One for each tile of dQ, shared by all CTAs and 0 at the start; None if nobody waits."""
    if not problem.deterministic:
        return None
    sizes = problem.sizes
    return pl.get_global(plgpu.SemaphoreType.REGULAR((sizes.B * sizes.N * problem.query_tiles,)))


def turn(problem: Problem, unit: Unit, tile: Index) -> Index:
    """How many key tiles add to a tile of dQ before this one: those with later keys that see it."""
    tiles = problem.tiles
    lengths = {"q_length": unit.q_length, "kv_length": unit.kv_length}
    seen = problem.mask.kv_bounds(tile * tiles.queries, tiles.queries, **lengths)
    return seen.in_tiles(tiles.keys).hi - 1 - unit.first_key // tiles.keys


def leave_piece(
    scratch: Scratch, warpgroup: Index, piece: Any, *, nothing_before: bool | Index
) -> None:
    """A consumer's part: a (64, 64) piece of dQ into shared memory, for the sender to add."""

    @pl.when(jnp.logical_not(nothing_before))
    def _() -> None:
        plgpu.barrier_wait(scratch.barriers.dq_free)

    scratch.dquery.at[warpgroup][...] = piece
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.barriers.dq_ready)


def send_in_turn(problem: Problem, scratch: Scratch, outputs: Outputs, unit: Unit) -> None:
    """The sender: adds the pieces of both consumers to dQ, step by step."""
    sizes, tiles, barriers = problem.sizes, problem.tiles, scratch.barriers
    width = tiles.width(sizes.H)
    products = [tiles.dquery_products(sizes.H, consumer) for consumer in range(CONSUMERS)]
    pieces = [
        [(rows, column + start) for rows, column in mine for start in range(0, width, HALF)]
        for mine in products
    ]

    def step(index: Index, _: None) -> None:
        member, tile = unit.place(index, sizes.G)
        head = unit.kv_head * sizes.G + member
        place = (unit.batch * sizes.N + head) * problem.query_tiles + tile
        for number, both in enumerate(zip(*pieces, strict=True)):
            plgpu.barrier_wait(barriers.dq_ready)
            if number == 0:
                plgpu.semaphore_wait(
                    outputs.turns.at[place],
                    turn(problem, unit, tile),
                    decrement=False,
                    memory_scope="gpu",
                )
            for consumer, (rows, column) in enumerate(both):
                rows_here = pl.ds(tile * tiles.queries + rows, HALF)
                target = outputs.dquery.at[unit.batch, rows_here, head, pl.ds(column, HALF)]
                plgpu.copy_smem_to_gmem(scratch.dquery.at[consumer], target, reduction_op="add")
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(barriers.dq_free)
        plgpu.wait_smem_to_gmem(0)  # until the sums are in memory: the next CTA may come
        plgpu.semaphore_signal(outputs.turns.at[place], memory_scope="gpu")

    lax.fori_loop(0, (unit.hi - unit.lo) * sizes.G, step, None)
