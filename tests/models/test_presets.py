"""The presets' table, its numbers, and the examples in docstrings."""

import dataclasses
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from models.cost import (
    forward_flops_by_part,
    forward_flops_per_token,
    kv_bytes_per_token,
    serving_bytes,
    training_state_bytes,
)
from models.hf.config import config_from_hf, config_to_hf
from models.presets import PRESETS, gpt2_124m, llama3_2_1b, mistral_7b, smollm2_135m, table
from models.recipes import RECIPES

# What the makers' files hold, in parameters (a tied matrix once).
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "llama3.2-1b": 1_235_814_400,
    "phi3-mini": 3_821_079_552,
    "llama2-7b": 6_738_415_616,
    "mistral-7b": 7_241_732_096,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen2.5-72b": 72_706_203_648,
    "llama3.1-405b": 405_853_388_800,
}

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PRESETS)
def test_param_count_is_the_published_one(name: str):
    if name == "gpt2-124m":  # no one published this block; it is as large as its name says
        assert round(gpt2_124m().param_count() / 1e6) == 124
    else:
        assert PRESETS[name]().param_count() == PUBLISHED[name]


def test_recipes_are_of_presets_and_name_their_source():
    assert set(RECIPES) == set(PRESETS)
    assert all(recipe.source for recipe in RECIPES.values())
    llama2 = RECIPES["llama2-7b"]
    assert (llama2.tokens, llama2.peak_lr, llama2.context) == (2e12, 3e-4, 4096)


def test_table_has_one_row_a_preset_with_its_counts():
    header, *rows = table().splitlines()
    assert len(rows) == len(PRESETS)
    assert len({len(line) for line in (header, *rows)}) == 1, "columns are aligned"
    for row, (name, make) in zip(rows, PRESETS.items(), strict=True):
        assert row.startswith(name)
        assert f"{make().param_count():,}" in row
        assert f"{kv_bytes_per_token(make()):,}" in row


def test_command_prints_the_table():
    command = [sys.executable, "-m", "models.presets"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert table() in done.stdout
    assert "causal attention as half" in done.stdout


def test_kv_bytes_are_those_of_the_shape():
    assert kv_bytes_per_token(llama3_2_1b()) == 2 * 16 * 8 * 64 * 2
    assert kv_bytes_per_token(smollm2_135m(), "float32") == 2 * 30 * 3 * 64 * 4
    with pytest.raises(ValueError, match=r"dtype must be one of .*got 'int3'"):
        kv_bytes_per_token(llama3_2_1b(), "int3")


def test_memory_to_train_and_to_serve():
    config = smollm2_135m()
    assert training_state_bytes(config) == 16 * 134_515_008
    assert serving_bytes(config, 1000) == 2 * 134_515_008 + 1000 * 2 * 30 * 3 * 64 * 2
    with pytest.raises(ValueError, match="tokens must be at least 0, got -1"):
        serving_bytes(config, -1)


def test_flops_of_a_window_are_those_of_the_pairs_in_it():
    """Half the counted keys is the mean number that a query sees, less the half of itself."""
    config = dataclasses.replace(mistral_7b(), sliding_window=300, num_layers=1)
    seq_len = 1000
    seen = sum(min(t + 1, 300) for t in range(seq_len)) / seq_len
    counted = forward_flops_by_part(config, seq_len)["attention"] / (4 * 32 * 128) / 2
    assert counted == pytest.approx(seen, abs=0.5)
    whole = dataclasses.replace(config, sliding_window=None)
    assert forward_flops_by_part(whole, 300) == forward_flops_by_part(config, 300)


def test_only_the_causal_half_of_attention_grows_with_length():
    config = smollm2_135m()
    short, long = (forward_flops_per_token(config, seq_len) for seq_len in (1000, 3000))
    assert long - short == 2 * 30 * 9 * 64 * 2000
    assert forward_flops_by_part(config, 1)["head"] == 2 * 576 * 49_152
    with pytest.raises(ValueError, match="seq_len must be at least 1, got 0"):
        forward_flops_by_part(config, 0)


@pytest.mark.parametrize(
    "module", ["models", "models.rope", "models.rope_scaling", "models.decoder"]
)
def test_docstring_examples(module: str):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0


# The keys of the makers' own config.json that decide the architecture.
PUBLISHED_CONFIGS = {
    "llama3.2-1b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131_072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128_256,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32_768,
        "max_window_layers": 24,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "sliding_window": 32_768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151_936,
    },
    "mistral-7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "max_position_embeddings": 32_768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32_000,
    },
    "phi3-mini": {
        "model_type": "phi3",
        "attention_bias": False,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10_000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "vocab_size": 32_064,
    },
}


@pytest.mark.parametrize("name", PUBLISHED_CONFIGS)
def test_preset_is_what_the_published_config_says(name: str):
    raw = PUBLISHED_CONFIGS[name]
    assert config_from_hf(raw) == (raw["model_type"], PRESETS[name]())


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_written_for_transformers(name: str):
    config = PRESETS[name]()
    assert config_from_hf(config_to_hf(config))[1] == config
