"""The arithmetic of the Hopper forward, tile by tile, in plain JAX: what its warpgroups compute.

The kernel's own functions run here on arrays. Only what needs the hardware is replaced: indices,
loads, and the vote of a warp. Barriers, TMA and wgmma are left to the GPU tests.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash import api, reference
from pallas_flash.hopper import forward as kernel
from pallas_flash.hopper import softmax
from pallas_flash.hopper.bias import dense_as_bias
from pallas_flash.hopper.operands import Operands, operands, static_fields
from pallas_flash.hopper.problem import Problem
from pallas_flash.hopper.tile_sizes import ROWS, ForwardTiles
from pallas_flash.shapes import Case

WARP_ROWS = 16


class Memory:
    """An array behind a ref's interface."""

    def __init__(self, array):
        self.array = jnp.asarray(array)

    @property
    def at(self):
        return self

    @property
    def shape(self):
        return self.array.shape

    def __getitem__(self, index):
        if index is Ellipsis:
            return self.array
        if isinstance(index, tuple):  # (all rows, some columns)
            columns = index[1]
            assert 0 <= columns.start <= self.array.shape[1] - columns.size
            return self.array[:, columns.start :][:, : columns.size]
        start, size = (index.start, index.size) if hasattr(index, "start") else (index, None)
        # Out of bounds must show, not clamp as JAX's indexing does.
        assert 0 <= int(start) <= len(self.array) - (size or 1)
        return self.array[int(start)] if size is None else self.array[int(start) :][:size]

    def __setitem__(self, index, value):
        assert index is Ellipsis
        self.array = value


@pytest.fixture
def hardware(monkeypatch):
    def any_in_warp(rows):
        return jnp.repeat(rows.reshape(-1, WARP_ROWS).any(axis=1), WARP_ROWS)

    def branch(moved, yes, no, *arrays):
        """A branch that each warp takes on its own."""

        def select(a, b):
            return jnp.where(moved.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

        return jax.tree.map(select, yes(*arrays), no(*arrays))

    def iota(dtype, shape, axis, layout=None):
        return lax.broadcasted_iota(dtype, shape, axis)

    monkeypatch.setattr(softmax.plgpu, "broadcasted_iota", iota)
    monkeypatch.setattr(softmax.plgpu, "load", lambda array, **_: array)
    monkeypatch.setattr(softmax, "_any_in_warp", any_in_warp)
    monkeypatch.setattr(softmax.lax, "cond", branch)


def rows_of(array, start, size):
    """A tile's rows, zeros past the end, as TMA loads them."""
    part = array[start : start + size]
    return jnp.pad(part, ((0, size - len(part)), (0, 0))).astype(jnp.float32)


def bias_tile(problem, small, rows, index):
    """What the ring holds of the bias of one key tile, for one warpgroup."""
    form, keys = problem.bias, problem.tiles.keys
    if form is None or form.kind == "rows":
        return None
    plane = form.plane(int(rows.tile.batch), int(rows.tile.head), problem.sizes.N)
    if form.kind == "tile":
        part = small.bias.array[plane, int(rows.row) :][:ROWS, index * keys :][:, :keys]
        missing = ROWS - part.shape[0], keys - part.shape[1]
        return Memory(jnp.pad(part, ((0, missing[0]), (0, missing[1]))))
    padded = pl.cdiv(problem.sizes.S, keys) * keys
    return Memory(small.bias[pl.ds(plane * padded + index * keys, keys)])


def attend(call, tiles):
    """Output and LSE, computed as the kernel's consumers would."""
    call = dense_as_bias(call)
    assert call.static_scale is not None
    problem = Problem(
        sizes=call.sizes,
        scale=call.static_scale,
        tiles=tiles,
        multiprocessors=1,
        dtype=call.query.dtype,
        **static_fields(call),
    )
    small = Operands(*(x if x is None else Memory(x) for x in operands(call, problem)))
    B, T, _, N, _, _, Hv = call.sizes
    out = np.zeros((B, problem.padded_rows, N, Hv), np.float32)
    lse = np.zeros((B, N, problem.padded_rows), np.float32)
    inputs = kernel.Inputs(None, small, None, None, None)
    for entry in range(B * N * problem.units):
        tile = kernel._tile(problem, inputs, jnp.int32(entry))
        b, n, g = int(tile.batch), int(tile.head), int(tile.head) // call.sizes.G
        for warpgroup in range(tiles.consumers):
            rows = softmax.rows_of(problem, small, tile, warpgroup)
            q = rows_of(call.query[b, :, n], int(rows.row), ROWS)
            here = slice(int(rows.row), int(rows.row) + ROWS)
            out[b, here, n], lse[b, n, here] = visit(
                problem, small, rows, q, call.key[b, :, g], call.value[b, :, g]
            )
    return out[:, :T], lse[:, :, :T]


def visit(problem, small, rows, q, key, value):
    """One warpgroup's key tiles, last first."""
    bounds, keys = rows.bounds, problem.tiles.keys
    acc = Memory(jnp.zeros((ROWS, value.shape[-1])))
    state: Any = None
    later = problem.later_may_be_empty
    assert rows.tile.lo <= bounds.lo < bounds.hi <= rows.tile.hi
    for index in range(int(bounds.hi) - 1, int(bounds.lo) - 1, -1):
        products = q @ rows_of(key, index * keys, keys).T
        s = softmax.logits(problem, rows, index, products, bias_tile(problem, small, rows, index))
        first = state is None
        partial = first or not bounds.full_lo <= index < bounds.full_hi
        if partial and not (problem.always_full if first else problem.masks_first_only):
            s = softmax.mask_logits(problem, small, rows, index, s)
        may_be_empty = problem.first_may_be_empty if first else later
        old = state
        state, moved = softmax.probabilities(
            problem, s, None if old is None else old.m, may_be_empty=may_be_empty
        )
        if old is not None:
            l = softmax.rescale(acc, old.l, old.m, state.m, moved, may_be_empty=later)
            state = state._replace(l=l + state.l)
        v = rows_of(value, index * keys, keys)
        if problem.mask.has_lengths:
            v = jnp.where(jnp.arange(keys)[:, None] + index * keys < rows.tile.kv_length, v, 0)
        acc[...] = acc[...] + state.p.astype(jnp.float32) @ v
    return softmax.finish(problem, small, rows, acc, state.m, state.l)


def ids(*sizes):
    """Documents one behind the other; the last size is padding."""
    return jnp.asarray(np.repeat([*range(len(sizes) - 1), -1], sizes)[None], jnp.int32)


CASE = Case("softmax", B=1, T=200, S=200, N=2, K=1, H=16)
PACKED = {
    "query_segment_ids": ids(60, 90, 41, 9),
    "key_value_segment_ids": ids(60, 90, 41, 9),
}
SHUFFLED = {
    "query_segment_ids": jnp.arange(200, dtype=jnp.int32)[None] % 3 - 1,
    "key_value_segment_ids": jnp.arange(200, dtype=jnp.int32)[None] // 2 % 4 - 1,
}
LENGTHS = {
    "query_seq_lengths": jnp.asarray([150], jnp.int32),
    "key_value_seq_lengths": jnp.asarray([170], jnp.int32),
}
CAUSAL = {"is_causal": True}
SLOPES = {"alibi_slopes": jnp.asarray([0.5, 0.05])}
SINKS = {"sinks": jnp.asarray([-3.0, 8.0])}


def bias(*shape, hidden=0.2, dtype=jnp.float32):
    """Biases of which a share is -inf, and whose first query (if any) sees nothing."""
    rng = np.random.default_rng(7)
    values = np.where(rng.random(shape) < hidden, -np.inf, rng.standard_normal(shape) * 2)
    if shape[2] > 1:
        values[:, :, 0] = -np.inf
    return {"bias": jnp.asarray(values, dtype)}


SEEN = {"mask": jnp.asarray(np.random.default_rng(8).random((1, 2, 200, 200)) < 0.5)}
CALLS = {
    "causal": CAUSAL,
    "bottom right": {**CAUSAL, "causal_alignment": "bottom_right", "T": 130},
    "window": {"local_window_size": (70, 20)},
    "lengths": {**CAUSAL, **LENGTHS},
    "soft cap": {"logits_soft_cap": 3.0, "scale": -0.7},
    "sinks": {"local_window_size": (10, 0), **SINKS, **LENGTHS},
    "alibi": {**SLOPES, "scale": -0.2},
    "causal alibi": {**CAUSAL, **SLOPES},
    "packed": {**CAUSAL, **PACKED},
    "shuffled ids": SHUFFLED,
    "bias": bias(1, 2, 200, 200, dtype=jnp.bfloat16),
    "causal bias, one head": {**CAUSAL, **bias(1, 1, 200, 200), "scale": -0.4},
    "window bias": {"local_window_size": (70, 20), **bias(1, 2, 200, 200)},
    "bias of keys": {**bias(1, 2, 1, 200), **LENGTHS},
    "bias of keys, cap": {**bias(1, 1, 1, 200), "logits_soft_cap": 2.0},
    "bias of rows": {**CAUSAL, **bias(1, 2, 200, 1), **SINKS},
    "bias of heads": {**CAUSAL, **bias(1, 2, 1, 1, hidden=0.0)},
    "bias and cap": {**CAUSAL, **bias(1, 2, 200, 200), "logits_soft_cap": 2.0},
    "dense": SEEN,
    "dense and bias": {**CAUSAL, **SEEN, **bias(1, 1, 1, 200), **SLOPES},
    "everything": {**CAUSAL, **PACKED, **LENGTHS, **SLOPES, **SINKS, "logits_soft_cap": 5.0},
}


def draw(T=CASE.T, ramp=0.0):
    rng = np.random.default_rng(5)
    shapes = ((1, T, 2, CASE.H), (1, CASE.S, 1, CASE.H), (1, CASE.S, 1, CASE.H))
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    grow = 1 + ramp * jnp.arange(CASE.S, 0, -1)[:, None, None] / CASE.S
    return q, k * grow, v


def compare(call, tiles, close=2e-5):
    want, want_lse = jax.jit(reference.forward)(call)
    out, lse = attend(call, tiles)
    np.testing.assert_allclose(out, np.asarray(want), rtol=close, atol=close)
    np.testing.assert_allclose(lse, np.asarray(want_lse), rtol=close, atol=close)


@pytest.mark.parametrize("name", CALLS)
def test_warpgroups_compute_attention(hardware, name):
    others = dict(CALLS[name])
    arrays = draw(others.pop("T", CASE.T))
    compare(api.build_call(*arrays, **others), ForwardTiles(keys=64, consumers=3))


@pytest.mark.parametrize("ramp", [0.0, 3.0, 60.0])
def test_a_stale_maximum_is_exact(hardware, ramp):
    """Logits that grow along the visited keys: slowly, past the threshold, far past it."""
    tiles = ForwardTiles(keys=64, rescale_above=8.0)
    call = api.build_call(*draw(ramp=ramp), is_causal=True)
    problem_tiles = dataclasses.replace(tiles, rescale_above=0.0)
    compare(call, tiles)
    for got, want in zip(attend(call, tiles), attend(call, problem_tiles), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
