"""The benchmark of the training step runs the step of `experiments.train` and reports its cost."""

import json
from typing import Any

import pytest

from experiments.benchmarks import training
from experiments.training.watch import MFU_CONVENTION
from models.cost import forward_flops_per_token


def test_a_row_holds_rates_that_agree_with_each_other(tmp_path: Any) -> None:
    options = training.Options(heat=0.0, measure=0.05, folder=tmp_path)
    path = training.run(options)
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    shape = training.SHAPES["tiny"]
    tokens = shape.batch * shape.seq_len
    assert row["tokens_per_second"] == pytest.approx(tokens / (row["ms"] / 1e3))
    flops = 3 * forward_flops_per_token(shape.model, shape.seq_len)
    assert row["tflops"] * 1e12 == pytest.approx(flops * row["tokens_per_second"])
    assert row["mfu_convention"] == MFU_CONVENTION
    assert row["mfu"] is None or 0 < row["mfu"] < 1
    assert row["steps"] >= training.STEPS_BETWEEN_CLOCKS


def test_a_failure_is_a_row_that_says_so() -> None:
    row = training.measure(training.Options(), "tiny", "cudnn")
    assert "cudnn" in row["error"].lower() or "cuda" in row["error"].lower()
    assert "ms" not in row


def test_unknown_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="no shape nonsense"):
        training.Options(shapes=("nonsense",))


def test_the_shapes_have_the_sizes_that_the_goals_name() -> None:
    shapes = training.SHAPES
    assert shapes["gpt2-124m_2k"].model.param_count(embeddings=False) == pytest.approx(
        85e6, rel=0.01
    )
    assert shapes["llama-1b_8k"].model.head_dim == 64
    wide = shapes["1.2b-h128_8k"].model
    assert (wide.num_heads, wide.num_kv_heads, wide.head_dim, wide.ffn_dim) == (16, 8, 128, 8192)
