"""The report stands alone, shows what was fitted, and prints no exponent that is not there."""

import base64
import re
from dataclasses import replace

import numpy as np
import pytest
from test_sweep import make_dataset

from experiments import sweep
from experiments.configs.sweeps import PRESETS
from experiments.scaling import pictures, runs
from experiments.scaling.fit import FitConfig
from experiments.scaling.ladder import make_plan
from experiments.scaling.parametric import predict_loss
from experiments.scaling.report import (
    EXPECTED_OF_SMOKE,
    describe_warnings,
    headline,
    summary_line,
    write_report,
)
from experiments.training.checkpoint import read_json, write_json

FIT = FitConfig(starts=32, bootstrap=32)


def finished_run(folder, *, slope=0.0, **changes) -> runs.Run:
    """The default CPU plan as if trained: losses of a planted surface, tilted by `slope` log N."""
    config = replace(PRESETS["cpu"](), out=str(folder), **changes)
    plan = make_plan(config, corpus_tokens=4_000_000)
    run = runs.create_run(config, plan, dataset=make_dataset())
    surface = {"E": 1.3, "A": 16.0, "B": 5000.0, "alpha": 0.38, "beta": 0.73}
    for point in plan.points:
        loss = predict_loss(surface, np.array([point.params]), np.array([point.tokens]))[0]
        loss = float(loss + slope * np.log(point.params))
        row = {"step": point.steps, "tokens": point.tokens, "loss": loss + 0.1}
        metrics = run.point_folder(point) / "metrics.jsonl"
        metrics.write_text(f'{{"step": 1, "tokens": 1024, "loss": 5.0}}\n{row}\n'.replace("'", '"'))
        write_json(
            run.point_folder(point) / "result.json",
            {"id": point.id, "status": "done", "loss": loss, "seconds": 1.0},
        )
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return finished_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def fit(run):
    return sweep.fit_run(run, FIT)


def test_page_is_self_contained_and_complete(run, fit):
    path = write_report(run, fit)
    page = path.read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(sources) == 4
    for source in sources:
        prefix, data = source.split(",", 1)
        assert prefix == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")
    for point in run.plan.points:
        assert point.id in page
    assert headline(fit) in page
    for name in ("isoflop.png", "power_laws.png", "surface.png", "curves.png"):
        assert (run.folder / name).stat().st_size > 10_000


def test_fit_file_has_the_promised_keys(run, fit):
    assert read_json(run.folder / "fit.json") == fit
    assert {"E", "A", "B", "alpha", "beta", "a", "b"} <= set(fit["parametric"])
    assert {"a", "b", "budgets"} <= set(fit["isoflop"])
    assert isinstance(fit["warnings"], list)
    assert len(fit["isoflop"]["budgets"]) == 3


def test_last_line_names_the_report_and_both_exponents(run, fit):
    line = summary_line(run.folder / "report.html", fit)
    assert str(run.folder / "report.html") in line
    assert f"a = {fit['isoflop']['a']:.3f} [" in line
    assert f"b = {fit['isoflop']['b']:.3f} [" in line


def test_refit_repeats_exactly(run, fit):
    assert sweep.fit_run(run, FIT) == fit


def test_without_interior_minima_no_exponent_is_printed(tmp_path):
    run = finished_run(tmp_path / "edge", slope=1.0)  # the smallest size wins everywhere
    fit = sweep.fit_run(run, FIT)
    assert fit["isoflop"]["a"] is None
    line = summary_line(write_report(run, fit), fit)
    assert "exponents not determined" in line
    assert "a = " not in line
    assert "add a size near N = " in line
    assert not (run.folder / "power_laws.png").exists()


def test_a_grid_of_sizes_and_tokens_reports_the_surface_alone(tmp_path):
    sizes, tokens = ("8x2", "16x2", "32x2", "64x2"), (2e5, 7e5, 2.5e6)
    run = finished_run(tmp_path / "grid", budgets=(), sizes=sizes, tokens=tokens)
    fit = sweep.fit_run(run, FIT)
    assert fit["isoflop"] is None
    assert fit["parametric"]["alpha"] == pytest.approx(0.38, rel=0.01)
    page = write_report(run, fit).read_text()
    assert "exponents not determined: no IsoFLOP curves" in page
    assert not (run.folder / "isoflop.png").exists()


def smoke_run(folder, **changes) -> runs.Run:
    smoke = PRESETS["smoke"]()
    fields = ("budgets", "ladder", "sizes_per_budget", "expected_params", "expected_budget")
    return finished_run(folder, **{f: getattr(smoke, f) for f in fields} | changes)


def test_warnings_of_a_smoke_test_are_called_expected(tmp_path, capsys):
    run = smoke_run(tmp_path / "smoke")
    fit = sweep.fit_run(run, FIT)
    out = capsys.readouterr().out.splitlines()
    assert fit["warnings"]
    assert len(read_json(run.folder / "fit.json")["warnings"]) == len(fit["warnings"])
    assert [line.startswith("warning: ") for line in out] == [True] * len(fit["warnings"]) + [False]
    assert out[-1].startswith(
        "note: all warnings above are expected of so small a plan (budgets: 2"
    )
    assert out[-1].removeprefix("note: ") in write_report(run, fit).read_text()


def test_what_is_no_matter_of_size_is_not_excused(tmp_path):
    run = smoke_run(tmp_path / "smoke")
    point = run.plan.points[0]
    row = {"id": point.id, "status": "diverged", "loss": None, "seconds": 1.0}
    write_json(run.point_folder(point) / "result.json", row)
    fit = sweep.fit_run(run, FIT)
    messages, excuse = describe_warnings(run.plan, fit)
    assert sorted(messages) == sorted(w["message"] for w in fit["warnings"])
    assert point.id in messages[0]
    assert excuse is not None
    assert excuse.startswith(f"the last {len(messages) - 1} warnings are expected")


def test_a_whole_plan_is_never_excused(run, fit):
    doubts = [{"code": code, "message": code} for code in EXPECTED_OF_SMOKE]
    messages, excuse = describe_warnings(run.plan, {**fit, "warnings": doubts})
    assert len(messages) == len(doubts)
    assert excuse is None


def test_text_from_a_folder_name_is_escaped(tmp_path, fit):
    run = finished_run(tmp_path / "<b>bold")
    assert "<b>bold" not in write_report(run, fit).read_text()


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e15, "$10^{15}$"), (3.16e15, r"$3.2 \times 10^{15}$"), (9.99e9, "$10^{10}$")],
)
def test_scientific(value, text):
    assert pictures.scientific(value) == text
