"""Runs of one seed differ by rounding alone, and nothing that went wrong is left out of a row."""

import json
from typing import Any

import numpy as np
import pytest

from experiments.benchmarks import numerics


def test_runs_of_one_kind_are_equal_and_those_of_two_are_close(tmp_path: Any) -> None:
    options = numerics.Options(
        runs=("xla:float32", "xla:float32", "reference:float32"),
        preset="tiny",
        steps=8,
        batch_size=2,
        seq_len=32,
        folder=tmp_path,
    )
    path = numerics.run(options)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0]["losses"] == rows[1]["losses"]
    assert rows[2]["to_first"]["largest"] < 1e-4
    assert rows[0]["losses"][-1] < rows[0]["losses"][0]
    assert path.with_suffix(".png").stat().st_size > 10_000


def test_what_went_wrong_is_counted() -> None:
    losses = np.linspace(4.0, 3.0, 200)
    norms = np.ones(200)
    accepted = np.ones(200)
    losses[7], norms[7], accepted[7] = np.nan, np.inf, 0
    norms[50] = 11.0
    told = numerics.summary({"loss": losses, "grad_norm": norms, "accepted": accepted})
    assert (told["not_finite"], told["refused"], told["exploding"]) == (1, 1, 1)
    assert told["loss_std"] == pytest.approx(0.0, abs=1e-9)  # a straight line does not scatter


@pytest.mark.parametrize("run", ["mosaic", "nothing:float32", "xla:int8"])
def test_a_run_that_is_none_is_named(run: str) -> None:
    with pytest.raises(ValueError, match=f"runs: '{run}'"):
        numerics.Options(runs=(run,))
