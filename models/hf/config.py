"""config.json of a Hugging Face folder to `ModelConfig` and back, for the families listed here.

Strict: what the decoder cannot do is an error that names the key. Keys that change no logit of a
forward pass (dropout, token ids, initialisation) are not looked at.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from models.config import ModelConfig
from models.hf.rope import rope_from_hf, rope_to_hf

Family = Literal["llama", "qwen2", "qwen3", "mistral", "phi3"]


@dataclass(frozen=True, kw_only=True)
class FamilyTraits:
    """What a `model_type` fixes in code, and what its class assumes where a key is missing."""

    architecture: str
    max_positions: int
    norm_eps: float = 1e-6
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: D / N
    sliding_window: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    fused: bool = False  # qkv_proj and gate_up_proj hold several matrices
    window_by_layer: bool = False  # use_sliding_window, max_window_layers, layer_types


FAMILIES: dict[str, FamilyTraits] = {
    "llama": FamilyTraits(architecture="LlamaForCausalLM", max_positions=2048),
    "qwen2": FamilyTraits(
        architecture="Qwen2ForCausalLM",
        max_positions=32_768,
        num_kv_heads=32,
        sliding_window=4096,
        qkv_bias=True,
        window_by_layer=True,
    ),
    "qwen3": FamilyTraits(
        architecture="Qwen3ForCausalLM",
        max_positions=32_768,
        num_kv_heads=32,
        head_dim=128,
        sliding_window=4096,
        qk_norm=True,
        window_by_layer=True,
    ),
    "mistral": FamilyTraits(
        architecture="MistralForCausalLM",
        max_positions=131_072,
        num_kv_heads=8,
        sliding_window=4096,
    ),
    "phi3": FamilyTraits(
        architecture="Phi3ForCausalLM", max_positions=4096, norm_eps=1e-5, fused=True
    ),
}


def config_from_hf(raw: Mapping[str, Any], **overrides: Any) -> tuple[str, ModelConfig]:
    """Family and `ModelConfig` of a `config.json` of transformers 4 or 5.

    `max_seq_len` is `max_position_embeddings`, or the extended length where RoPE scaling by
    "dynamic" or "yarn" is written beside the trained one.

    Args:
        raw: the parsed file.
        overrides: fields of `ModelConfig` to set otherwise, say `compute_dtype`.

    Raises:
        ValueError: a key is missing, or says something that the decoder does not do.
    """
    family = _family(raw)
    traits = FAMILIES[family]
    _refuse(raw, family)
    num_heads, d_model = _required(raw, "num_attention_heads"), _required(raw, "hidden_size")
    head_dim = _value(raw, "head_dim", traits.head_dim) or d_model // num_heads
    if raw.get("head_dim") is None and traits.head_dim is None and d_model % num_heads:
        raise ValueError(
            f"hidden_size={d_model} is no multiple of num_attention_heads={num_heads}; the config "
            "must give head_dim."
        )
    max_positions = _value(raw, "max_position_embeddings", traits.max_positions)
    rope = rope_from_hf(raw, head_dim=head_dim, max_positions=max_positions)
    if rope.rotary_dim is not None and family != "phi3":
        raise ValueError(f"partial_rotary_factor is for family 'phi3', but this is {family!r}.")
    num_layers = _required(raw, "num_hidden_layers")
    values: dict[str, Any] = {
        "vocab_size": _required(raw, "vocab_size"),
        "num_layers": num_layers,
        "d_model": d_model,
        "num_heads": num_heads,
        "num_kv_heads": _kv_heads(raw, traits, num_heads),
        "head_dim": head_dim,
        "ffn_dim": _required(raw, "intermediate_size"),
        "max_seq_len": _max_seq_len(max_positions, rope.scaling),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "rotary_dim": rope.rotary_dim,
        "sliding_window": _windows(raw, family, num_layers),
        "tie_embeddings": _value(raw, "tie_word_embeddings", False),
        "qkv_bias": traits.qkv_bias,
        "qk_norm": traits.qk_norm,
        "norm_eps": _value(raw, "rms_norm_eps", traits.norm_eps),
    }
    return family, ModelConfig(**(values | overrides))


def config_to_hf(
    config: ModelConfig, *, family: str | None = None, dtype: str | None = None
) -> dict[str, Any]:
    """`config.json` of a model, in keys that transformers 4 and 5 both read.

    Args:
        config: the model.
        family: the `model_type`; None takes the plainest that can say this model.
        dtype: what `torch_dtype` says; None is `config.param_dtype`.

    Raises:
        ValueError: the family cannot say this model; the message names the field.
    """
    family = infer_family(config) if family is None else family
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {list(FAMILIES)}, got {family!r}.")
    traits = FAMILIES[family]
    _check_expressible(config, family)
    raw: dict[str, Any] = {
        "architectures": [traits.architecture],
        "model_type": family,
        "torch_dtype": config.param_dtype if dtype is None else dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        # The classes have token ids of their makers' tokenizers as defaults; none is ours to claim.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **rope_to_hf(config, family=family),
        **_window_keys(config, family),
    }
    if not traits.fused:
        raw["head_dim"] = config.head_dim
    return raw


def infer_family(config: ModelConfig) -> str:
    """The plainest family whose architecture a config is."""
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias:
        return "qwen2"
    if config.rotated_dims < config.head_dim:
        return "phi3"
    return "mistral" if any(config.windows) else "llama"


def _family(raw: Mapping[str, Any]) -> str:
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type must be one of {list(FAMILIES)}, got {family!r}.")
    wanted = FAMILIES[family].architecture
    if raw.get("architectures") and list(raw["architectures"]) != [wanted]:
        raise ValueError(
            f"architectures must be [{wanted!r}] for model_type {family!r}, got "
            f"{raw['architectures']!r}: only language models with a head can be read."
        )
    return family


def _refuse(raw: Mapping[str, Any], family: str) -> None:
    """Errors for what a config may ask for and the decoder does not do."""
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act must be 'silu' (SwiGLU), got {activation!r}.")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key) and not (
            key == "attention_bias" and family in ("mistral", "phi3", "qwen2")
        ):
            raise ValueError(f"{key}={raw[key]!r} is not supported by family {family!r} here.")
    if raw.get("quantization_config"):
        raise ValueError(
            "quantization_config is set: the tensors need scales to be read; export the model in "
            "bfloat16 first."
        )


def _required(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"the config must give {key} as an integer, got {value!r}.")
    return value


def _value(raw: Mapping[str, Any], key: str, default: Any) -> Any:
    return default if raw.get(key) is None else raw[key]


def _kv_heads(raw: Mapping[str, Any], traits: FamilyTraits, num_heads: int) -> int:
    if "num_key_value_heads" in raw:
        return _value(raw, "num_key_value_heads", num_heads)
    return traits.num_kv_heads or num_heads


def _max_seq_len(max_positions: int, scaling: Any) -> int:
    if scaling is None or scaling.type not in ("dynamic", "yarn"):
        return max_positions
    return max(max_positions, int(scaling.factor * scaling.original_max_seq_len))


def _windows(
    raw: Mapping[str, Any], family: str, num_layers: int
) -> int | tuple[int | None, ...] | None:
    traits = FAMILIES[family]
    if family == "llama":
        return None  # its class knows no window
    window = raw.get("sliding_window", traits.sliding_window)
    if traits.window_by_layer and not raw.get("use_sliding_window", False):
        window = None
    kinds = raw.get("layer_types") or _default_kinds(raw, traits, window, num_layers)
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != num_layers:
        raise ValueError(
            f"layer_types must name full_attention or sliding_attention for each of {num_layers} "
            f"layers, got {kinds!r}."
        )
    if "sliding_attention" in kinds and window is None:
        raise ValueError("layer_types has sliding_attention, but no sliding_window is in use.")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if traits.window_by_layer or not raw.get("layer_types"):
        return windows[0] if len(set(windows)) == 1 else windows
    raise ValueError(f"layer_types is not read by family {family!r}; leave it out.")


def _default_kinds(
    raw: Mapping[str, Any], traits: FamilyTraits, window: int | None, num_layers: int
) -> list[str]:
    first = raw.get("max_window_layers", 28) if traits.window_by_layer else 0
    slides = [window is not None and layer >= first for layer in range(num_layers)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _window_keys(config: ModelConfig, family: str) -> dict[str, Any]:
    windows = [window for window in config.windows if window is not None]
    window = windows[0] if windows else None
    if family in ("mistral", "phi3"):
        return {"sliding_window": window}
    if family == "llama":
        return {}
    kinds = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": kinds.index("sliding_attention") if windows else config.num_layers,
        "layer_types": kinds,
    }


def _check_expressible(config: ModelConfig, family: str) -> None:
    traits = FAMILIES[family]
    wrong: list[str] = []
    if config.qkv_bias != traits.qkv_bias:
        wrong.append(f"qkv_bias={config.qkv_bias}")
    if config.qk_norm != traits.qk_norm:
        wrong.append(f"qk_norm={config.qk_norm}")
    if config.rotated_dims < config.head_dim and family != "phi3":
        wrong.append(f"rotary_dim={config.rotary_dim}")
    sizes = set(config.windows)
    if family == "llama" and sizes != {None}:
        wrong.append(f"sliding_window={config.sliding_window}")
    if len(sizes - {None}) > 1 or (not traits.window_by_layer and len(sizes) > 1):
        wrong.append(f"sliding_window={config.sliding_window}")
    if traits.fused and config.head_dim * config.num_heads != config.d_model:
        wrong.append(f"head_dim={config.head_dim}, which is not d_model / num_heads")
    if wrong:
        raise ValueError(f"family {family!r} cannot say {wrong[0]}; choose another family.")
