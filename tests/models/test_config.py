"""ModelConfig: what it refuses, and that its counts are those of the real parameter tree."""

import dataclasses
import json
import math
from functools import partial
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import ModelConfig, init_params
from models.rope_scaling import RopeScaling

VALID: dict[str, Any] = {
    "vocab_size": 32,
    "num_layers": 2,
    "d_model": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_dim": 24,
    "max_seq_len": 12,
}


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    num_kv_heads = draw(st.integers(1, 3))
    return ModelConfig(
        vocab_size=draw(st.integers(1, 50)),
        num_layers=draw(st.integers(1, 4)),
        d_model=draw(st.integers(1, 24)),
        num_heads=num_kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=num_kv_heads,
        head_dim=2 * draw(st.integers(1, 8)),
        ffn_dim=draw(st.integers(1, 40)),
        max_seq_len=8,
        tie_embeddings=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
    )


def _size(tree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@settings(max_examples=15, deadline=None)
@given(configs())
def test_param_count_is_the_size_of_the_tree(config: ModelConfig):
    params = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    assert config.param_count() == _size(params)
    vocabulary = _size(params["embedding"]) + _size(params.get("head", {}))
    assert config.param_count(embeddings=False) == _size(params) - vocabulary

    blocks = params["blocks"]
    projections = [blocks["attention"][name] for name in ("query", "key", "value", "output")]
    biases = [projection.pop("bias") for projection in projections if "bias" in projection]
    assert len(biases) == 3 * config.qkv_bias
    groups = config.param_groups()
    assert groups["bias"] == _size(biases)
    assert groups["embedding"] == _size(params["embedding"])
    assert groups["head"] == _size(params.get("head", {}))
    assert groups["attention"] == _size(projections)
    assert groups["mlp"] == _size(blocks["mlp"])
    assert sum(groups.values()) == config.param_count()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"vocab_size": 0}, ValueError, "vocab_size must be at least 1, got 0"),
        ({"d_model": 16.0}, TypeError, "d_model must be an int"),
        ({"num_layers": True}, TypeError, "num_layers must be an int"),
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads=3 does not divide num_heads=4"),
        ({"head_dim": 7}, ValueError, "head_dim=7 is odd.*use 8"),
        ({"rope_theta": 1.0}, ValueError, "rope_theta must be finite and above 1"),
        ({"rope_theta": "1e4"}, TypeError, "rope_theta must be a number"),
        ({"norm_eps": 0.0}, ValueError, "norm_eps must be finite and above 0"),
        ({"norm_eps": math.nan}, ValueError, "norm_eps must be finite"),
        ({"z_loss": -1e-4}, ValueError, "z_loss must be finite and at least 0"),
        ({"compute_dtype": "bf16"}, ValueError, "compute_dtype must be one of 'float32', 'bfl"),
        ({"param_dtype": "float16"}, ValueError, "param_dtype must be one of"),
        ({"remat": "blocks"}, ValueError, "remat must be one of 'none', 'full', 'attention'"),
        ({"remat": ["full"]}, ValueError, "remat must be one of"),
        ({"tie_embeddings": 1}, TypeError, "tie_embeddings must be True or False"),
        ({"qkv_bias": None}, TypeError, "qkv_bias must be True or False"),
        ({"rotary_dim": 5}, ValueError, "rotary_dim=5 must be even and at most head_dim=8"),
        ({"rotary_dim": 10}, ValueError, "rotary_dim=10 must be even"),
        ({"sliding_window": 0}, ValueError, "sliding_window must be at least 1, got 0"),
        ({"sliding_window": (4,)}, ValueError, "sliding_window has 1 entries for num_layers=2"),
        ({"sliding_window": (None, 2.5)}, TypeError, "sliding_window must be an int"),
        ({"rope_scaling": 8.0}, TypeError, "rope_scaling must be a RopeScaling or None"),
        ({"rope_scaling": {"type": "linear"}}, ValueError, "rope type 'linear' needs factor"),
        (
            {"rope_scaling": RopeScaling(type="ntk", factor=2.0), "rotary_dim": 2},
            ValueError,
            "needs R of at least 4",
        ),
        ({"attention_implementation": "flash"}, ValueError, "attention_implementation must be one"),
    ],
)
def test_bad_field_is_named(change, error, message):
    with pytest.raises(error, match=message):
        ModelConfig(**(VALID | change))


def test_config_is_plain_data():
    scaling = RopeScaling(
        type="longrope", original_max_seq_len=8, short_factor=(1.0,) * 4, long_factor=(2.0,) * 4
    )
    for changes in ({}, {"rope_scaling": scaling, "sliding_window": (None, 4)}):
        config = ModelConfig(**(VALID | changes))
        assert ModelConfig(**dataclasses.asdict(config)) == config
        from_json = json.loads(json.dumps(dataclasses.asdict(config)))
        assert ModelConfig(**from_json) == config
        assert hash(ModelConfig(**from_json)) == hash(config)
