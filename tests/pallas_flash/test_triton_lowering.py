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
from jax.sharding import PartitionSpec as P
from problems import ABSTRACT_MASKS as MASKS
from problems import abstract

from pallas_flash import block_mask, vjp
from pallas_flash.call import AttentionCall, Gradients
from pallas_flash.mask import Mask
from pallas_flash.mods import INDICES, Mod
from pallas_flash.triton.attention import Kernels
from pallas_flash.varying import vary_like

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
        **{"static_scale": scale, **fields},
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


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_shared_bias_adds_its_gradient_in_place(modules, deterministic):
    """No (B, N, T, S) array, unless the order of the sums has to be fixed."""
    call = abstract_call(
        bias=abstract((1, 4, 1000, 1024), jnp.float32), deterministic=deterministic
    )
    text = lower(call, cotangents=("query", "key", "value", "bias"))
    assert_three_kernels(text, modules)
    assert ("tensor<2x4x1000x1024xf32>" in text) == deterministic
    assert any("tt.atomic_rmw fadd" in module for module in modules) != deterministic


@pytest.mark.parametrize("heads", [1, 4])
def test_dense_mask_and_bias_with_gradient(modules, heads):
    dense = abstract((2, heads, 1, 1024), jnp.bool_)
    bias = abstract((1, heads, 1000, 1024), jnp.bfloat16)
    call = abstract_call(mask=Mask(is_causal=True, dense=dense), bias=bias)
    text = lower(call, cotangents=("query", "key", "value", "bias"))
    assert_three_kernels(text, modules)


INT32 = jnp.int32
TABLE = jnp.linspace(-1.0, 1.0, 44).reshape(4, 11)
IDS = {
    "query_segment_ids": abstract((2, 1000), INT32),
    "key_value_segment_ids": abstract((2, 1024), INT32),
}
PER_HEAD = abstract((4,), jnp.float32)


def by_distance(score, b, n, i, j):
    """Reads one captured array by element, one as a scalar, and has a branch and a jitted part."""
    near = jax.lax.cond(i - j < 5, lambda: 1.0, lambda: 0.5)
    return jax.nn.silu(score) + TABLE[n, jnp.clip(i - j + 5, 0, 10)] * TABLE[0, 3] * near


def documents(b, n, i, j):
    return (i // 128 == j // 128) | (TABLE[n, j % 11] > 0)


FEATURES = {
    "segments": {"mask": Mask(is_causal=True, **IDS)},
    "segments and lengths": {
        "mask": Mask(**IDS, query_lengths=MASKS["lengths"].query_lengths,
                     key_value_lengths=MASKS["lengths"].key_value_lengths),
    },
    "positions": {
        "mask": Mask(window=(100, 0), query_positions=abstract((2, 1000), INT32)),
        "alibi_slopes": PER_HEAD,
    },
    "soft cap": {"soft_cap": 30.0, "mask": MASKS["causal"]},
    "sinks": {"sinks": PER_HEAD, "mask": MASKS["window"]},
    "alibi": {"alibi_slopes": PER_HEAD, "mask": MASKS["causal window, bottom right"]},
    "traced scale": {"static_scale": None, "traced_scale": abstract((), jnp.float32)},
    "dropout": {"dropout_rate": 0.1, "dropout_seed": abstract((2,), jnp.uint32)},
    "score_mod": {"score_mod": Mod.trace("score_mod", by_distance, jnp.float32, *INDICES)},
    "mask_mod": {"mask": Mask(mask_mod=Mod.trace("mask_mod", documents, *INDICES))},
    "block mask": {"mask": Mask(
        mask_mod=Mod.trace("mask_mod", lambda b, n, i, j: i // 128 == j // 128, *INDICES),
        blocks=block_mask(lambda b, n, i, j: i // 128 == j // 128, T=1000, S=1024))},
}  # fmt: skip
FEATURES["everything"] = {
    **FEATURES["dropout"], **FEATURES["score_mod"], **FEATURES["traced scale"], "soft_cap": 30.0,
    "sinks": PER_HEAD, "alibi_slopes": PER_HEAD, "bias": abstract((2, 1, 1, 1024), jnp.bfloat16),
    "mask": Mask(
        is_causal=True, **IDS, mask_mod=FEATURES["mask_mod"]["mask"].mask_mod,
        dense=abstract((1, 4, 1000, 1024), jnp.bool_),
        key_value_positions=abstract((2, 1024), INT32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_every_argument_lowers_with_its_gradient(modules, feature):
    call = abstract_call(**FEATURES[feature])
    wanted = [name for name in Gradients._fields if getattr(call, name) is not None]
    assert_three_kernels(lower(call, cotangents=wanted), modules)


def test_shard_map_with_varying_axes_checked(modules):
    """As on a GPU: the interpreter has no such checks."""

    def loss(*arrays):
        call = AttentionCall(
            **dict(zip(("query", "key", "value", "bias"), arrays, strict=True)), static_scale=0.125
        )
        return jnp.sum(vjp.attention(Kernels(), vary_like(call, call))[0])

    device = jax.sharding.AbstractDevice(device_kind=GPUS["H100"], num_cores=None, platform="gpu")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((2,), ("x",), auto, abstract_device=device)
    sharded = jax.shard_map(
        jax.grad(loss, (0, 1, 2, 3)), mesh=mesh,
        in_specs=(P("x"), P("x"), P("x"), P()), out_specs=(P("x"), P("x"), P("x"), P()),
    )  # fmt: skip
    array = abstract((2, 256, 4, 64), jnp.bfloat16)
    arrays = (array, array, array, abstract((1, 4, 256, 256), jnp.bfloat16))
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(sharded).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert_three_kernels(text, modules)


@pytest.mark.parametrize(
    "sizes", [{"H": H} for H in (8, 80, 96, 112, 160)] + [{"H": 192, "Hv": 128}]
)
def test_other_head_dims(modules, sizes):
    assert_three_kernels(lower(abstract_call(**sizes, T=300, S=256)), modules)


def test_64_bit_mode_stays_out_of_the_kernels(modules):
    with jax.enable_x64(True):
        assert_three_kernels(lower(abstract_call(mask=MASKS["lengths"])), modules)


def test_float32_products_are_not_rounded_to_tf32(modules):
    lower(abstract_call(dtype=jnp.float32))
    dots = [line for module in modules for line in module.splitlines() if "tt.dot " in line]
    assert dots
    assert not any("tf32" in line.split("inputPrecision")[-1] for line in dots)


@pytest.mark.parametrize("shape", [(3, 16, 70_000, 16), (70_000, 16, 1, 16)], ids=str)
def test_more_heads_or_rows_than_a_grid_axis_takes(modules, shape):
    """CUDA's second and third grid axes end at 65,535: the launch must fold longer ones."""
    array = abstract(shape, jnp.bfloat16)
    call = AttentionCall(query=array, key=array, value=array, static_scale=0.25)
    text = lower(call)
    assert_three_kernels(text, modules)
    for axis in "yz":
        sizes = [int(size) for size in re.findall(rf"grid_{axis} = (\d+)", text)]
        assert len(sizes) == 3
        assert max(sizes) <= 65_535
