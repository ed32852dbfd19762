"""Logits of transformers' own classes, from the same files: every family, every RoPE scaling."""

import dataclasses
import json
import shutil
from functools import lru_cache, partial
from pathlib import Path

import jax
import numpy as np
import pytest
from hf_cases import ALL, DTYPES, FIXTURES, LENGTH
from safetensors.numpy import load_file

from models import apply
from models.decoder import config_rotary_table
from models.hf import Checkpoint, config_from_hf, config_to_hf, load_folder, save_folder
from models.hf.rope import rope_from_hf
from models.rope_scaling import scaled_frequencies

TOLERANCE = 1e-4
KEPT_AS = {"float32": "float32", "float16": "float32", "bfloat16": "bfloat16"}


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@lru_cache
def _logits() -> dict[str, np.ndarray]:
    return load_file(FIXTURES / "logits.safetensors")


def folder_of(tmp_path: Path, family: str, case: str, version: int = 5) -> Path:
    """The fixture of a case as the folder that transformers would have saved."""
    for weights in (FIXTURES / family).glob("model*"):
        shutil.copy(weights, tmp_path)
    shutil.copy(FIXTURES / family / f"{case}.v{version}.json", tmp_path / "config.json")
    return tmp_path


def _load(folder: Path) -> Checkpoint:
    return load_folder(folder, compute_dtype="float32", max_seq_len=LENGTH)


@pytest.mark.parametrize(("family", "case"), ALL)
def test_logits_are_those_of_transformers(tmp_path, family: str, case: str):
    loaded = _load(folder_of(tmp_path, family, case))
    assert loaded.family == family
    assert loaded.config.param_dtype == KEPT_AS[DTYPES[family]]
    got = jax.jit(partial(apply, loaded.config))(loaded.params, _logits()["tokens"])[0]
    want = _logits()[f"{family}.{case}"]
    assert want.shape == got.shape
    assert want.std() > 0.5, "logits that say something"
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


def test_cases_differ_so_that_each_setting_matters():
    for family in DTYPES:
        logits = [value for key, value in _logits().items() if key.startswith(f"{family}.")]
        for i, first in enumerate(logits):
            for second in logits[:i]:
                assert np.abs(first - second).max() > 100 * TOLERANCE


@pytest.mark.parametrize(("family", "case"), ALL)
def test_configs_of_transformers_4_and_5_say_the_same(family: str, case: str):
    configs = [
        config_from_hf(json.loads((FIXTURES / family / f"{case}.v{version}.json").read_text()))
        for version in (4, 5)
    ]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(("family", "case"), ALL)
def test_config_written_and_read_is_the_same(family: str, case: str):
    raw = json.loads((FIXTURES / family / f"{case}.v5.json").read_text())
    _, config = config_from_hf(raw)
    written = json.loads(json.dumps(config_to_hf(config, family=family)))
    assert config_from_hf(written) == (family, config)


@pytest.mark.parametrize("family", DTYPES)
def test_export_writes_the_tensors_that_were_read(tmp_path, family: str):
    """Bit for bit, in the stored dtype, whatever the sharding."""
    source = folder_of(tmp_path, family, next(case for f, case in ALL if f == family))
    loaded = _load(source)
    out = tmp_path / "out"
    how = {"family": family, "dtype": DTYPES[family], "max_shard_bytes": 25_000}
    save_folder(out, loaded.config, loaded.params, **how)
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    got, want = _tensors(out), _tensors(source)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        np.testing.assert_array_equal(got[name], tensor, err_msg=name)
    again = load_folder(out, compute_dtype="float32")
    for a, b in zip(jax.tree.leaves(again.params), jax.tree.leaves(loaded.params), strict=True):
        np.testing.assert_array_equal(a, b)


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.parametrize("name", json.loads((FIXTURES / "frequencies.json").read_text()))
def test_frequencies_of_published_models_are_those_of_transformers(name: str):
    """transformers computes in float32; 1e-6 is a few of its roundings."""
    row = json.loads((FIXTURES / "frequencies.json").read_text())[name]
    raw = row["config"]
    head_dim = raw["hidden_size"] // raw["num_attention_heads"]
    rope = rope_from_hf(raw, head_dim=head_dim, max_positions=raw["max_position_embeddings"])
    assert rope.scaling is not None
    assert rope.scaling.cos_sin_factor == pytest.approx(row["factor"], rel=1e-12)
    got = scaled_frequencies(head_dim, rope.theta, rope.scaling, seq_len=8192)
    np.testing.assert_allclose(got, row["frequencies"], rtol=1e-6)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_rope_tables_are_float32_whatever_the_compute_dtype(compute_dtype: str):
    raw = json.loads((FIXTURES / "phi3" / "longrope-long.v5.json").read_text())
    _, config = config_from_hf(raw, compute_dtype=compute_dtype)
    positions = np.arange(LENGTH)[None]
    table = config_rotary_table(config, jax.numpy.asarray(positions), seq_len=LENGTH)
    assert table.cos.dtype == table.sin.dtype == np.float32
    exact = dataclasses.replace(config, compute_dtype="float32")
    same = config_rotary_table(exact, jax.numpy.asarray(positions), seq_len=LENGTH)
    np.testing.assert_array_equal(table.cos, same.cos)
