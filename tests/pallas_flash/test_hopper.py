"""What of the Hopper forward can be checked without its GPU: lowering, budgets and work lists."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import ABSTRACT_MASKS as MASKS
from problems import abstract

import pallas_flash
from pallas_flash.call import AttentionCall, Sizes
from pallas_flash.hopper import attention, work
from pallas_flash.hopper.bias import BiasForm, bias_form
from pallas_flash.hopper.forward import Inputs, _tile, forward
from pallas_flash.hopper.operands import Operands, operands
from pallas_flash.hopper.problem import Problem
from pallas_flash.hopper.tile_sizes import (
    ROWS,
    SMEM_LIMIT,
    TUNED,
    ForwardTiles,
    default_forward_tiles,
)
from pallas_flash.mask import Mask


def lower(call: AttentionCall, tiles: ForwardTiles) -> str:
    """StableHLO for CUDA of the forward of a call of abstract arrays."""
    traced = jax.jit(lambda call: forward(call, tiles)).trace(call)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def abstract_call(H, Hv, *, T=328, S=200, dtype: Any = jnp.bfloat16, **fields) -> AttentionCall:
    return AttentionCall(
        query=abstract((2, T, 4, H), dtype),
        key=abstract((2, S, 2, H), dtype),
        value=abstract((2, S, 2, Hv), dtype),
        **{"static_scale": H**-0.5, **fields},
    )


@pytest.mark.parametrize(
    ("head_dims", "mask"),
    [((64, 64), mask) for mask in MASKS]
    + [(dims, mask) for dims in [*TUNED, (192, 128)][1:] for mask in ("causal", "lengths")],
    ids=str,
)
def test_every_tuned_configuration_lowers_for_cuda(head_dims, mask):
    text = lower(abstract_call(*head_dims, mask=MASKS[mask]), default_forward_tiles(*head_dims))
    assert text.count("@mosaic_gpu") == 1


@pytest.mark.parametrize(
    "tiles",
    [
        ForwardTiles(early_key_wait=True),
        ForwardTiles(consumers=3, keys=64, query_in_registers=False),
        ForwardTiles(output_in_query=True),
        ForwardTiles(cluster=2, stages=2, query_in_registers=False),
        ForwardTiles(rescale_above=8.0, stages=3),
    ],
    ids=str,
)
def test_every_option_lowers_for_cuda(tiles):
    assert "@mosaic_gpu" in lower(abstract_call(64, 64, mask=Mask(is_causal=True)), tiles)


IDS = {"query_segment_ids": abstract((2, 328), jnp.int32)}
IDS |= {"key_value_segment_ids": abstract((2, 200), jnp.int32)}


@pytest.mark.parametrize(
    "fields",
    [
        {"soft_cap": 30.0, "mask": MASKS["causal"], "sinks": abstract((4,), jnp.float32)},
        {"alibi_slopes": abstract((4,), jnp.float32), "static_scale": -0.3},
        {
            "mask": dataclasses.replace(MASKS["lengths"], **IDS),
            "soft_cap": 5.0,
            "sinks": abstract((4,), jnp.bfloat16),
            "alibi_slopes": abstract((4,), jnp.float32),
        },
    ],
    ids=lambda fields: "-".join(fields),
)
def test_every_semantic_lowers_for_cuda(fields):
    text = lower(abstract_call(64, 64, **fields), ForwardTiles(keys=64, cluster=2))
    assert text.count("@mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("head_dims", "shape", "dtype"),
    [
        ((64, 64), (1, 4, 328, 200), jnp.bfloat16),
        ((128, 128), (2, 1, 328, 200), jnp.float32),
        ((128, 128), (2, 1, 1, 200), jnp.bfloat16),
        ((192, 128), (1, 1, 1, 1), jnp.float16),
        ((256, 256), (2, 4, 328, 200), jnp.float32),
    ],
    ids=str,
)
def test_every_form_of_bias_lowers_for_cuda(head_dims, shape, dtype):
    mask = MASKS["window" if shape[2:] == (1, 200) else "causal"]
    call = abstract_call(*head_dims, bias=abstract(shape, dtype), mask=mask, soft_cap=9.0)
    tiles = default_forward_tiles(*head_dims, bias=bias_form(call))
    assert lower(call, tiles).count("@mosaic_gpu") == 1


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dims", [*TUNED, (192, 128), (256, 64)], ids=str)
def test_tiles_with_a_bias_fit(head_dims, itemsize):
    form = BiasForm("tile", jnp.dtype(f"float{8 * itemsize}"), False, True)
    tiles = default_forward_tiles(*head_dims, bias=form)
    need = tiles.shared_bytes(*head_dims, bias=form)
    assert need <= SMEM_LIMIT
    ring = tiles.bias_stages * tiles.queries * tiles.keys * itemsize
    assert need == tiles.shared_bytes(*head_dims) + ring
    with pytest.raises(ValueError, match="and a bias need"):
        dataclasses.replace(tiles, bias_stages=9).check(head_dims[0], head_dims[1], form)


def test_heads_that_share_bias_tiles_run_together():
    """Batch rows of one head are neighbours in the order of work, and every head is there once."""
    form = BiasForm("tile", jnp.dtype(jnp.bfloat16), False, True)
    sizes = Sizes(3, 100, 100, 4, 2, 64, 64)
    problem = Problem(sizes, Mask(), 1.0, ForwardTiles(), 132, jnp.bfloat16, bias=form)
    inputs = Inputs(None, Operands(), None, None, None)
    tiles = [_tile(problem, inputs, jnp.int32(entry)) for entry in range(12)]
    places = [(int(tile.head), int(tile.batch)) for tile in tiles]
    assert places == [(head, batch) for head in range(4) for batch in range(3)]


@pytest.mark.parametrize(
    ("shape", "dense", "served"),
    [
        ((1, 4, 64, 64), None, True),
        ((1, 1, 1, 64), (2, 1, 64, 64), True),
        (None, (1, 1, 64, 64), True),
        ((1, 4, 64, 64), (2, 1, 1, 64), False),
    ],
    ids=str,
)
def test_bias_and_dense_masks_are_served_unless_they_grow_together(
    shape, dense, served, monkeypatch
):
    monkeypatch.setattr(attention, "WITHHELD", False)
    monkeypatch.setattr(attention, "_device_property", {"compute_capability": "9.0"}.get)
    call = abstract_call(
        64,
        64,
        T=64,
        S=64,
        bias=None if shape is None else abstract(shape, jnp.bfloat16),
        mask=Mask(dense=None if dense is None else abstract(dense, jnp.bool_)),
    )
    reason = attention.unsupported(call, "gpu")
    assert (reason is None) == served
    assert served or "(2, 1, 1, 64)" in str(reason)
    assert attention.backward_unsupported(call) is not None  # Triton's kernels serve it


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_a_scale_that_is_not_positive_lowers(scale):
    call = abstract_call(64, 64, static_scale=scale, dtype=jnp.float16)
    assert "@mosaic_gpu" in lower(call, default_forward_tiles(64, 64))


def test_lengths_that_tma_takes_are_not_padded_in_memory():
    tiles = default_forward_tiles(128, 128)
    assert "stablehlo.pad" not in lower(abstract_call(128, 128, T=328, S=200), tiles)
    assert "stablehlo.pad" in lower(abstract_call(128, 128, T=327, S=199), tiles)


@pytest.mark.parametrize("head_dims", TUNED, ids=str)
def test_tuned_tiles_fit(head_dims):
    assert TUNED[head_dims].shared_bytes(*head_dims) <= SMEM_LIMIT


def test_tiles_over_budget_raise_before_the_launch_with_the_bytes():
    call = abstract_call(128, 128)
    with pytest.raises(ValueError, match=rf"need \d+ bytes .* a CTA has {SMEM_LIMIT}"):
        lower(call, ForwardTiles(keys=192, stages=3))


@pytest.mark.parametrize(
    "field",
    [
        {"keys": 96},
        {"keys": 320},
        {"stages": 1},
        {"consumers": 4},
        {"cluster": 3},
        {"rescale_above": 9.0},
        {"bias_stages": 0},
    ],
    ids=str,
)
def test_bad_tiles_name_the_field(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        ForwardTiles(**field)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"query": abstract((2, 64, 4, 64), jnp.float32)}, "dtype float32"),
        ({"query": abstract((2, 64, 4, 72), jnp.bfloat16)}, "query has head dim 72"),
        ({"value": abstract((2, 64, 2, 320), jnp.bfloat16)}, "value has head dim 320"),
        ({"query": abstract((2, 0, 4, 64), jnp.bfloat16)}, "is empty"),
        ({"bias": abstract((1, 1, 64, 64), jnp.bfloat16)}, "bias"),
        ({"dropout_rate": 0.5, "dropout_seed": abstract((2,), jnp.uint32)}, "dropout_rate"),
        # Withheld until their GPU tests have run.
        ({"soft_cap": 30.0}, "logits_soft_cap"),
        ({"mask": MASKS["window"]}, "local_window_size"),
        ({"mask": MASKS["lengths"]}, "query_seq_lengths or key_value_seq_lengths"),
        (
            {
                "mask": Mask(is_causal=True, causal_alignment="bottom_right"),
                "query": abstract((2, 63, 4, 64), jnp.bfloat16),
            },
            "S - T = 1",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_named(change, names, monkeypatch):
    call = dataclasses.replace(abstract_call(64, 64, T=64, S=64), **change)
    monkeypatch.setattr(attention, "_device_property", {"compute_capability": "9.0"}.get)
    reason = attention.unsupported(call, "gpu")
    assert reason is not None
    assert names in reason
    # On a device without these kernels another dtype or argument would not help: that comes first.
    monkeypatch.setattr(attention, "_device_property", {"compute_capability": "8.0"}.get)
    assert "9.0, this one has 8.0" in str(attention.unsupported(call, "gpu"))
    assert "9.0, not 'cpu'" in str(attention.unsupported(call, "cpu"))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mask": Mask(is_causal=True), "T": 77, "S": 131},
        {"mask": Mask(is_causal=True, causal_alignment="bottom_right"), "T": 64, "S": 192},
    ],
    ids=str,
)
def test_plain_and_causal_calls_are_served(fields, monkeypatch):
    monkeypatch.setattr(attention, "_device_property", {"compute_capability": "9.0"}.get)
    assert attention.unsupported(abstract_call(64, 64, **fields), "gpu") is None


def test_asking_for_it_on_a_cpu_says_what_it_needs():
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    q = jnp.zeros((1, 64, 1, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"mosaic.*compute capability 9\.0"):
        pallas_flash.dot_product_attention(q, q, q, implementation="mosaic")


@given(
    heads=st.integers(1, 12),
    costs=st.lists(st.integers(1, 64), min_size=1, max_size=20).map(tuple),
    workers=st.integers(1, 140),
    group=st.integers(1, 12),
)
def test_every_unit_is_taken_once_and_work_is_balanced(heads, costs, workers, group):
    table = work.work_lists(heads, costs, workers, group)
    entries = table[table != work.END]
    assert sorted(entries) == list(range(heads * len(costs)))
    for row in table:
        assert row[-1] == work.END  # a worker stops inside its own row
        ended = np.flatnonzero(row == work.END)[0]
        assert (row[ended:] == work.END).all()
    loads = [sum(costs[e % len(costs)] for e in row if e != work.END) for row in table]
    # Each unit goes to the least loaded worker, so loads end within one unit of each other.
    assert max(loads) - min(loads) <= max(costs)


def test_causal_lists_leave_no_worker_idle():
    """Where a worker has several tiles, the longest list is within 2% of the mean."""
    for heads, T, rows, keys, workers, group in (
        (32, 8192, 128, 128, 132, 6),
        (32, 8192, 256, 128, 66, 6),
        (128, 2048, 256, 128, 66, 24),
        (16, 8192, 256, 64, 66, 3),
    ):
        costs = work.unit_costs(Mask(is_causal=True), T, T, rows, keys)
        table = work.work_lists(heads, costs, workers, group)
        loads = [sum(costs[e % len(costs)] for e in row if e != work.END) for row in table]
        assert max(loads) <= 1.02 * np.mean(loads)


@given(
    causal=st.booleans(),
    right=st.none() | st.sampled_from([0, 1, 64, 128]),
    alignment=st.sampled_from(["top_left", "bottom_right"]),
    T=st.sampled_from([1, 64, 200, 256, 321]),
    S=st.sampled_from([1, 100, 128, 320, 384]),
    keys=st.sampled_from([64, 128, 192]),
)
def test_loops_without_masks_have_only_full_tiles(causal, right, alignment, T, S, keys):
    """What `masks_first_only` promises: all key tiles but the first visited are full."""
    mask = Mask(is_causal=causal, window=(None, right), causal_alignment=alignment)
    tiles = ForwardTiles(keys=keys)
    problem = Problem(Sizes(1, T, S, 1, 1, 64, 64), mask, 1.0, tiles, 132, jnp.bfloat16)
    assert problem.masks_first_only or (causal and alignment == "bottom_right") or right
    if not problem.masks_first_only:
        return
    for row in range(0, T, ROWS):
        bounds = mask.kv_bounds(row, ROWS, q_length=T, kv_length=S).in_tiles(keys)
        i = np.arange(row, min(row + ROWS, T))[:, None]  # rows past T are not stored
        for tile in range(bounds.lo, bounds.hi - 1):
            j = np.arange(tile * keys, (tile + 1) * keys)
            assert np.all(mask.visible(i, j, q_length=T, kv_length=S))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    T=st.just(300),
    causal=st.booleans(),
    ordered=st.booleans(),
)
def test_segment_tables_hold_every_visible_tile_and_only_full_ones_as_full(
    seed, T, causal, ordered
):
    rng, S = np.random.default_rng(seed), 200
    ids = [rng.integers(-1, rng.integers(1, 4), L).astype(np.int32) for L in (T, S)]
    if ordered:
        ids = [np.sort(x) for x in ids]
    q_ids, k_ids = (jnp.asarray(x[None]) for x in ids)
    mask = Mask(is_causal=causal, query_segment_ids=q_ids, key_value_segment_ids=k_ids)
    tiles = ForwardTiles(keys=64, cluster=2)
    sizes = Sizes(1, T, S, 4, 2, 64, 64)
    problem = Problem(sizes, mask, 1.0, tiles, 132, jnp.bfloat16)
    found = operands(abstract_call(64, 64, T=T, S=S, mask=mask), problem)
    rows = np.asarray(found.rows).reshape(-1, 4)
    units = np.asarray(found.units).reshape(-1, 2)
    seen = np.zeros((problem.padded_rows, 384), bool)
    seen[:T, :S] = (ids[0][:, None] == ids[1]) & (ids[0][:, None] >= 0)
    if causal:
        seen &= np.arange(len(seen))[:, None] >= np.arange(384)
    shown = seen.reshape(len(rows), ROWS, -1, 64)
    for n, (lo, full_lo, full_hi, hi) in enumerate(rows):
        visible = np.flatnonzero(shown[n].any(axis=(0, 2)))
        assert all(lo <= tile < hi for tile in visible)
        assert all(shown[n][:, tile].all() for tile in range(full_lo, full_hi))
        first, last = units[n * ROWS // (tiles.queries * tiles.cluster)]
        assert last > first
        assert all(first <= tile < last for tile in visible)


@given(
    i=st.integers(0, 40),
    left=st.none() | st.integers(0, 30),
    right=st.none() | st.integers(0, 30),
    causal=st.booleans(),
    alignment=st.sampled_from(["top_left", "bottom_right"]),
    lengths=st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_row_bounds_are_the_visible_keys(i, left, right, causal, alignment, lengths):
    mask = Mask(is_causal=causal, window=(left, right), causal_alignment=alignment)
    q_length, kv_length = lengths
    keys = np.arange(48)
    seen = mask.visible(i, keys, q_length=q_length, kv_length=kv_length)
    lo, hi = mask.row_bounds(i, q_length=q_length, kv_length=kv_length)
    np.testing.assert_array_equal((keys < hi) & (keys >= (0 if lo is None else lo)), seen)
