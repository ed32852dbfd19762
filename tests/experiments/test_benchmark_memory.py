"""The table of temporary memory tells linear from quadratic."""

import pytest

from experiments.benchmarks import memory


def test_the_table_tells_linear_from_quadratic(monkeypatch):
    kind = "bias (1, N, 1, S)"
    monkeypatch.setattr(memory, "KINDS", {kind: memory.KINDS[kind]})
    options = memory.Options(implementations=("xla", "reference"), lengths=(2048, 4096))
    head, *rows = memory.table(options)
    growth = {row[0]: float(row[head.index("growth")]) for row in rows}
    assert growth["xla"] < 2.1
    assert growth["reference"] > 3.8


def test_lengths_that_do_not_ascend_are_refused():
    with pytest.raises(ValueError, match="lengths must be ascending"):
        memory.Options(lengths=(4, 2))
    with pytest.raises(ValueError, match="must be positive"):
        memory.Options(heads=0)
