"""ModelConfig: what it refuses, and that its counts are those of the real parameter tree."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import ModelConfig, init_params
from models.presets import gpt2_124m, llama3_2_1b, smollm2_135m

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
    groups = config.param_groups()
    assert groups["embedding"] == _size(params["embedding"])
    assert groups["head"] == _size(params.get("head", {}))
    assert groups["attention"] == _size(projections)
    assert groups["mlp"] == _size(blocks["mlp"])
    assert sum(groups.values()) == _size(params)


@pytest.mark.parametrize(
    ("make", "published"),
    [(smollm2_135m, 134_515_008), (llama3_2_1b, 1_235_814_400)],
)
def test_param_count_is_the_published_one(make, published: int):
    assert make().param_count() == published


def test_gpt2_124m_is_as_large_as_its_name():
    assert round(gpt2_124m().param_count() / 1e6) == 124


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
        ({"attention_implementation": "flash"}, ValueError, "attention_implementation must be one"),
    ],
)
def test_bad_field_is_named(change, error, message):
    with pytest.raises(error, match=message):
        ModelConfig(**(VALID | change))


def test_config_is_plain_data():
    config = ModelConfig(**VALID)
    assert ModelConfig(**dataclasses.asdict(config)) == config
    assert hash(dataclasses.replace(config)) == hash(config)
