"""Reading GGUF, the format of llama.cpp: Llama architecture, weights dequantised to float32.

llama.cpp turns neighbouring dims of a head as a pair, (0, 1), (2, 3), ..., so its converter moved
the rows of the query and key weights: rows i and i + H/2 of each head became 2 i and 2 i + 1. Read
back unmoved, such a model writes sense for some twenty tokens and then none. Here they are moved
back.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

from models.config import PARAM_DTYPES, ModelConfig
from models.hf.fill import check_names, fill_params
from models.hf.folder import Checkpoint
from models.hf.names import EMBEDDING, HEAD, tensors
from models.rope_scaling import RopeScaling

QUANTISATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
_FREQUENCIES = "rope_freqs.weight"
_TOP = {
    EMBEDDING: "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    HEAD: "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_KNOWN_KEYS = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    "rope.scaling.finetuned",
}


def load_gguf(path: str | Path, *, param_dtype: str | None = None, **overrides: Any) -> Checkpoint:
    """A model from a GGUF file of the Llama architecture.

    A stored value is what its block says in float32 (scale · quant, + minimum for Q4_1).

    Args:
        path: the file; only one tensor at a time is dequantised.
        param_dtype: "float32" (also for None) or "bfloat16", rounded once from float32.
        overrides: other fields of `ModelConfig`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: another architecture or quantisation, a key that is not understood, tensors that
            are missing or that the model has no place for.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; give a GGUF file.")
    reader = GGUFReader(path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(reader, stored, param_dtype or "float32", overrides)
    named = tensors(config, "llama")
    ours_of = {_gguf_name(name): name for name in named}
    check_names(set(stored) - {_FREQUENCIES}, ours_of, where=str(path))
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def read(name: str) -> np.ndarray:
        values = _dequantised(stored[_gguf_name(name)])
        turned = heads.get(name.split(".")[-2])
        return values if turned is None else _half_split_rows(values, turned)

    return Checkpoint(config, fill_params(config, named, read), "llama", _raw(reader))


def read_fields(reader: GGUFReader, prefix: str) -> dict[str, Any]:
    """Values of the keys that begin with a prefix, less the prefix."""
    fields = reader.fields.items()
    return {k.removeprefix(prefix): f.contents() for k, f in fields if k.startswith(prefix)}


def _config(
    reader: GGUFReader,
    stored: Mapping[str, Any],
    param_dtype: str,
    overrides: Mapping[str, Any],
) -> ModelConfig:
    architecture = read_fields(reader, "general.").get("architecture")
    if architecture != "llama":
        raise ValueError(f"general.architecture must be 'llama', got {architecture!r}.")
    if param_dtype not in PARAM_DTYPES:
        raise ValueError(f"param_dtype must be one of {PARAM_DTYPES}, got {param_dtype!r}.")
    keys = read_fields(reader, "llama.")
    unknown = sorted(set(keys) - _KNOWN_KEYS)
    if unknown:
        raise ValueError(f"llama.{unknown[0]}={keys[unknown[0]]!r} is not understood.")
    num_heads, d_model = keys["attention.head_count"], keys["embedding_length"]
    head_dim = keys.get("attention.key_length", d_model // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.get(name, head_dim) != head_dim:
            raise ValueError(f"llama.{name}={keys[name]} must be the head dim, {head_dim}.")
    values: dict[str, Any] = {
        "vocab_size": int(stored["token_embd.weight"].shape[-1]),
        "num_layers": keys["block_count"],
        "d_model": d_model,
        "num_heads": num_heads,
        "num_kv_heads": keys.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "ffn_dim": keys["feed_forward_length"],
        "max_seq_len": keys["context_length"],
        "rope_theta": _shortest(keys.get("rope.freq_base", 10_000.0)),
        "rope_scaling": _scaling(keys, stored),
        "norm_eps": _shortest(keys["attention.layer_norm_rms_epsilon"]),
        "tie_embeddings": "output.weight" not in stored,
    }
    return replace(ModelConfig(**(values | dict(overrides))), param_dtype=param_dtype)


def _shortest(value: float) -> float:
    """The decimal that was meant by a number kept in float32: 1e-5, not 9.999999747e-06."""
    return float(str(np.float32(value)))


def _scaling(keys: Mapping[str, Any], stored: Mapping[str, Any]) -> RopeScaling | None:
    """RoPE scaling by the keys, or by a tensor of divisors (how Llama-3.1's is stored)."""
    kind = keys.get("rope.scaling.type", "none")
    if _FREQUENCIES in stored:
        divisors = tuple(_dequantised(stored[_FREQUENCIES]).tolist())
        return RopeScaling(
            type="longrope",
            original_max_seq_len=keys["context_length"],
            attention_factor=1.0,
            short_factor=divisors,
            long_factor=divisors,
        )
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"llama.rope.scaling.type must be none, linear or yarn, got {kind!r}.")
    factor = _shortest(keys["rope.scaling.factor"])
    if kind == "linear":
        return RopeScaling(type="linear", factor=factor)
    length = keys["rope.scaling.original_context_length"]
    return RopeScaling(type="yarn", factor=factor, original_max_seq_len=length)


def _gguf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, _, layer, middle = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_LAYER[middle]}.weight"


def _dequantised(tensor: Any) -> np.ndarray:
    kind = tensor.tensor_type.name
    if kind not in QUANTISATIONS:
        raise ValueError(f"{tensor.name} is stored as {kind}; known are {QUANTISATIONS}.")
    shape = tuple(int(n) for n in reversed(tensor.shape))  # GGUF names the fastest axis first
    return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)


def _half_split_rows(x: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows (2 i, 2 i + 1) of each head back to (i, i + H/2)."""
    pairs = x.reshape(num_heads, -1, 2, x.shape[-1])
    return pairs.swapaxes(1, 2).reshape(x.shape)


def _raw(reader: GGUFReader) -> dict[str, Any]:
    """What config.json would say besides the architecture."""
    keys = read_fields(reader, "tokenizer.ggml.")
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    ids = {ours: keys.get(f"{theirs}_token_id") for theirs, ours in names.items()}
    return {
        "model_type": "llama",
        **{key: value for key, value in ids.items() if value is not None},
    }
