"""The sharding table covers every parameter, and splits only what divides."""

import functools
from dataclasses import replace
from typing import Any

import jax
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from models import ModelConfig, init_params
from models.presets import PRESETS
from models.sharding import AXES, MeshConfig, check_batch, make_mesh, shardings, spec_for

MESH: Any = AbstractMesh((2, 4, 1, 2), AXES)


def names(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in leaves}


def shapes(config: ModelConfig):
    return jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_matrix_of_a_preset_is_split(preset):
    config = replace(PRESETS[preset](), qk_norm=True, tie_embeddings=False, qkv_bias=True)
    for name, leaf in names(shapes(config)).items():
        spec = spec_for(name, leaf.shape, MESH)
        used = [axis for axis in spec if axis]
        if "norm" in name or "bias" in name:
            assert not used
        elif preset != "smollm2-135m":  # its 9 and 3 heads are odd
            assert sorted(used) == ["fsdp", "tensor"], name
        for axis, size in zip(spec, leaf.shape, strict=False):
            assert axis is None or size % MESH.shape[axis] == 0


def test_heads_are_split_over_tensor_and_what_does_not_divide_stays_whole():
    name = "blocks/attention/query/kernel"
    assert spec_for(name, (3, 64, 8, 16), MESH) == P(None, "fsdp", "tensor", None)
    assert spec_for(name, (3, 64, 9, 16), MESH) == P(None, "fsdp", None, None)
    assert spec_for(name, (3, 62, 8, 16), MESH) == P(None, None, "tensor", None)


def test_moments_lie_where_their_parameters_lie():
    params = shapes(PRESETS["gpt2-124m"]())
    wanted = {k: spec_for(k, v.shape, MESH) for k, v in names(params).items()}
    for optimizer in (optax.adam(1.0), optax.contrib.muon(1.0)):
        state = jax.eval_shape(optimizer.init, params)
        seen = set()
        for name, leaf in names(state).items():
            owner = next((k for k in wanted if name.endswith(k)), None)
            assert spec_for(name, leaf.shape, MESH) == (wanted[owner] if owner else P())
            seen.add(owner)
        assert seen >= wanted.keys()


def test_unknown_parameters_and_old_tables_are_errors():
    with pytest.raises(ValueError, match=r"no line of .* covers"):
        spec_for("blocks/mlp/router/kernel", (2, 8, 8), MESH)
    with pytest.raises(ValueError, match="too few dimensions"):
        spec_for("blocks/mlp/up/kernel", (8, 8), MESH)


def test_one_device_is_a_mesh_too():
    mesh = make_mesh(MeshConfig())
    assert dict(mesh.shape) == dict.fromkeys(AXES, 1)
    placed = shardings({"embedding": {"table": jax.ShapeDtypeStruct((4, 4), "float32")}}, mesh)
    assert placed["embedding"]["table"].spec == P(None, None)


def test_what_does_not_fit_the_mesh_is_refused():
    with pytest.raises(ValueError, match="does not fill 1 devices"):
        make_mesh(MeshConfig(tensor=2))
    with pytest.raises(ValueError, match="mesh fsdp must be at least 1"):
        MeshConfig(fsdp=0)
    check_batch(8, 7, MESH)
    with pytest.raises(ValueError, match="data x fsdp = 8"):
        check_batch(4, 8, MESH)
    with pytest.raises(ValueError, match="seq_len 7 is no multiple"):
        check_batch(8, 7, AbstractMesh((1, 1, 2, 1), AXES))  # type: ignore[arg-type]
