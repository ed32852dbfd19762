"""The Triton kernels lower for CUDA on a machine without a GPU: every op they use is supported.

An abstract device stands in for the GPU, and each kernel must arrive in the module as one Triton
custom call: nothing falls back to the interpreter.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.triton import lowering as triton_lowering
from problems import ABSTRACT_MASKS as MASKS
from problems import abstract

from pallas_flash import vjp
from pallas_flash.call import AttentionCall
from pallas_flash.mask import Mask
from pallas_flash.triton.attention import Kernels

GPUS = {"A100": "NVIDIA A100", "H100": "NVIDIA H100", "L4": "NVIDIA L4"}


@pytest.fixture
def modules(monkeypatch):
    """Texts of the Triton modules that are lowered during a test, in order."""
    texts = []
    original = triton_lowering.lower_jaxpr_to_triton_module

    def record(*args, **kwargs):
        result = original(*args, **kwargs)
        texts.append(result.module.operation.get_asm())
        return result

    monkeypatch.setattr(triton_lowering, "lower_jaxpr_to_triton_module", record)
    return texts


def lower(call, *, gpu="H100", cotangents=("query", "key", "value")):
    """StableHLO for CUDA of the forward and backward of a call of abstract arrays."""

    def both(call, dout, dlse):
        def attend(arrays):
            return vjp.attention(Kernels(), dataclasses.replace(call, **arrays))

        arrays = {name: getattr(call, name) for name in cotangents}
        results, backward = jax.vjp(attend, arrays)
        return results, backward((dout, dlse))

    device = jax.sharding.AbstractDevice(device_kind=GPUS[gpu], num_cores=None, platform="gpu")
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), explicit, abstract_device=device)
    sizes = call.sizes
    dout = abstract((sizes.B, sizes.T, sizes.N, sizes.Hv), call.query.dtype)
    dlse = abstract((sizes.B, sizes.N, sizes.T), jnp.float32)
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(both).trace(call, dout, dlse).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


def abstract_call(
    *, T=1000, S=1024, N=4, K=2, H=64, Hv=None, dtype=jnp.bfloat16, scale=0.125, **fields
):
    array = functools.partial(abstract, dtype=dtype)
    return AttentionCall(
        query=array((2, T, N, H)),
        key=array((2, S, K, H)),
        value=array((2, S, K, Hv or H)),
        static_scale=scale,
        **fields,
    )


def assert_three_kernels(text, modules):
    assert text.count("__gpu$xla.gpu.triton") == 3
    names = ["flash_forward", "flash_dq", "flash_dkv"]
    assert [name for module in modules for name in names if f"@{name}" in module] == names
    for module in modules:
        # 64-bit blocks have no business here: they cost registers and speed. (In 64-bit mode
        # JAX writes some scalar constants in 64 bits, which are folded away.)
        assert "xi64>" not in module
        assert "xf64>" not in module


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda d: d.__name__
)
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_head_dims_and_dtypes(modules, head_dim, dtype):
    call = abstract_call(H=head_dim, dtype=dtype, mask=MASKS["causal"])
    assert_three_kernels(lower(call), modules)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("T", [1000, 1024], ids=["ragged", "whole"])
def test_masks(modules, mask, T):
    assert_three_kernels(lower(abstract_call(T=T, mask=MASKS[mask])), modules)


@pytest.mark.parametrize("gpu", GPUS)
def test_gpus_and_multi_query(modules, gpu):
    assert_three_kernels(lower(abstract_call(H=256, N=8, K=1), gpu=gpu), modules)


def test_value_head_dim_of_its_own(modules):
    assert_three_kernels(lower(abstract_call(H=64, Hv=128)), modules)


@pytest.mark.parametrize("heads", [1, 4])
def test_dense_mask_and_bias_with_gradient(modules, heads):
    dense = abstract((2, heads, 1, 1024), jnp.bool_)
    bias = abstract((1, heads, 1000, 1024), jnp.bfloat16)
    call = abstract_call(mask=Mask(is_causal=True, dense=dense), bias=bias)
    text = lower(call, cotangents=("query", "key", "value", "bias"))
    assert_three_kernels(text, modules)


def test_64_bit_mode_stays_out_of_the_kernels(modules):
    with jax.enable_x64(True):
        assert_three_kernels(lower(abstract_call(mask=MASKS["lengths"])), modules)


def test_float32_products_are_not_rounded_to_tf32(modules):
    lower(abstract_call(dtype=jnp.float32))
    dots = [line for module in modules for line in module.splitlines() if "tt.dot " in line]
    assert dots
    assert not any("tf32" in line.split("inputPrecision")[-1] for line in dots)


def test_more_heads_than_a_grid_axis_takes(modules):
    """CUDA's second and third grid axes end at 65,535: the launch must fold longer ones."""
    array = abstract((3, 16, 70_000, 16), jnp.bfloat16)
    call = AttentionCall(query=array, key=array, value=array, static_scale=0.25)
    text = lower(call)
    assert_three_kernels(text, modules)
    for axis in "yz":
        sizes = [int(size) for size in re.findall(rf"grid_{axis} = (\d+)", text)]
        assert len(sizes) == 3
        assert max(sizes) <= 65_535
