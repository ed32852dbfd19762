"""What a checkpoint may not hold: every error names the thing. And rounding, which is done once."""

import dataclasses
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hf_cases import FIXTURES, LENGTH
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from models.config import ModelConfig
from models.hf import config_from_hf, config_to_hf, load, load_folder, save_folder
from models.hf.__main__ import main
from models.hf.dtypes import FLOAT_DTYPES, cast
from models.hf.verify import compare, read_reference, write_reference
from models.rope_scaling import RopeScaling

BF16 = FLOAT_DTYPES["bfloat16"]
FILE = "model.safetensors"


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    """A folder of the tied Qwen-3 fixture, whose files a test may break."""
    shutil.copy(FIXTURES / "qwen3" / FILE, tmp_path)
    shutil.copy(FIXTURES / "qwen3" / "default.v5.json", tmp_path / "config.json")
    return tmp_path


def _raw(family: str = "llama", case: str = "default") -> dict:
    return json.loads((FIXTURES / family / f"{case}.v5.json").read_text())


def _edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _edit_tensors(folder: Path, changes: dict, drop: str = "") -> None:
    held = load_file(folder / FILE)
    held.pop(drop, None)
    save_file(held | changes, folder / FILE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma"}, "model_type must be one of .*got 'gemma'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures must be"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'.*got 'gelu'"),
        ({"attention_bias": True}, "attention_bias=True is not supported by family 'llama'"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"hidden_size": None}, "must give hidden_size as an integer, got None"),
        ({"head_dim": None, "num_attention_heads": 5}, "hidden_size=48 is no multiple"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is for family 'phi3'"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "unknown rope type 'spiral'; known are"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope type 'linear' needs factor"),
        ({"rope_parameters": {"type": "linear", "rope_type": "yarn"}}, "type disagree"),
        ({"rope_parameters": {"factor": 2.0}}, "'factor', which means nothing for rope type 'def"),
        ({"rope_parameters": {"rope_theta": 7.0}, "rope_theta": 8.0}, "rope_theta is 7.0 in the"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling that differ"),
        ({"rope_parameters": {"full_attention": {}}}, "each layer type its own RoPE"),
        (
            {
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "factor": 2.0,
                    "original_max_position_embeddings": 12,
                }
            },
            "original_max_position_embeddings=12 is not max_position_embeddings=24",
        ),
    ],
)
def test_config_that_cannot_be_done_is_named(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        config_from_hf(_raw() | changes)


def test_windows_that_contradict_are_named():
    with pytest.raises(ValueError, match="no sliding_window is in use"):
        config_from_hf(_raw("qwen2", "window") | {"use_sliding_window": False})
    with pytest.raises(ValueError, match="layer_types must name"):
        config_from_hf(_raw("qwen2", "window") | {"layer_types": ["chunked_attention"] * 2})
    with pytest.raises(ValueError, match="layer_types is not read by family 'mistral'"):
        config_from_hf(_raw("mistral", "window") | {"layer_types": ["full_attention"] * 2})


def test_missing_keys_mean_the_class_defaults():
    raw = {
        key: value
        for key, value in _raw("mistral", "window").items()
        if key not in ("sliding_window", "head_dim", "num_key_value_heads", "rms_norm_eps")
    }
    _, config = config_from_hf(raw | {"num_attention_heads": 8})
    assert (config.windows, config.head_dim) == ((4096, 4096), 6)
    assert (config.num_kv_heads, config.norm_eps) == (8, 1e-6)


def test_old_names_of_longrope():
    raw = _raw("phi3", "longrope-long")
    want = config_from_hf(raw)
    for name in ("su", "yarn"):
        old = raw | {"rope_parameters": raw["rope_parameters"] | {"rope_type": name}}
        old["rope_parameters"].pop("type", None)
        assert config_from_hf(old) == want


def test_deepseek_mscale_is_a_ratio():
    rope = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 24}
    rope |= {"mscale": 1.0, "mscale_all_dim": 0.5}
    _, config = config_from_hf(_raw() | {"rope_parameters": rope})
    assert config.rope_scaling is not None
    want = (0.1 * np.log(40) + 1) / (0.05 * np.log(40) + 1)
    assert config.rope_scaling.cos_sin_factor == pytest.approx(want, rel=1e-12)


def test_unmapped_and_missing_tensors_are_named(qwen3: Path):
    name = "model.layers.1.mlp.up_proj.weight"
    up = load_file(qwen3 / FILE)[name]
    _edit_tensors(qwen3, {"model.layers.1.mlp.bias": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match=r"no place for.*model\.layers\.1\.mlp\.bias"):
        load_folder(qwen3)
    _edit_tensors(qwen3, {}, drop="model.layers.1.mlp.bias")
    _edit_tensors(qwen3, {}, drop=name)
    with pytest.raises(ValueError, match=r"lacks 1 tensors.*layers\.1\.mlp\.up_proj"):
        load_folder(qwen3)
    _edit_tensors(qwen3, {name: up[:-1]})
    with pytest.raises(ValueError, match=r"up_proj.weight has shape \[39, 48\].*\[40, 48\]"):
        load_folder(qwen3)
    # What old exports carry besides weights is let pass.
    _edit_tensors(qwen3, {name: up, "model.layers.0.self_attn.rotary_emb.inv_freq": up[0]})
    load_folder(qwen3)


def test_tie_must_agree_with_the_tensors(qwen3: Path):
    embedding = load_file(qwen3 / FILE)["model.embed_tokens.weight"]
    _edit_tensors(qwen3, {"lm_head.weight": embedding})
    assert "head" not in load_folder(qwen3).params, "stored twice, and the same"
    _edit_tensors(qwen3, {"lm_head.weight": embedding * 2})
    with pytest.raises(ValueError, match=r"tie_word_embeddings is true, but lm_head\.weight and"):
        load_folder(qwen3)
    _edit_config(qwen3, tie_word_embeddings=False)
    assert "head" in load_folder(qwen3).params
    _edit_tensors(qwen3, {}, drop="lm_head.weight")
    with pytest.raises(ValueError, match="if they are tied, say so"):
        load_folder(qwen3)


def test_files_that_are_missing_or_not_of_one_checkpoint(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        load_folder(tmp_path)
    shutil.copy(FIXTURES / "llama" / "default.v5.json", tmp_path / "config.json")
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor .*\.bin or"):
        load_folder(tmp_path)
    (tmp_path / FILE).write_bytes(b"not tensors")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load_folder(tmp_path)
    for path in (FIXTURES / "llama").glob("model*"):
        shutil.copy(path, tmp_path)
    load_folder(tmp_path)
    second = tmp_path / "model-00002-of-00002.safetensors"
    held = load_file(second)
    held.popitem()
    save_file(held, second)
    with pytest.raises(ValueError, match="disagree about"):
        load_folder(tmp_path)
    second.unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors, which is not"):
        load_folder(tmp_path)


def test_stored_dtypes(qwen3: Path):
    held = load_file(qwen3 / FILE)
    norm = "model.norm.weight"
    assert load_folder(qwen3).config.param_dtype == "float32", "float16 keeps every value"
    assert load_folder(qwen3, param_dtype="bfloat16").config.param_dtype == "bfloat16"
    save_file({k: v.astype(BF16) for k, v in held.items()}, qwen3 / FILE)
    assert load_folder(qwen3).config.param_dtype == "bfloat16"
    _edit_tensors(qwen3, {norm: held[norm].astype(np.float64)})
    with pytest.raises(ValueError, match="float64 tensors; say param_dtype"):
        load_folder(qwen3)
    assert load_folder(qwen3, param_dtype="float32").config.param_dtype == "float32"
    _edit_tensors(qwen3, {norm: np.zeros(48, np.int8)})
    with pytest.raises(ValueError, match=r"model\.norm\.weight is stored as I8"):
        load_folder(qwen3)
    with pytest.raises(ValueError, match="param_dtype must be one of"):
        load_folder(qwen3, param_dtype="float16")


@pytest.mark.parametrize("kind", ["e4m3fn", "e5m2"])
def test_float8_is_read_exactly(qwen3: Path, kind: str):
    """The file is written byte by byte, since no numpy writer knows the type."""
    dtype = np.dtype(getattr(ml_dtypes, f"float8_{kind}"))
    held = {k: v.astype(dtype) for k, v in load_file(qwen3 / FILE).items()}
    header, data = {}, b""
    for name, value in held.items():
        end = len(data) + value.nbytes
        code = f"F8_{kind.removesuffix('fn').upper()}"
        header[name] = {"dtype": code, "shape": value.shape, "data_offsets": [len(data), end]}
        data += value.tobytes()
    text = json.dumps(header).encode()
    (qwen3 / FILE).write_bytes(len(text).to_bytes(8, "little") + text + data)
    config, params, *_ = load_folder(qwen3)
    assert config.param_dtype == "bfloat16"
    want = held["model.embed_tokens.weight"].astype(np.float32)
    np.testing.assert_array_equal(params["embedding"]["table"].astype(np.float32), want)
    kernel = params["blocks"]["mlp"]["up"]["kernel"][1].astype(np.float32)
    want = held["model.layers.1.mlp.up_proj.weight"].astype(np.float32).T
    np.testing.assert_array_equal(kernel, want)


@given(st.integers(0, 0x7F7E), st.booleans(), st.integers(-2, 2))
def test_float64_is_rounded_to_bfloat16_once(bits: int, negative: bool, ulps: int):
    """Between two neighbours of bfloat16: their midpoint, and float64s just beside it."""
    low, high = (
        np.uint32((bits + step) << 16 | negative << 31).view(np.float32) for step in (0, 1)
    )
    value = (np.float64(low) + np.float64(high)) / 2
    for _ in range(abs(ulps)):
        value = np.nextafter(value, np.inf if ulps > 0 else -np.inf)
    got = float(cast(np.array([value]), BF16)[0])
    distances = abs(value - np.float64(low)), abs(np.float64(high) - value)
    if distances[0] != distances[1]:
        assert got == (low if distances[0] < distances[1] else high)
    else:
        assert got in (low, high)
        assert int(np.asarray(got, BF16).view(np.uint16)) % 2 == 0, "ties to even"


def test_rounding_keeps_what_is_not_finite():
    x = np.array([np.nan, np.inf, -np.inf, 1e300, 0.0, -0.0])
    got = cast(x, BF16).astype(np.float64)
    np.testing.assert_array_equal(got, [np.nan, np.inf, -np.inf, np.inf, 0.0, -0.0])
    assert np.signbit(got[-1])
    assert cast(x, np.dtype(np.float64)) is x
    assert cast(np.array([1 + 2**-9], np.float32), BF16)[0] == ml_dtypes.bfloat16(1.0)


VALID = ModelConfig(
    vocab_size=8,
    num_layers=2,
    d_model=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    ffn_dim=8,
    max_seq_len=16,
)


@pytest.mark.parametrize(
    ("changes", "family", "message"),
    [
        ({"qkv_bias": True}, "llama", "family 'llama' cannot say qkv_bias=True"),
        ({}, "qwen2", "family 'qwen2' cannot say qkv_bias=False"),
        ({"qk_norm": True}, "mistral", "family 'mistral' cannot say qk_norm=True"),
        ({"rotary_dim": 2}, "llama", "cannot say rotary_dim=2"),
        ({"sliding_window": 4}, "llama", "cannot say sliding_window=4"),
        ({"sliding_window": (4, None)}, "mistral", r"cannot say sliding_window=\(4, None\)"),
        ({"d_model": 12}, "phi3", "cannot say head_dim=4, which is not d_model"),
        (
            {"rope_scaling": RopeScaling(type="linear", factor=2.0)},
            "phi3",
            "knows rope type 'longrope', not 'linear'",
        ),
        ({}, "gpt2", "family must be one of"),
    ],
)
def test_a_family_that_cannot_say_the_model_is_refused(changes, family, message):
    with pytest.raises(ValueError, match=message):
        config_to_hf(dataclasses.replace(VALID, **changes), family=family)


def test_saving_refuses_what_does_not_fit(qwen3: Path, tmp_path: Path):
    config, params, *_ = load_folder(qwen3)
    with pytest.raises(FileExistsError, match="already holds a model; give overwrite=True"):
        save_folder(qwen3, config, params)
    with pytest.raises(ValueError, match="extra_config has 'hidden_size'"):
        save_folder(tmp_path / "a", config, params, extra_config={"hidden_size": 3})
    with pytest.raises(ValueError, match="dtype must be one of"):
        save_folder(tmp_path / "a", config, params, dtype="int8")
    with pytest.raises(ValueError, match=r"params\['head.kernel'\] has shape \(48, 40\).*None"):
        save_folder(tmp_path / "a", config, params | {"head": {"kernel": np.zeros((48, 40))}})
    assert not (tmp_path / "a").exists()
    save_folder(qwen3, config, params, overwrite=True, max_shard_bytes=10_000)
    assert not (qwen3 / FILE).exists()
    assert load_folder(qwen3).config == config


def test_convert_and_verify_commands(qwen3: Path, tmp_path: Path, capsys):
    (qwen3 / "tokenizer.json").write_text("{}")
    _edit_config(qwen3, eos_token_id=7)
    out = str(tmp_path / "out")
    assert main(["convert", str(qwen3), out, "--dtype", "bfloat16"]) == 0
    assert "parameters in bfloat16" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 7
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert load(out).config.param_dtype == "bfloat16"
    assert main(["convert", str(qwen3), out]) == 2
    assert "already holds a model" in capsys.readouterr().err

    held = load_file(FIXTURES / "logits.safetensors")
    reference = tmp_path / "reference.safetensors"
    write_reference(reference, held["tokens"], held["qwen3.default"][None])
    assert read_reference(reference)[1].shape == (1, LENGTH, 40)
    _edit_config(qwen3, max_position_embeddings=LENGTH)
    assert main(["verify", str(qwen3), "--reference", str(reference)]) == 0
    assert "ok: 72 positions" in capsys.readouterr().out
    held["qwen3.default"][50, 3] += 1e-3
    write_reference(reference, held["tokens"], held["qwen3.default"][None])
    assert main(["verify", str(qwen3), "--reference", str(reference)]) == 1
    assert "FAILED: 72 positions" in (said := capsys.readouterr().out)
    assert "at position 50" in said


def test_comparison_never_passes_nan():
    logits = np.zeros((1, 3, 4))
    broken = logits.copy()
    broken[0, 1, 2] = np.nan
    assert compare(logits, logits).within(0.0)
    assert not compare(logits + 2e-4, logits).within(1e-4), "of 1 where logits are small"
    large = logits + np.array([0.0, 10.0, -30.0, 0.0])
    agreement = compare(large + 2e-3, large)
    assert agreement.scale == 30.0
    assert agreement.within(1e-4)
    assert not agreement.within(1e-5)
    assert not compare(broken, logits).within(1e9)
    assert not compare(logits, broken).within(1e9)
    with pytest.raises(ValueError, match="our logits have shape"):
        compare(logits, logits[:, :2])
