"""What of the Hopper forward can be checked without its GPU: lowering, budgets and work lists."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import ABSTRACT_MASKS as MASKS
from problems import abstract

import pallas_flash
from pallas_flash.call import AttentionCall
from pallas_flash.hopper import attention, work
from pallas_flash.hopper.forward import forward
from pallas_flash.hopper.tile_sizes import SMEM_LIMIT, TUNED, ForwardTiles, default_forward_tiles
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


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dims", [*TUNED, (192, 128)], ids=str)
def test_every_tuned_configuration_lowers_for_cuda(head_dims, mask):
    text = lower(abstract_call(*head_dims, mask=MASKS[mask]), default_forward_tiles(*head_dims))
    assert text.count("@mosaic_gpu") == 1


@pytest.mark.parametrize(
    "tiles",
    [
        ForwardTiles(pingpong=True),
        ForwardTiles(consumers=3, keys=64, pingpong=True, query_in_registers=False),
        ForwardTiles(output_in_query=True),
        ForwardTiles(cluster=2, stages=2, query_in_registers=False),
    ],
    ids=str,
)
def test_every_option_lowers_for_cuda(tiles):
    assert "@mosaic_gpu" in lower(abstract_call(64, 64, mask=Mask(is_causal=True)), tiles)


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
    "field", [{"keys": 96}, {"keys": 320}, {"stages": 1}, {"consumers": 4}, {"cluster": 3}], ids=str
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
        ({"bias": abstract((1, 1, 64, 64), jnp.bfloat16)}, "bias"),
        ({"soft_cap": 30.0}, "logits_soft_cap"),
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
