"""What of the Hopper backward can be checked without its GPU: lowering, budgets, work division."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from problems import ABSTRACT_MASKS as MASKS
from problems import abstract

from pallas_flash import vjp
from pallas_flash.call import AttentionCall
from pallas_flash.hopper import attention
from pallas_flash.hopper.backward import backward
from pallas_flash.hopper.backward_tiles import (
    HALF,
    TUNED,
    BackwardTiles,
    default_backward_tiles,
)
from pallas_flash.hopper.tile_sizes import SMEM_LIMIT
from pallas_flash.mask import Mask


def abstract_call(H, *, T=328, S=200, N=4, dtype: Any = jnp.bfloat16, **fields) -> AttentionCall:
    return AttentionCall(
        query=abstract((2, T, N, H), dtype),
        key=abstract((2, S, 2, H), dtype),
        value=abstract((2, S, 2, H), dtype),
        **{"static_scale": H**-0.5, **fields},
    )


def lower(call: AttentionCall, tiles: BackwardTiles) -> str:
    """StableHLO for CUDA of the backward of a call of abstract arrays."""
    B, T, _, N, _, _, _ = call.sizes
    out, lse = call.query, abstract((B, N, T), jnp.float32)
    traced = jax.jit(lambda *args: backward(*args, tiles)).trace(call, out, lse, out, lse)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", TUNED)
def test_every_tuned_configuration_lowers_for_cuda(head_dim, mask):
    text = lower(abstract_call(head_dim, mask=MASKS[mask]), default_backward_tiles(head_dim))
    assert text.count("@mosaic_gpu") == 1


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


def test_gradients_of_a_call_run_both_hopper_kernels(monkeypatch):
    monkeypatch.setattr(attention, "_device_property", {"core_count": 132}.get)
    call = abstract_call(128, mask=Mask(is_causal=True))

    def gradients(call):
        return jax.grad(lambda call: jnp.sum(vjp.attention(attention, call)[0]))(call)

    text = jax.jit(gradients).trace(call).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 2
    assert "pallas_flash_hopper_forward" in text
    assert "pallas_flash_hopper_backward" in text


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"value": abstract((2, 200, 2, 64), jnp.bfloat16)}, "head dims 128 and 64"),
        ({"deterministic": True}, "deterministic"),
    ],
    ids=str,
)
def test_what_the_backward_leaves_to_triton_is_named(change, names):
    call = abstract_call(128)
    assert attention.backward_unsupported(call) is None
    assert names in str(attention.backward_unsupported(dataclasses.replace(call, **change)))


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
