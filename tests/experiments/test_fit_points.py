"""`fit_points` and the command: each warning fires on its fault and is silent without it."""

import json

import numpy as np
import pytest

from experiments import fit as command
from experiments.scaling.fit import FitConfig, Points, fit_points, make_points, read_points
from experiments.scaling.parametric import predict_loss

SURFACE = {"E": 1.8, "A": 480.0, "B": 2000.0, "alpha": 0.35, "beta": 0.37}
CONFIG = FitConfig(starts=64, bootstrap=64)


def clean(noise=0.001) -> dict[str, np.ndarray]:
    """Columns of a good sweep: 4 budgets of 7 sizes around the optimum of `SURFACE`."""
    budgets = np.array([1e18, 1e19, 1e20, 1e21])
    a = 0.37 / 0.72
    g = (0.35 * 480 / (0.37 * 2000)) ** (1 / 0.72)
    n = np.concatenate([g * (c / 6) ** a * np.geomspace(0.25, 4, 7) for c in budgets])
    budget = np.repeat(budgets, 7)
    d = budget / 6 / n
    loss = predict_loss(SURFACE, n, d)
    loss = loss * np.exp(noise * np.random.default_rng(0).normal(size=len(n)))
    return {"params": n, "tokens": d, "loss": loss, "flops": budget, "budget": budget}


def points(columns) -> Points:
    rows = [f"run {i}" for i in range(len(columns["loss"]))]
    return make_points({k: list(v) for k, v in columns.items()}, rows)


def codes(result) -> set[str]:
    return {w["code"] for w in result["warnings"]}


@pytest.fixture(scope="module")
def good():
    return fit_points(points(clean()), config=CONFIG)


def test_a_good_sweep_fits_without_warnings(good):
    assert good["warnings"] == []
    assert good["points"] == 28
    assert good["parametric"]["a"] == pytest.approx(0.514, abs=0.05)
    assert good["isoflop"]["a"] == pytest.approx(0.514, abs=0.03)
    assert {"E", "A", "B", "alpha", "beta", "a", "b"} <= set(good["parametric"])
    assert {"a", "b", "budgets", "interval"} <= set(good["isoflop"])
    json.dumps(good, allow_nan=False)


def test_nan_loss_is_left_out_and_named(good):
    table = clean()
    table["loss"] = np.append(table["loss"], np.nan)
    for key in ("params", "tokens", "flops", "budget"):
        table[key] = np.append(table[key], table[key][0])
    result = fit_points(points(table), config=CONFIG)
    (warning,) = result["warnings"]
    assert warning["code"] == "non_finite_loss"
    assert warning["rows"] == ["run 28"]
    assert result["parametric"] == good["parametric"]
    assert result["isoflop"] == good["isoflop"]


def test_mixed_flop_units_warn():
    table = clean()
    table["flops"] = table["flops"].copy()
    table["flops"][:7] /= 6
    result = fit_points(points(table), config=CONFIG)
    assert codes(result) == {"flop_units"}
    assert result["warnings"][0]["rows"] == [f"run {i}" for i in range(7)]


def test_exact_duplicates_warn():
    table = {k: np.append(v[:-1], v[3]) for k, v in clean().items()}
    result = fit_points(points(table), config=CONFIG)
    assert "duplicate_rows" in codes(result)
    assert result["warnings"][0]["rows"] == ["run 27"]


def test_single_token_count_is_refused():
    n = np.geomspace(1e6, 1e8, 9)
    d = np.full(9, 1e9)
    table = {"params": n, "tokens": d, "loss": predict_loss(SURFACE, n, d)}
    result = fit_points(points(table), config=CONFIG)
    assert result["parametric"] is None
    assert "parametric_unidentified" in codes(result)


def test_budgets_are_found_when_the_column_is_missing(good):
    table = clean()
    del table["budget"]
    result = fit_points(points(table), config=CONFIG)
    assert result["isoflop"]["a"] == pytest.approx(good["isoflop"]["a"], abs=1e-9)


def test_ungrouped_flops_give_no_isoflop_fit():
    rng = np.random.default_rng(0)
    n, d = 10 ** rng.uniform(7, 9, 28), 10 ** rng.uniform(9, 11, 28)
    table = {"params": n, "tokens": d, "loss": predict_loss(SURFACE, n, d)}
    result = fit_points(points(table), config=CONFIG)
    assert result["isoflop"] is None
    assert "no_budgets" in codes(result)


def test_disagreeing_approaches_warn():
    """Minima moved with the budget: the parametric form cannot follow, the parabolas do."""
    table = clean()
    rank = np.repeat(np.arange(4), 7)
    place = np.tile(np.linspace(-1, 1, 7), 4)
    table["loss"] = table["loss"] - 0.03 * rank * place
    result = fit_points(points(table), config=CONFIG)
    assert "approaches_disagree" in codes(result)


# ---- the command -----------------------------------------------------------------------------


def write_csv(path, columns) -> str:
    lines = [",".join(columns)]
    lines += [",".join(repr(float(v)) for v in row) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_command_prints_one_json_object(tmp_path, capsys, good):
    path = write_csv(tmp_path / "points.csv", clean())
    assert command.main([path, "--json", "--starts", "64", "--bootstrap", "64"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["parametric"]["alpha"] == pytest.approx(good["parametric"]["alpha"], abs=1e-9)


def test_command_reads_other_column_names(tmp_path, capsys):
    table = clean()
    renamed = {"N": table["params"], "D": table["tokens"], "loss": table["loss"]}
    path = write_csv(tmp_path / "points.csv", renamed)
    args = [path, "--columns", "params=N", "tokens=D", "--starts", "64", "--bootstrap", "0"]
    assert command.main(args) == 0
    assert "alpha" in capsys.readouterr().out


def test_the_papers_letters_are_column_names_too(tmp_path):
    path = tmp_path / "points.csv"
    path.write_text("C,N,D,loss\n12,1,2,3\n")
    both = tmp_path / "both.csv"
    both.write_text("N,params,tokens,loss\n9,1,2,3\n")  # our own name wins
    for points in (read_points(path), read_points(both)):
        assert (points.params[0], points.tokens[0], points.loss[0]) == (1, 2, 3)


def test_a_fit_of_nothing_is_a_failure(tmp_path, capsys):
    path = tmp_path / "two.csv"
    path.write_text("params,tokens,loss\n1e6,1e7,3\n2e6,1e7,2.9\n")
    assert command.main([str(path), "--bootstrap", "0", "--starts", "8"]) == 1
    assert "nothing could be fitted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params,tokens\n1,2\n", "no column loss"),
        ("size,tokens,loss\n1,2,3\n", "--columns params=YOURS"),
        ("params,tokens,loss\n1,2,three\n", "line 2, column loss: 'three' is not a number"),
        ("params,tokens,loss\n1,2\n", "line 2, column loss"),
        ("params,tokens,loss\n", "no rows"),
        ("", "the header is empty"),
    ],
)
def test_bad_csv_says_what_is_wrong(tmp_path, capsys, text, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    assert command.main([str(path)]) == 1
    assert message in capsys.readouterr().err


def test_missing_file_is_one_line(capsys):
    assert command.main(["no-such.csv"]) == 1
    assert "no-such.csv" in capsys.readouterr().err


def test_reader_skips_a_byte_order_mark(tmp_path):
    path = tmp_path / "points.csv"
    path.write_text("\ufeffparams,tokens,loss\n1,2,3\n", encoding="utf-8")
    assert len(read_points(path)) == 1
