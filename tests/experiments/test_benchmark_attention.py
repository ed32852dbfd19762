"""The attention benchmark end to end on a CPU, with tiny times, and its arithmetic."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks import attention as benchmark
from experiments.benchmarks import peers, timing
from pallas_flash.mask import Mask
from pallas_flash.shapes import BY_NAME, Case


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    options = benchmark.Options(
        cases=("causal",),
        peers=("xla", "jax_xla", "cudnn"),
        name="smoke",
        folder=tmp_path_factory.mktemp("results"),
        heat=0.0,
        measure=0.001,
        dtype="float32",
    )
    path = benchmark.run(options)
    assert path.name == "smoke.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_measurement_is_a_row_with_its_provenance(rows):
    timed = [row for row in rows if "error" not in row]
    assert {(row["peer"], row["dir"]) for row in timed} == {
        (peer, direction) for peer in ("xla", "jax_xla") for direction in ("fwd", "bwd")
    }
    for row in timed:
        assert row["ms"] > 0
        assert row["method"] == "wall"
        assert row["max_error"] < benchmark.TOLERANCE["float32"]
        want = benchmark.flops(BY_NAME[row["case"]], row["dir"]) / row["ms"] / 1e9
        assert row["tflops"] == pytest.approx(want)
        assert {"device", "versions", "command", "date", "sm_clock_mhz"} <= row.keys()


def test_a_peer_that_cannot_run_is_a_row_that_says_why(rows):
    [row] = [row for row in rows if row["peer"] == "cudnn"]
    assert row["error"]
    assert "ms" not in row


def test_a_wrong_peer_gets_no_time(tmp_path, monkeypatch):
    def wrong(query, key, value):
        return jnp.zeros_like(query) + 0 * (query.sum() + key.sum() + value.sum())

    real = peers.attention
    monkeypatch.setattr(
        peers, "attention", lambda name, case: wrong if name == "xla" else real(name, case)
    )
    options = benchmark.Options(cases=("causal",), peers=("xla",), folder=tmp_path)
    [row] = benchmark.measure(options, BY_NAME["causal"], "xla")
    assert "wrong" in row["error"]
    assert "ms" not in row


@pytest.mark.parametrize("window", [(20, 7), (24, None), (None, 3), (0, 0)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_flops_of_a_window_count_the_visible_pairs(window, is_causal):
    case = Case("w", B=3, T=50, S=70, N=2, K=1, H=8, Hv=4, is_causal=is_causal, window=window)
    mask = Mask(is_causal=is_causal, window=window)
    seen = mask.visible(np.arange(50)[:, None], np.arange(70)[None, :], q_length=50, kv_length=70)
    assert benchmark.flops(case, "fwd") == 2 * (8 + 4) * 3 * 2 * np.asarray(seen).sum()


def test_flops_are_the_papers():
    case = benchmark.CASES["d128_s8k_c"]
    assert benchmark.flops(case, "fwd") == 4 * 2 * 16 * 8192**2 * 128 / 2
    assert benchmark.flops(case, "bwd") == 2.5 * benchmark.flops(case, "fwd")


@pytest.mark.parametrize("text", ["128x64w8s3", "128x64w8s3/128x64/1x1w1s1", "a/b/c"])
def test_tiles_that_do_not_parse_are_refused(text):
    with pytest.raises(ValueError, match="FORWARD/DQ/DKV"):
        benchmark.Options(peers=(f"triton@{text}",))


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match="nothing"):
        benchmark.Options(cases=("nothing",))
    with pytest.raises(ValueError, match="jax_xla"):
        benchmark.Options(peers=("cudn",))


def test_chosen_tiles_run_the_triton_kernels_with_them():
    case = BY_NAME["grouped"]
    attend = peers.attention("triton@32x16w4s1/32x16w4s1/16x32w4s1", case)
    arrays = benchmark.draw(case, "float32")
    assert benchmark.largest_error(attend, case, arrays) < 1e-5


def test_wall_clock_is_per_call():
    import time

    took = timing.time_call(lambda: time.sleep(0.01) or jnp.zeros(()), heat_s=0.0, measure_s=0.03)
    assert 10 <= took.ms < 100
