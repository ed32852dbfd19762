"""Approach 3: the parametric loss surface L(N, D) = E + A / N^alpha + B / D^beta.

Hoffmann et al. 2022 (arXiv 2203.15556, section 3.3 and appendix D.3) minimise

    sum_i  Huber_delta( log L_hat(N_i, D_i) - log L_i ),
    log L_hat = LSE( a - alpha log N,  b - beta log D,  e ),    A = e^a, B = e^b, E = e^e.

Published fits of this form differ mostly because the optimiser stopped early: with delta = 1e-3
the objective is near 1e-3 and its gradient near 1e-6, which quasi-Newton defaults take for
convergence (arXiv 2404.10102). What is done about that here:

* log N and log D are centred, which takes the 5-parameter Hessian's condition number down by
  orders of magnitude;
* starts come from variable projection: alpha and beta are spread over a box, and E, A, B are the
  linear least-squares solution there;
* every iteration tries a Gauss-Newton step with Huber weights (safe far away) and a Newton step
  with the exact Hessian (quadratic close by), both damped relative to their own diagonal, and
  takes the better. Nothing in it depends on the scale of the objective, so `sum` and `mean`
  reduction, and any delta, end at the same place;
* delta is lowered in stages, so that a start far away sees a smooth objective first;
* the result carries a certificate: gradient, share of starts that agree, conditioning.

All starts, and all bootstrap resamples, run as one vmapped program in float64 on the CPU.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Floors on delta and most iterations of each stage: far away the objective is made smooth first.
FLOORS = (1e-1, 3e-2, 1e-2, 3e-3, 0.0)
ITERATIONS = (30, 15, 15, 15, 150)
STALL = 8  # iterations without progress after which a start has arrived
ALPHA_BOX = (0.05, 1.5)  # where starts for alpha and beta are spread
EXPONENT_BOX = (0.005, 4.0)  # where alpha and beta may go
SMALL_SAMPLE = 30  # fewer runs than this: resample residuals instead of runs


@dataclass(frozen=True)
class ParametricConfig:
    """How to fit the surface. Defaults are Hoffmann's delta and enough starts to certify."""

    delta: float = 1e-3  # Huber threshold on the log loss
    reduction: str = "sum"  # "sum" or "mean": scales the reported objective, nothing else
    starts: int = 256  # variable-projection starts
    bootstrap: int = 1000  # resamples behind the intervals; 0 for none
    seed: int = 0  # of the resampling

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise ValueError(f"delta must be positive, got {self.delta}; Hoffmann used 1e-3")
        if self.reduction not in ("sum", "mean"):
            raise ValueError(f"reduction must be 'sum' or 'mean', got {self.reduction!r}")
        if self.starts < 1:
            raise ValueError(f"starts must be at least 1, got {self.starts}")
        if self.bootstrap < 0:
            raise ValueError(f"bootstrap must be 0 or more, got {self.bootstrap}")


def predict_loss(
    surface: dict, params: Float[np.ndarray, "P"], tokens: Float[np.ndarray, "P"]
) -> Float[np.ndarray, "P"]:
    """Loss of a fitted surface, L = E + A / N^alpha + B / D^beta.

    Args:
      surface: mapping with E, A, B, alpha, beta (the `parametric` entry of a fit).
      params: N, number of parameters.
      tokens: D, number of training tokens.

    Returns:
      Loss in the unit of the fitted points.

    >>> surface = {"E": 1.0, "A": 2.0, "B": 4.0, "alpha": 1.0, "beta": 0.5}
    >>> predict_loss(surface, np.array([2.0]), np.array([16.0]))
    array([3.])
    """
    params, tokens = np.asarray(params, np.float64), np.asarray(tokens, np.float64)
    return (
        surface["E"]
        + surface["A"] * params ** -surface["alpha"]
        + surface["B"] * tokens ** -surface["beta"]
    )


def fit_parametric(
    params: Float[np.ndarray, "P"],
    tokens: Float[np.ndarray, "P"],
    loss: Float[np.ndarray, "P"],
    *,
    config: ParametricConfig | None = None,
) -> dict:
    """Fit L = E + A / N^alpha + B / D^beta by Huber loss on log L.

    Args:
      params: N of each run.
      tokens: D of each run.
      loss: final held-out loss of each run, positive and finite.
      config: threshold, starts and resamples.

    Returns:
      A JSON-ready dict: `E, A, B, alpha, beta`; `a = beta / (alpha + beta)` and
      `b = alpha / (alpha + beta)`, the exponents of N_opt and D_opt in compute; `objective`;
      `certificate`; `interval` with the 90% interval of each (None without bootstrap).

    Raises:
      ValueError: fewer than 6 runs (5 coefficients need one more to leave a residual).
    """
    config = config or ParametricConfig()
    params, tokens, loss = (np.asarray(v, np.float64) for v in (params, tokens, loss))
    if len(loss) < 6:
        raise ValueError(f"the parametric form has 5 coefficients; got {len(loss)} runs, need >= 6")
    x, y, log_loss = np.log(params), np.log(tokens), np.log(loss)
    centre = np.array([x.mean(), y.mean()])
    data = (x - centre[0], y - centre[1])
    with jax.enable_x64(True), jax.default_device(_host()):
        starts = _projection_starts(*data, loss, config.starts)
        weight = np.ones((len(starts), len(loss)))
        targets = np.broadcast_to(log_loss, weight.shape)
        thetas, values = (
            np.asarray(v) for v in _solve(starts, *data, targets, weight, config.delta, 0)
        )
        best = thetas[np.nanargmin(values)]
        result = _named(best, centre)
        result["objective"] = float(np.nanmin(values)) / (
            len(loss) if config.reduction == "mean" else 1
        )
        result["certificate"] = _certificate(best, thetas, values, *data, log_loss, config.delta)
        result["interval"] = _intervals(best, centre, *data, log_loss, config)
    return result


def _host() -> Any:
    """The CPU, where float64 is fast; the default device when JAX_PLATFORMS leaves the CPU out."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return jax.devices()[0]


def _projection_starts(x: np.ndarray, y: np.ndarray, loss: np.ndarray, count: int) -> np.ndarray:
    """Starts (count, 5) in (a, b, e, alpha, beta): a lattice in alpha, beta; E, A, B projected."""
    lattice = (
        np.arange(count)[:, None] * np.array([0.7548776662, 0.5698402910]) % 1.0
    )  # R2 sequence
    low, high = np.log(ALPHA_BOX)
    alpha, beta = np.exp(low + lattice * (high - low)).T
    columns = np.stack(
        [np.exp(-alpha[:, None] * x), np.exp(-beta[:, None] * y), np.ones((count, len(x)))], -1
    )
    weighted = columns / loss[:, None]  # relative errors are what the log loss will see
    gram = np.einsum("spi,spj->sij", weighted, weighted) + 1e-9 * np.eye(3)
    linear = np.linalg.solve(gram, weighted.sum(1)[..., None])[..., 0]
    floor = 1e-2 * loss.min()  # a negative coefficient has no logarithm: start it small
    return np.column_stack([np.log(np.maximum(linear, floor)), alpha, beta])


def _huber(r: Array, delta: float) -> Array:
    size = jnp.abs(r)
    return jnp.where(size <= delta, 0.5 * r * r, delta * (size - 0.5 * delta))


def _residual(theta: Array, x: Array, y: Array, log_loss: Array) -> tuple[Array, Array]:
    """Residuals (P,) of the log loss and the share (3, P) that each term has of the loss."""
    a, b, e, alpha, beta = theta
    terms = jnp.stack([a - alpha * x, b - beta * y, jnp.full_like(x, e)])
    prediction = jax.scipy.special.logsumexp(terms, axis=0)
    return prediction - log_loss, jnp.exp(terms - prediction)


def _objective(theta, x, y, log_loss, weight, delta):
    return jnp.sum(weight * _huber(_residual(theta, x, y, log_loss)[0], delta))


def _derivatives(theta, x, y, log_loss, weight, delta):
    """Gradient, Huber-weighted Gauss-Newton matrix and exact Hessian, all in closed form.

    With shares p_k of the three terms t_k (linear in theta with rows T_k), the log-sum-exp has
    gradient J = sum_k p_k T_k and Hessian sum_k p_k T_k T_k' - J J'.
    """
    r, (pa, pb, pe) = _residual(theta, x, y, log_loss)
    jac = jnp.stack([pa, pb, pe, -x * pa, -y * pb])
    inside = jnp.abs(r) <= delta
    slope = weight * jnp.clip(r, -delta, delta)
    curve = weight * jnp.where(inside, 1.0, delta / jnp.maximum(jnp.abs(r), delta))
    gauss_newton = (jac * curve) @ jac.T
    sa, sb = slope * pa, slope * pb
    zero = jnp.zeros(())
    second = jnp.array(
        [
            [sa.sum(), zero, zero, -(sa @ x), zero],
            [zero, sb.sum(), zero, zero, -(sb @ y)],
            [zero, zero, (slope * pe).sum(), zero, zero],
            [-(sa @ x), zero, zero, sa @ (x * x), zero],
            [zero, -(sb @ y), zero, zero, sb @ (y * y)],
        ]
    )
    hessian = (jac * (weight * inside - slope)) @ jac.T + second
    return jac @ slope, gauss_newton, hessian


def _solve_positive(matrix: Array, rhs: Array) -> Array:
    """Cholesky solve, unrolled so that thousands of 5x5 systems vectorise; NaN if indefinite."""
    n = rhs.shape[0]
    lower: list[list[Array]] = [[jnp.zeros(())] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            rest = matrix[i, j] - sum(
                (lower[i][k] * lower[j][k] for k in range(j)), start=jnp.zeros(())
            )
            lower[i][j] = jnp.sqrt(rest) if i == j else rest / lower[j][j]
    z: list[Array] = []
    for i in range(n):
        z.append((rhs[i] - sum(lower[i][k] * z[k] for k in range(i))) / lower[i][i])
    out: list[Array] = [jnp.zeros(())] * n
    for i in reversed(range(n)):
        out[i] = (z[i] - sum(lower[k][i] * out[k] for k in range(i + 1, n))) / lower[i][i]
    return jnp.stack(out)


def _box(log_loss: Array) -> tuple[Array, Array]:
    """Bounds on theta: a term is e^-30 of the loss at least, e^3 times it at most, when centred.

    Only data that do not identify the surface reach them; without bounds those would overflow.
    """
    low = jnp.stack([jnp.min(log_loss) - 30.0] * 3 + [jnp.asarray(EXPONENT_BOX[0])] * 2)
    high = jnp.stack([jnp.max(log_loss) + 3.0] * 3 + [jnp.asarray(EXPONENT_BOX[1])] * 2)
    return low, high


def _iterate(carry, x, y, log_loss, weight, delta):
    low, high = _box(log_loss)
    theta, damping, stall = carry
    value = _objective(theta, x, y, log_loss, weight, delta)
    gradient, gauss_newton, hessian = _derivatives(theta, x, y, log_loss, weight, delta)
    scale = jnp.diag(jnp.diag(gauss_newton) + 1e-12 * jnp.trace(gauss_newton))
    candidates = jnp.stack(
        [
            theta - _solve_positive(gauss_newton + damping * scale, gradient),
            theta - _solve_positive(hessian + damping * scale, gradient),
        ]
    )
    candidates = jnp.clip(candidates, low, high)
    values = jax.vmap(lambda t: _objective(t, x, y, log_loss, weight, delta))(candidates)
    values = jnp.where(jnp.isnan(values), jnp.inf, values)
    pick = jnp.argmin(values)
    better = values[pick] < value
    theta = jnp.where(better, candidates[pick], theta)
    damping = jnp.clip(jnp.where(better, damping / 5, damping * 4), 1e-12, 1e8)
    stall = jnp.where(values[pick] < value * (1 - 1e-12), 0, stall + 1)
    return theta, damping, stall


@jax.jit
def _solve(starts, x, y, log_losses, weights, delta, first_stage):
    """Minimise from each start (S, 5) on its own targets and weights (S, P)."""
    floors, iterations = jnp.asarray(FLOORS), jnp.asarray(ITERATIONS)

    def one(theta, log_loss, weight):
        def run_stage(stage, theta):
            step = functools.partial(
                _iterate,
                x=x,
                y=y,
                log_loss=log_loss,
                weight=weight,
                delta=jnp.maximum(delta, floors[stage]),
            )
            _, (theta, _, _) = jax.lax.while_loop(
                lambda state: (state[0] < iterations[stage]) & (state[1][2] < STALL),
                lambda state: (state[0] + 1, step(state[1])),
                (jnp.asarray(0), (theta, jnp.asarray(1e-2), jnp.asarray(0))),
            )
            return theta

        theta = jax.lax.fori_loop(first_stage, len(FLOORS), run_stage, theta)
        return theta, _objective(theta, x, y, log_loss, weight, delta)

    return jax.vmap(one)(jnp.asarray(starts), jnp.asarray(log_losses), jnp.asarray(weights))


def _named(theta: np.ndarray, centre: np.ndarray) -> dict:
    a, b, e, alpha, beta = (float(v) for v in theta)
    return {
        "E": float(np.exp(e)),
        "A": float(np.exp(a + alpha * centre[0])),
        "B": float(np.exp(b + beta * centre[1])),
        "alpha": alpha,
        "beta": beta,
        "a": beta / (alpha + beta),
        "b": alpha / (alpha + beta),
    }


def _certificate(best, thetas, values, x, y, log_loss, delta) -> dict:
    """Evidence that `best` is the optimum: see the keys' comments."""
    weight = np.ones_like(log_loss)
    gradient, gauss_newton, _ = (
        np.asarray(v) for v in _derivatives(jnp.asarray(best), x, y, log_loss, weight, delta)
    )
    # A bound that the optimum lies on is not a slope left to descend.
    low, high = (np.asarray(v) for v in _box(jnp.asarray(log_loss)))
    held = ((best <= low) & (gradient > 0)) | ((best >= high) & (gradient < 0))
    gradient = np.where(held, 0.0, gradient)
    value = np.nanmin(values)
    floor = 1e-18 * len(log_loss)  # residuals of 1e-9 are rounding, not misfit
    agree = values <= 1.01 * value
    others = values[~agree & np.isfinite(values)]
    diagonal = np.sqrt(np.diag(gauss_newton))
    correlation = gauss_newton / np.outer(diagonal, diagonal)
    inverse = np.linalg.pinv(correlation)
    variance = inverse[3, 3] * inverse[4, 4]
    # no variance left means that the data do not tell the two apart at all
    joint = inverse[3, 4] / np.sqrt(variance) if variance > 0 else 1.0
    return {
        # slope in units where the Gauss-Newton diagonal is one, against the residuals' size
        "gradient": float(np.abs(gradient / diagonal).max() / np.sqrt(max(value, floor))),
        "starts": len(values),
        "starts_within_1pct": float(agree.mean()),
        "next_basin": float(others.min() / value) if len(others) and value > 0 else None,
        "condition_number": float(np.linalg.cond(correlation)),
        "correlation_alpha_beta": float(joint),
    }


def _resamples(best, x, y, log_loss, config) -> tuple[np.ndarray, np.ndarray]:
    """Targets and weights (R, P) of the bootstrap: whole runs, or residuals when runs are few."""
    rng = np.random.default_rng(config.seed)
    count, size = config.bootstrap, len(log_loss)
    residual = np.asarray(_residual(jnp.asarray(best), x, y, log_loss)[0])
    if size >= SMALL_SAMPLE:
        weights = rng.multinomial(size, np.full(size, 1 / size), size=count).astype(np.float64)
        return np.broadcast_to(log_loss, weights.shape), weights
    # Few planned runs: dropping runs would change the design, so keep it and resample the
    # residuals, inflated for the 5 degrees of freedom that the fit used.
    drawn = rng.choice(residual, size=(count, size)) * np.sqrt(size / (size - 5))
    return log_loss + residual - drawn, np.ones((count, size))


def _intervals(best, centre, x, y, log_loss, config) -> dict | None:
    if config.bootstrap == 0:
        return None
    targets, weights = _resamples(best, x, y, log_loss, config)
    starts = np.broadcast_to(best, (config.bootstrap, 5))
    # A resample starts at the optimum of the data: the last stage alone. Batches have the size of
    # the first call, so that its program serves.
    last, size, thetas = len(FLOORS) - 1, config.starts, []
    for i in range(0, config.bootstrap, size):
        batch = np.arange(i, i + size).clip(max=config.bootstrap - 1)
        args = (starts[batch], x, y, targets[batch], weights[batch], config.delta, last)
        thetas.append(np.asarray(_solve(*args)[0]))
    draws = [_named(t, centre) for t in np.concatenate(thetas)[: config.bootstrap]]
    return {
        "level": 0.9,
        "resamples": config.bootstrap,
        "resampled": "runs" if len(log_loss) >= SMALL_SAMPLE else "residuals",
        **{
            key: [float(q) for q in np.nanpercentile([d[key] for d in draws], [5, 95])]
            for key in ("E", "A", "B", "alpha", "beta", "a", "b")
        },
    }
