"""GGUF: a tiny file written by the gguf package, read back as the model that it was made of."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants

from models.config import ModelConfig
from models.hf import load, load_gguf, save_folder
from models.hf.fill import get_leaf
from models.hf.gguf_file import _gguf_name
from models.hf.gguf_tokenizer import load_gguf_tokenizer
from models.hf.names import tensors
from models.rope_scaling import scaled_frequencies

L, D, N, K, H, F, V = 2, 64, 4, 2, 16, 32, 40
CONFIG = ModelConfig(
    vocab_size=V,
    num_layers=L,
    d_model=D,
    num_heads=N,
    num_kv_heads=K,
    head_dim=H,
    ffn_dim=F,
    max_seq_len=48,
    rope_theta=500.0,
    compute_dtype="float32",
)
KEYS: dict[str, Any] = {
    "block_count": L,
    "context_length": 48,
    "embedding_length": D,
    "feed_forward_length": F,
    "attention.head_count": N,
    "attention.head_count_kv": K,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500.0,
    "rope.dimension_count": H,
}
TYPES = {name: GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_1")}


def hf_weights() -> dict[str, np.ndarray]:
    """The weights of `CONFIG` by Hugging Face name, in the layout of torch."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}
    shapes |= {"model.norm.weight": (D,)}
    for layer in range(L):
        room = f"model.layers.{layer}"
        shapes |= {
            f"{room}.input_layernorm.weight": (D,),
            f"{room}.post_attention_layernorm.weight": (D,),
            f"{room}.self_attn.q_proj.weight": (N * H, D),
            f"{room}.self_attn.k_proj.weight": (K * H, D),
            f"{room}.self_attn.v_proj.weight": (K * H, D),
            f"{room}.self_attn.o_proj.weight": (D, N * H),
            f"{room}.mlp.gate_proj.weight": (F, D),
            f"{room}.mlp.up_proj.weight": (F, D),
            f"{room}.mlp.down_proj.weight": (D, F),
        }
    return {
        name: (rng.normal(size=shape) * shape[-1] ** -0.5 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


def interleaved(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp wants them, one by one: row i of a head, and i + H/2, side by side."""
    out = np.empty_like(x)
    for head in range(heads):
        for i in range(H // 2):
            out[head * H + 2 * i] = x[head * H + i]
            out[head * H + 2 * i + 1] = x[head * H + i + H // 2]
    return out


def write_gguf(path: Path, *, kind: str = "F32", drop: str = "", **keys: Any) -> dict:
    """A GGUF file; returns the weights that it holds, rounded as it holds them."""
    writer = GGUFWriter(path, keys.pop("architecture", "llama"))
    for key, value in (KEYS | keys.pop("extra", {})).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"llama.{key}", value)
    held = {}
    for name, weight in hf_weights().items():
        if name == drop:
            continue
        quantised = kind if weight.ndim == 2 else "F32"  # as llama.cpp does
        data = quants.quantize(weight, TYPES[quantised])
        held[name] = quants.dequantize(data, TYPES[quantised]).reshape(weight.shape)
        heads = {"q_proj": N, "k_proj": K}.get(name.split(".")[-2])
        stored = weight if heads is None else interleaved(weight, heads)
        data = quants.quantize(stored, TYPES[quantised])
        writer.add_tensor(_gguf_name(name), data, raw_dtype=TYPES[quantised])
    for name, data in keys.pop("tensors", {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


@pytest.mark.parametrize("kind", TYPES)
def test_weights_are_those_that_were_written(tmp_path: Path, kind: str):
    """Each quantised row is its own blocks, so moving rows changes no value."""
    held = write_gguf(tmp_path / "m.gguf", kind=kind)
    loaded = load(tmp_path / "m.gguf", compute_dtype="float32")
    assert loaded.config == CONFIG
    named = tensors(CONFIG, "llama")
    assert named.keys() == held.keys()
    for name, (part,) in named.items():
        leaf = get_leaf(loaded.params, part.path)
        got = np.asarray(leaf if part.layer is None else leaf[part.layer])
        np.testing.assert_array_equal(part.to_stored(got), held[name], err_msg=name)


def test_a_folder_keeps_the_model(tmp_path: Path):
    write_gguf(tmp_path / "m.gguf", kind="Q8_0")
    loaded = load_gguf(tmp_path / "m.gguf", compute_dtype="float32")
    save_folder(tmp_path / "out", loaded.config, loaded.params)
    again = load(tmp_path / "out", compute_dtype="float32")
    assert again.config == loaded.config
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)


def test_bfloat16_is_rounded_from_float32(tmp_path: Path):
    held = write_gguf(tmp_path / "m.gguf")
    params = load_gguf(tmp_path / "m.gguf", param_dtype="bfloat16").params
    want = held["model.embed_tokens.weight"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(params["embedding"]["table"], want)


def test_tied_head_and_rope_divisors(tmp_path: Path):
    divisors = np.linspace(1, 8, H // 2, dtype=np.float32)
    tensor = {"rope_freqs.weight": divisors}
    write_gguf(tmp_path / "m.gguf", drop="lm_head.weight", tensors=tensor)
    config, params, *_ = load_gguf(tmp_path / "m.gguf")
    assert config.tie_embeddings
    assert "head" not in params
    for seq_len in (1, 4800):
        got = scaled_frequencies(H, 500.0, config.rope_scaling, seq_len=seq_len)
        base = scaled_frequencies(H, 500.0, None, seq_len=1)
        np.testing.assert_allclose(got, base / divisors, rtol=1e-7)
    assert config.rope_scaling is not None
    assert config.rope_scaling.cos_sin_factor == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "qwen2"}, "architecture must be 'llama', got 'qwen2'"),
        ({"extra": {"expert_count": 8}}, "llama.expert_count=8 is not understood"),
        ({"extra": {"rope.dimension_count": 8}}, "rope.dimension_count=8 must be the head dim"),
        ({"extra": {"rope.scaling.type": "longrope"}}, "none, linear or yarn, got 'longrope'"),
        ({"drop": "model.layers.1.mlp.up_proj.weight"}, "lacks 1 tensors.*ffn_up"),
        ({"tensors": {"blk.0.attn_q.bias": np.zeros(4, np.float32)}}, "no place for.*attn_q.bias"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, options: dict, message: str):
    write_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(ValueError, match=message):
        load_gguf(tmp_path / "m.gguf")


def test_missing_file_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"no\.gguf is missing"):
        load(tmp_path / "no.gguf")


def _write_tokenizer(path: Path, *, model: str = "gpt2", pre: str = "smollm") -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<|end|>", "a", "b", "1", "2", "ab", "12", "Ġ", "Ġa"])
    writer.add_token_types([3, 1, 1, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "1 2", "Ġ a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_tokenizer_splits_as_its_name_says(tmp_path: Path):
    path = tmp_path / "t.gguf"
    _write_tokenizer(path)
    tokenizer = load_gguf_tokenizer(path)
    assert tokenizer.encode("ab12<|end|> a").tokens == ["ab", "1", "2", "<|end|>", "Ġa"]
    assert tokenizer.decode(tokenizer.encode("ab 12").ids) == "ab 12"
    _write_tokenizer(path, pre="gpt-2")
    assert load_gguf_tokenizer(path).encode("ab12").tokens == ["ab", "12"]
    for wrong, message in (({"model": "llama"}, "must be 'gpt2'"), ({"pre": "qwen2"}, "one of")):
        _write_tokenizer(path, **wrong)
        with pytest.raises(ValueError, match=message):
            load_gguf_tokenizer(path)
