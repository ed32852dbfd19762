"""Show 3: the same run on 1, 2, 4 and 8 simulated devices, and moved from one count to another."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from training_runs import MODEL

ROOT = Path(__file__).resolve().parents[2]


EIGHT = "fsdp x context x tensor"


def run_on(*meshes: str) -> dict:
    """One process with 8 devices does all of it: the number is fixed when JAX starts."""
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    script = Path(__file__).with_name("training_devices.py")
    command = [sys.executable, str(script), *meshes]
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout[process.stdout.index('{"one"') :])


def check(results: dict) -> None:
    assert len(results["one"]) == 12
    assert results["one"][-1] < results["one"][0]
    for name, losses in results.items():
        if name in ("hlo", "share"):
            continue
        # Sums in another order: float32 rounding, which 12 steps of training multiply.
        np.testing.assert_allclose(losses, results["one"], rtol=2e-5, err_msg=name)
    # Keys and values (B, T, K, H) of a device travel around the ring.
    found = collectives(results["hlo"][EIGHT])
    assert (4, 8, 1, 8) in found["collective-permute"]
    # Gathered are the matrices of one layer and the two of the vocabulary, each still split over
    # tensor: never the stack of layers, never activations.
    d, f, v = MODEL.d_model, MODEL.ffn_dim // 2, MODEL.vocab_size // 2
    heads = (MODEL.num_heads // 2, MODEL.head_dim)
    matrices = {(d, *heads), (*heads, d), (d, f), (f, d), (d, v), (v, d)}
    assert set(found["all-gather"]) == matrices
    assert results["share"]["one"] == [1.0, 1.0]
    assert results["share"][EIGHT] == [0.25, 0.25]


def test_one_and_eight_devices_give_the_same_losses():
    check(run_on("one", EIGHT))


@pytest.mark.slow
def test_one_two_four_and_eight_devices_give_the_same_losses():
    results = run_on("one", "data", "fsdp x tensor", EIGHT)
    check(results)
    assert set(collectives(results["hlo"]["data"])) == {"all-reduce"}
    assert not collectives(results["hlo"]["one"])


def collectives(hlo: str) -> dict[str, list[tuple[int, ...]]]:
    """Shapes of the results of each kind of collective."""
    found: dict[str, list[tuple[int, ...]]] = {}
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    pattern = rf"= (?:\()?\w+\[([\d,]*)\][^=]* ({kinds})"
    for shape, kind in re.findall(pattern, hlo):
        found.setdefault(kind, []).append(tuple(int(n) for n in shape.split(",") if n))
    return found
