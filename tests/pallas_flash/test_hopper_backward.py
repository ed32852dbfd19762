"""What of the Hopper backward can be checked without its GPU: lowering, budgets, work division."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import ABSTRACT_MASKS as MASKS
from problems import abstract

from pallas_flash import api, vjp
from pallas_flash.call import AttentionCall, Sizes
from pallas_flash.hopper import attention
from pallas_flash.hopper.backward import backward
from pallas_flash.hopper.backward_operands import small_operands
from pallas_flash.hopper.backward_problem import Problem, Unit
from pallas_flash.hopper.backward_tiles import (
    HALF,
    TUNED,
    BackwardTiles,
    default_backward_tiles,
)
from pallas_flash.hopper.tile_sizes import SMEM_LIMIT
from pallas_flash.hopper.turns import turn
from pallas_flash.mask import Mask

SEGMENTS = Mask(
    query_segment_ids=abstract((2, 328), jnp.int32),
    key_value_segment_ids=abstract((2, 200), jnp.int32),
)


def abstract_call(H, *, T=328, S=200, N=4, dtype: Any = jnp.bfloat16, **fields) -> AttentionCall:
    return AttentionCall(
        query=abstract((2, T, N, H), dtype),
        key=abstract((2, S, 2, H), dtype),
        value=abstract((2, S, 2, H), dtype),
        **{"static_scale": H**-0.5, **fields},
    )


def lower(call: AttentionCall, tiles: BackwardTiles) -> str:
    """StableHLO for CUDA of the backward of a call of abstract arrays."""
    B, T, N = call.sizes.B, call.sizes.T, call.sizes.N
    out, lse = call.query, abstract((B, N, T), jnp.float32)
    traced = jax.jit(lambda call, out, lse: backward(call, out, lse, out, lse, tiles)).trace(
        call, out, lse
    )
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("head_dim", "mask"), [*((128, mask) for mask in MASKS), (64, "lengths"), (256, "lengths")]
)
def test_every_tuned_configuration_lowers_for_cuda(head_dim, mask):
    text = lower(abstract_call(head_dim, mask=MASKS[mask]), default_backward_tiles(head_dim))
    assert text.count("@mosaic_gpu") == 1


@pytest.mark.parametrize(
    "feature",
    [
        {"soft_cap": 20.0},
        {"alibi_slopes": abstract((4,), jnp.float32), "sinks": abstract((4,), jnp.float32)},
        {
            "mask": Mask(
                is_causal=True,
                query_segment_ids=abstract((2, 328), jnp.int32),
                key_value_segment_ids=abstract((2, 200), jnp.int32),
            )
        },
    ],
    ids=["soft cap", "alibi and sinks", "segments"],
)
def test_every_feature_lowers_for_cuda(feature):
    call = abstract_call(128, **{"mask": Mask(is_causal=True), **feature})
    assert "@mosaic_gpu" in lower(call, default_backward_tiles(128))


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_segment_bounds_hold_every_visible_tile_and_call_full_only_full_ones(data):
    T, S = (data.draw(st.sampled_from([1, 200, 384])) for _ in "TS")  # few shapes to compile
    kinds = data.draw(st.sampled_from(["order", "disorder", "padding"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    q_ids, k_ids = (rng.integers(0, 4, (2, size)) for size in (T, S))
    if kinds != "disorder":
        q_ids, k_ids = np.sort(q_ids), np.sort(k_ids)
    if kinds == "padding":
        q_ids[:, T // 2 :], k_ids[:, S // 2 :] = -1, -1
    mask = Mask(
        is_causal=data.draw(st.booleans()),
        query_segment_ids=jnp.asarray(q_ids, jnp.int32),
        key_value_segment_ids=jnp.asarray(k_ids, jnp.int32),
    )
    q = jnp.zeros((2, T, 1, 64), jnp.bfloat16)
    k = jnp.zeros((2, S, 1, 64), jnp.bfloat16)
    call = AttentionCall(query=q, key=k, value=k, mask=mask, static_scale=1.0)
    tiles = BackwardTiles(queries=128)
    problem = Problem(call.sizes, jax.tree.map(lambda _: 0, mask), 1.0, tiles, q.dtype)
    bounds = np.asarray(small_operands(call, problem).bounds).reshape(2, -1, 4)
    seen = np.zeros((2, -(-T // 128) * 128, -(-S // 128) * 128), bool)
    i, j = np.arange(T)[:, None], np.arange(S)
    same = (q_ids[:, :, None] == k_ids[:, None]) & (q_ids >= 0)[:, :, None]
    seen[:, :T, :S] = same & ((i >= j) if mask.is_causal else True)
    by_tile = seen.reshape(2, seen.shape[1] // 128, 128, seen.shape[2] // 128, 128)
    some, every = by_tile.any((2, 4)), by_tile.all((2, 4))
    for row in range(2):
        for key_tile, (lo, full_lo, full_hi, hi) in enumerate(bounds[row]):
            assert lo <= full_lo <= full_hi <= hi
            assert not some[row, :lo, key_tile].any()
            assert not some[row, hi:, key_tile].any()
            assert every[row, full_lo:full_hi, key_tile].all()


def test_every_head_of_its_own_and_float16_lower():
    call = abstract_call(128, N=2, dtype=jnp.float16, mask=Mask(is_causal=True))
    assert "@mosaic_gpu" in lower(call, default_backward_tiles(128))


@pytest.mark.parametrize(
    ("head_dim", "option"),
    [
        (256, {"dquery_width": 128}),
        (128, {"heads_together": 2}),
    ],
    ids=str,
)
def test_every_option_lowers(head_dim, option):
    tiles = dataclasses.replace(default_backward_tiles(head_dim), **option)
    assert "@mosaic_gpu" in lower(abstract_call(head_dim, mask=Mask(is_causal=True)), tiles)


def total(*arrays):
    result: Any = vjp.attention(attention, api.build_call(*arrays, is_causal=True))
    return jnp.sum(result[0].astype(jnp.float32))


def summed_over_devices(*arrays):
    """What data parallelism does: a loss summed over the mesh, gradients of each shard."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    loss = jax.shard_map(
        lambda *arrays: jax.lax.psum(total(*arrays), "data"),
        mesh=mesh,
        in_specs=(spec,) * 3,
        out_specs=jax.sharding.PartitionSpec(),
    )
    return loss(*arrays)


TRANSFORMS = {
    "grad": (total, 0),
    "vmap": (lambda *arrays: jnp.sum(jax.vmap(total)(*arrays)), 1),
    "checkpoint": (jax.checkpoint(total), 0),
    "shard_map": (summed_over_devices, 0),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_gradients_under_a_transform_run_both_hopper_kernels(name, monkeypatch):
    monkeypatch.setattr(attention, "_device_property", {"core_count": 132}.get)
    function, mapped_axes = TRANSFORMS[name]
    shapes = ((2, 256, 4, 128), (2, 256, 2, 128), (2, 256, 2, 128))
    arrays = [abstract((3,) * mapped_axes + shape, jnp.bfloat16) for shape in shapes]
    gradients = jax.jit(jax.grad(function, argnums=(0, 1, 2)))
    text = gradients.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 2
    assert "pallas_flash_hopper_forward" in text
    assert "pallas_flash_hopper_backward" in text


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"value": abstract((2, 200, 2, 64), jnp.bfloat16)}, "head dims 128 and 64"),
        ({"deterministic": True, "mask": SEGMENTS}, "deterministic"),
        ({"bias": abstract((1, 4, 328, 200), jnp.float32)}, "bias"),
    ],
    ids=str,
)
def test_what_the_backward_leaves_to_triton_is_named(change, names, monkeypatch):
    monkeypatch.setattr(attention, "WITHHELD", False)
    call = abstract_call(128)
    assert attention.backward_unsupported(call) is None
    assert names in str(attention.backward_unsupported(dataclasses.replace(call, **change)))


def test_ordered_sums_wait_for_their_proof():
    call = abstract_call(128, deterministic=True)
    assert ("hardware" in str(attention.backward_unsupported(call))) == attention.WITHHELD


def test_the_gradient_of_alibi_slopes_is_left_to_triton():
    call = abstract_call(128, alibi_slopes=abstract((4,), jnp.float32))
    assert attention.backward_unsupported(call) is None
    wanted = frozenset({"alibi_slopes"})
    assert "alibi_slopes" in str(attention.backward_unsupported(call, wanted))


@pytest.mark.parametrize("head_dim", TUNED)
def test_ordered_sums_lower_for_cuda(head_dim):
    call = abstract_call(head_dim, deterministic=True, mask=Mask(is_causal=True))
    assert "@mosaic_gpu" in lower(call, default_backward_tiles(head_dim))


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_the_key_tiles_of_a_query_tile_take_turns(data):
    """Turns count 0, 1, 2, ... from the last key tile down: each waits for exactly those before.

    A key tile that is counted but never comes would be a GPU that hangs.
    """
    T, S = data.draw(st.integers(1, 900)), data.draw(st.integers(1, 900))
    window = st.none() | st.integers(0, 300)
    mask = Mask(
        is_causal=data.draw(st.booleans()),
        window=(data.draw(window), data.draw(window)),
        causal_alignment=data.draw(st.sampled_from(["top_left", "bottom_right"])),
    )
    q_length, kv_length = data.draw(st.integers(0, T)), data.draw(st.integers(0, S))
    tiles = TUNED[data.draw(st.sampled_from([*TUNED]))]
    shape = Sizes(B=1, T=T, S=S, N=1, K=1, H=128, Hv=128)
    problem = Problem(shape, mask, 1.0, tiles, jnp.bfloat16, deterministic=True)
    came: dict[int, list[int]] = {}
    for key_tile in reversed(range(problem.key_tiles)):
        first = key_tile * tiles.keys
        lengths = {"q_length": q_length, "kv_length": kv_length}
        seen = mask.q_bounds(first, tiles.keys, **lengths).in_tiles(tiles.queries)
        unit = Unit(0, 0, first, q_length, kv_length, *seen)
        for tile in range(int(seen.lo), int(seen.hi)):
            came.setdefault(tile, []).append(int(turn(problem, unit, tile)))
    for tile, turns in came.items():
        assert turns == [*range(len(turns))], tile


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("head_dim", TUNED)
def test_the_products_cover_dquery_once(head_dim, width):
    tiles = dataclasses.replace(TUNED[head_dim], dquery_width=width)
    pieces = [
        (row, column + start)
        for warpgroup in (0, 1)
        for row, column in tiles.dquery_products(head_dim, warpgroup)
        for start in range(0, tiles.width(head_dim), HALF)
    ]
    corners = itertools.product(range(0, tiles.queries, HALF), range(0, head_dim, HALF))
    assert sorted(pieces) == sorted(corners)


@pytest.mark.parametrize("head_dim", TUNED)
def test_tuned_tiles_fit(head_dim):
    assert TUNED[head_dim].shared_bytes(head_dim) <= SMEM_LIMIT


@pytest.mark.parametrize(
    ("tiles", "head_dim", "message"),
    [
        (BackwardTiles(queries=128), 128, rf"need \d+ bytes .* a CTA has {SMEM_LIMIT}"),
        (BackwardTiles(queries=64), 64, "cannot be divided"),
        (BackwardTiles(), 192, "cannot be divided"),
    ],
    ids=str,
)
def test_tiles_that_cannot_serve_raise_before_the_launch(tiles, head_dim, message):
    with pytest.raises(ValueError, match=message):
        lower(abstract_call(head_dim), tiles)


@pytest.mark.parametrize(
    "field", [{"queries": 96}, {"stages": 0}, {"heads_together": 0}, {"dquery_width": 32}], ids=str
)
def test_bad_tiles_name_the_field(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        BackwardTiles(**field)
