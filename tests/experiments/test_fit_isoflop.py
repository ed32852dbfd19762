"""Parabola minima and power laws: exact on planted curves, refused where there is no minimum."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.scaling.isoflop import fit_isoflop


def curves(
    a=0.5, k=1e-2, budgets=(1e18, 1e19, 1e20), curvature=0.05, shift=0.0, noise=0.0, sizes=5
):
    """Runs on exact parabolas in log N whose minima follow k C^a; D = C / 6N."""
    rng = np.random.default_rng(0)
    rows = []
    for c in budgets:
        n = k * c**a * np.geomspace(0.25, 4, sizes) * np.exp(shift)
        z = np.log(n / (k * c**a))
        loss = 3 - 0.1 * np.log10(c / 1e18) + curvature * z**2 + noise * rng.normal(size=sizes)
        rows.append(np.stack([n, c / 6 / n, loss, np.full(sizes, c)]))
    return np.concatenate(rows, 1)


@settings(max_examples=50, deadline=None)
@given(a=st.floats(0.2, 0.8), curvature=st.floats(0.01, 0.3), shift=st.floats(-0.6, 0.6))
def test_planted_minima_are_recovered_exactly(a, curvature, shift):
    fit, _ = fit_isoflop(
        *curves(a=a, k=1e9 / 1e19**a, curvature=curvature, shift=shift), bootstrap=0
    )
    assert fit["a"] == pytest.approx(a, abs=1e-6)
    assert fit["b"] == pytest.approx(1 - a, abs=1e-6)
    for entry in fit["budgets"]:
        c = entry["budget"]
        assert entry["n_opt"] == pytest.approx(1e9 * (c / 1e19) ** a, rel=1e-5)
        assert entry["d_opt"] == pytest.approx(c / 6 / entry["n_opt"], rel=1e-5)
        low, high = entry["flat_range"]["0.1%"]
        assert np.log(high / entry["n_opt"]) == pytest.approx(
            np.sqrt(0.001 * entry["loss"] / curvature), rel=1e-4
        )
        assert low * high == pytest.approx(entry["n_opt"] ** 2)


@pytest.mark.parametrize(
    ("shift", "side", "outward"), [(2.0, "smallest", -1), (-2.0, "largest", 1)]
)
def test_edge_minimum_is_refused_and_names_the_size_to_add(shift, side, outward):
    table = curves(shift=shift)
    fit, warnings = fit_isoflop(*table, bootstrap=0)
    assert fit["a"] is None
    assert fit["b"] is None
    edges = [w for w in warnings if w["code"] == "edge_minimum"]
    assert len(edges) == 3
    assert side in edges[0]["message"]
    suggested = float(edges[0]["message"].rsplit("N = ", 1)[1])
    first = np.sort(table[0][table[3] == table[3].min()])
    assert suggested < first[0] if outward < 0 else suggested > first[-1]
    assert all("refused" in e and e["n_opt"] is None for e in fit["budgets"])


def test_one_bad_budget_does_not_spoil_the_others():
    table = np.concatenate([curves(), curves(budgets=(1e21,), shift=2.0)], 1)
    fit, warnings = fit_isoflop(*table, bootstrap=0)
    assert fit["a"] == pytest.approx(0.5, abs=1e-6)
    assert [e["n_opt"] is None for e in fit["budgets"]] == [False, False, False, True]
    assert [w["code"] for w in warnings] == ["edge_minimum"]


def test_a_double_dip_that_opens_downwards_is_refused():
    n = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    loss = np.array([1.00, 1.30, 0.99, 1.30, 1.00])
    fit, warnings = fit_isoflop(n, 100 / n, loss, np.full(5, 100.0), bootstrap=0)
    assert fit["budgets"][0]["n_opt"] is None
    assert warnings[0]["code"] in ("concave", "vertex_outside")


def test_the_parabola_is_local():
    """A steep far wall, as in under-trained large models, must not move the minimum."""
    table = curves(sizes=9)
    z = np.log(table[0] / (1e-2 * table[3] ** 0.5))
    table[2] += np.where(np.abs(z) > 1.2, 0.3 * (z - 1) ** 2, 0)
    fit, _ = fit_isoflop(*table, bootstrap=0)
    assert fit["a"] == pytest.approx(0.5, abs=1e-6)


def test_off_centre_curve_warns_and_names_the_side():
    _, warnings = fit_isoflop(*curves(shift=1.0), bootstrap=0)
    assert {w["code"] for w in warnings} == {"off_centre"}
    assert "1 size below" in warnings[0]["message"]


def test_noise_that_hides_the_minimum_is_reported():
    codes = {
        w["code"] for w in fit_isoflop(*curves(curvature=0.002, noise=0.004), bootstrap=200)[1]
    }
    assert codes & {"poor_parabola", "edge_minimum", "concave", "fragile_minimum"}


def test_two_seeds_count_as_two_runs_of_one_curve():
    table = np.concatenate([curves(), curves()], 1)
    fit, _ = fit_isoflop(*table, bootstrap=0)
    assert fit["budgets"][0]["parabola"]["runs"] == 10
    assert fit["a"] == pytest.approx(0.5, abs=1e-6)


def test_intervals_cover_and_repeat():
    hits = 0
    for seed in range(40):
        table = curves(sizes=7)
        table[2] += np.random.default_rng(seed).normal(size=table.shape[1]) * 0.003
        fit, _ = fit_isoflop(*table, bootstrap=400, seed=1)
        low, high = fit["interval"]["a"]
        hits += low <= 0.5 <= high
    assert 30 <= hits <= 40  # nominal 90%, 40 trials
    assert fit == fit_isoflop(*table, bootstrap=400, seed=1)[0]
    assert fit["band"]["n_opt"][0][0] < fit["band"]["n_opt"][1][0]


def test_three_sizes_have_no_residual_and_so_no_interval():
    fit, warnings = fit_isoflop(*curves(sizes=3), bootstrap=100)
    assert fit["interval"] is None
    assert "no_residuals" in {w["code"] for w in warnings}
