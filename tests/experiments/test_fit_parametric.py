"""The parametric fit finds the optimum: of planted surfaces, and the one that scipy finds."""

import csv
from pathlib import Path

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.scaling.parametric import ParametricConfig, fit_parametric, predict_loss

CHINCHILLA = Path("experiments/scaling/data/chinchilla_points_rounded.csv")
KEYS = ("E", "A", "B", "alpha", "beta")


def grid(budgets=(1e18, 1e19, 1e20, 1e21), sizes=7):
    """N and D of an IsoFLOP grid, C = 6 N D, sizes within a factor of 4 around sqrt(C / 120)."""
    n = np.concatenate([np.sqrt(c / 120) * np.geomspace(0.25, 4, sizes) for c in budgets])
    d = np.repeat(budgets, sizes) / (6 * n)
    return n, d


@pytest.fixture(scope="module")
def chinchilla():
    with open(CHINCHILLA) as file:
        rows = list(csv.DictReader(file))
    return tuple(np.array([float(row[k]) for row in rows]) for k in ("N", "D", "loss"))


@settings(max_examples=12, deadline=None)
@given(
    E=st.floats(0.5, 2.5),
    alpha=st.floats(0.2, 0.6),
    beta=st.floats(0.2, 0.6),
    share=st.floats(0.3, 3.0),
)
def test_recovers_a_planted_surface(E, alpha, beta, share):
    n, d = grid()
    # both terms of the order of E / 3 in the middle of the grid, so that they can be told apart
    A, B = E / 3 * np.exp(alpha * np.log(n).mean()), share * E / 3 * np.exp(beta * np.log(d).mean())
    planted = {"E": E, "A": A, "B": B, "alpha": alpha, "beta": beta}
    fit = fit_parametric(
        n, d, predict_loss(planted, n, d), config=ParametricConfig(starts=64, bootstrap=0)
    )
    for key in KEYS:
        assert fit[key] == pytest.approx(planted[key], rel=1e-4)
    assert fit["a"] == pytest.approx(beta / (alpha + beta), rel=1e-4)
    assert fit["a"] + fit["b"] == pytest.approx(1)


def scipy_objective(theta, n, d, loss, delta):
    a, b, e, alpha, beta = theta
    prediction = np.logaddexp(np.logaddexp(a - alpha * np.log(n), b - beta * np.log(d)), e)
    r = np.abs(prediction - np.log(loss))
    return np.where(r <= delta, r**2 / 2, delta * (r - delta / 2)).sum()


def test_chinchilla_points_as_scipy_from_many_starts(chinchilla):
    """An independent optimiser, given the objective at order one and tight tolerances."""
    n, d, loss = chinchilla
    fit = fit_parametric(n, d, loss, config=ParametricConfig(starts=64, bootstrap=0))
    best = np.inf
    for alpha, beta in ((0.3, 0.3), (0.35, 0.37), (0.5, 0.3)):
        start = [np.log(400), np.log(1500), 0.6, alpha, beta]
        for method in ("L-BFGS-B", "Nelder-Mead"):
            result = scipy.optimize.minimize(
                lambda t: 1e3 * scipy_objective(t, n, d, loss, 1e-3),
                start,
                method=method,
                options={"maxiter": 20_000, **({"ftol": 1e-15} if method == "L-BFGS-B" else {})},
            )
            start = result.x
        if result.fun < best:
            best, theta = result.fun, result.x
    assert fit["objective"] <= best / 1e3 * (1 + 1e-6)
    assert fit["alpha"] == pytest.approx(theta[3], rel=0.02)
    assert fit["beta"] == pytest.approx(theta[4], rel=0.02)
    # the neighbourhood of the published refit of these data (arXiv 2404.10102, unrounded points)
    assert 0.31 < fit["alpha"] < 0.38
    assert 0.31 < fit["beta"] < 0.40
    assert 1.75 < fit["E"] < 1.86


def test_reduction_order_and_units_do_not_move_the_optimum(chinchilla):
    n, d, loss = chinchilla
    base = fit_parametric(n, d, loss, config=ParametricConfig(starts=64, bootstrap=0))
    order = np.random.default_rng(0).permutation(len(n))
    mean = ParametricConfig(starts=64, bootstrap=0, reduction="mean")
    others = (
        fit_parametric(n, d, loss, config=mean),
        fit_parametric(n[order], d[order], loss[order], config=mean),
        fit_parametric(n / 1e6, d / 1e9, loss, config=mean),
    )
    for other in others:
        assert other["alpha"] == pytest.approx(base["alpha"], abs=1e-6)
        assert other["beta"] == pytest.approx(base["beta"], abs=1e-6)
        assert other["objective"] == pytest.approx(base["objective"] / len(n), rel=1e-9)


def test_tiny_delta_still_converges(chinchilla):
    """The fault of published fits: a small delta shrinks the objective under the tolerance."""
    n, d, loss = chinchilla
    config = ParametricConfig(starts=64, bootstrap=0, delta=1e-5)
    fit = fit_parametric(n, d, loss, config=config)
    assert fit["certificate"]["gradient"] < 1e-6
    theta = [
        np.log(fit["A"]),
        np.log(fit["B"]),
        np.log(fit["E"]),
        fit["alpha"],
        fit["beta"],
    ]
    here = scipy_objective(theta, n, d, loss, 1e-5)
    assert fit["objective"] == pytest.approx(here, rel=1e-9)
    rng = np.random.default_rng(0)
    for _ in range(200):  # no neighbour is better
        moved = theta + rng.normal(size=5) * 1e-4 * np.abs(theta)
        assert scipy_objective(moved, n, d, loss, 1e-5) >= here


def test_most_starts_agree(chinchilla):
    fit = fit_parametric(*chinchilla, config=ParametricConfig(starts=64, bootstrap=0))
    assert fit["certificate"]["starts_within_1pct"] >= 0.8


def test_interval_covers_the_truth_and_narrows_with_less_noise():
    n, d = grid()
    planted = {"E": 1.8, "A": 480.0, "B": 2000.0, "alpha": 0.35, "beta": 0.37}
    truth = predict_loss(planted, n, d)
    noise = np.random.default_rng(3).normal(size=len(n))
    widths = []
    for size in (0.002, 0.01):
        fit = fit_parametric(
            n, d, truth * np.exp(size * noise), config=ParametricConfig(starts=64, bootstrap=128)
        )
        low, high = fit["interval"]["alpha"]
        widths.append(high - low)
        assert low - 0.05 < planted["alpha"] < high + 0.05
        assert low <= fit["alpha"] <= high
    assert widths[0] < widths[1]


def test_too_few_runs_are_refused():
    with pytest.raises(ValueError, match="5 coefficients; got 5 runs"):
        fit_parametric(np.arange(1.0, 6), np.arange(1.0, 6), np.arange(1.0, 6))


@pytest.mark.parametrize(
    ("field", "value"), [("delta", 0.0), ("reduction", "max"), ("starts", 0), ("bootstrap", -1)]
)
def test_config_names_the_field(field, value):
    with pytest.raises(ValueError, match=field):
        ParametricConfig(**{field: value})
