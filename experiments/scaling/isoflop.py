"""Approach 2: the minimum of each IsoFLOP curve, and the power laws through the minima.

At a fixed budget C the loss of models of different size N is close to a parabola in log N near
its minimum (Hoffmann et al. 2022, arXiv 2203.15556, section 3.2). The vertex is N_opt(C), and

    N_opt(C) = k_N C^a,        D_opt(C) = k_D C^b.

A parabola through points far from the minimum, or through a curve whose minimum lies outside the
sizes that were run, bends the exponent without looking wrong. So a parabola is local (the lowest
point and two neighbours on either side), and a budget is refused, with the size to add, when

* its lowest loss is at the smallest or largest size,
* the parabola opens downwards, or
* its vertex lies outside the sizes it was fitted to.

Exponents a and b are fitted separately: D is not C / 6N once attention is counted.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

NEIGHBOURS = 2  # sizes on either side of the lowest that join the parabola
FLAT_LEVELS = (0.001, 0.005)  # relative excess loss that defines a flat range of N
BAND_POINTS = 33
BAND_REACH = 10.0  # the band is drawn to this many times the largest budget


@dataclass(frozen=True)
class Parabola:
    """One budget's runs near its minimum and L = c0 + c1 z + c2 z^2, z = log N - log centre."""

    budget: float
    log_centre: float
    z: np.ndarray  # of the runs in the window
    loss: np.ndarray
    tokens: np.ndarray
    coefficients: np.ndarray  # c0, c1, c2

    @property
    def vertex(self) -> float:
        """z of the minimum."""
        return float(-self.coefficients[1] / (2 * self.coefficients[2]))

    @property
    def minimum(self) -> float:
        """Loss at the vertex."""
        c0, c1, c2 = self.coefficients
        return float(c0 - c1**2 / (4 * c2))

    @property
    def fitted(self) -> np.ndarray:
        return _design(self.z) @ self.coefficients

    def log_tokens_at(self, z: Float[np.ndarray, "*R"] | float) -> np.ndarray:
        """log D at a size between those run, on the straight line through log N, log D."""
        order = np.argsort(self.z)
        return np.asarray(np.interp(z, self.z[order], np.log(self.tokens)[order]))


def fit_isoflop(
    params: Float[np.ndarray, "P"],
    tokens: Float[np.ndarray, "P"],
    loss: Float[np.ndarray, "P"],
    budget: Float[np.ndarray, "P"],
    *,
    bootstrap: int = 1000,
    seed: int = 0,
) -> tuple[dict, list[dict]]:
    """Fit a guarded parabola per budget and both power laws.

    Args:
      params: N of each run.
      tokens: D of each run.
      loss: final held-out loss of each run; several seeds of one (N, budget) may be given.
      budget: planned FLOPs of each run; equal values form one curve.
      bootstrap: residual resamples behind the 90% intervals; 0 for none.
      seed: of the resampling.

    Returns:
      A JSON-ready dict (`a`, `b`, `coefficient_n`, `coefficient_d`, `budgets`, `interval`,
      `band`; exponents are None with fewer than two usable budgets), and warnings
      `{code, message}`.
    """
    curves, entries, warnings = [], [], []
    for value in np.unique(budget):
        rows = budget == value
        curve, reason = _fit_curve(float(value), params[rows], tokens[rows], loss[rows])
        if curve is None:
            warnings.append(reason)
            entries.append({"budget": float(value), "refused": reason["message"], "n_opt": None})
            continue
        warnings += _doubts(curve)
        curves.append(curve)
        entries.append(_describe(curve))
    result = {"a": None, "b": None, "coefficient_n": None, "coefficient_d": None}
    result |= {"budgets": entries, "interval": None, "band": None}
    if len(curves) < 2:
        message = (
            f"{len(curves)} of {len(entries)} budgets have a usable minimum; an exponent needs 2"
        )
        return result, [*warnings, {"code": "too_few_budgets", "message": message}]
    if len(curves) == 2:
        message = "two budgets determine the power law exactly: its straightness is not tested"
        warnings.append({"code": "two_budgets", "message": message})
    log_c = np.log([c.budget for c in curves])
    vertices = np.array([[c.log_centre + c.vertex, c.log_tokens_at(c.vertex)] for c in curves])
    (a, b), (kn, kd) = _power_law(log_c, vertices)
    result |= {"a": a, "b": b, "coefficient_n": np.exp(kn), "coefficient_d": np.exp(kd)}
    if bootstrap:
        warnings += _add_intervals(result, curves, log_c, bootstrap, seed)
    return {k: float(v) if isinstance(v, np.floating) else v for k, v in result.items()}, warnings


def _design(z: np.ndarray) -> np.ndarray:
    return np.stack([np.ones_like(z), z, z**2], -1)


def _fit_curve(budget, params, tokens, loss) -> tuple[Parabola | None, dict]:
    """The local parabola of one budget, or None and the warning that says why not."""
    sizes = np.unique(params)
    label = f"budget {budget:.3g} FLOPs"
    if len(sizes) < 3:
        message = f"{label}: {len(sizes)} sizes; a parabola needs at least 3, better 5"
        return None, {"code": "too_few_sizes", "message": message}
    means = np.array([loss[params == n].mean() for n in sizes])
    best = int(means.argmin())
    if best in (0, len(sizes) - 1):
        side, step = (
            ("smallest", sizes[0] / sizes[1]) if best == 0 else ("largest", sizes[-1] / sizes[-2])
        )
        message = (
            f"{label}: the lowest loss is at the {side} size (N = {sizes[best]:.3g}), so the "
            f"minimum is not inside the grid; add a size near N = {sizes[best] * step:.2g}"
        )
        return None, {"code": "edge_minimum", "message": message}
    window = sizes[max(0, best - NEIGHBOURS) : best + NEIGHBOURS + 1]
    rows = np.isin(params, window)
    z = np.log(params[rows]) - np.log(sizes[best])
    coefficients, *_ = np.linalg.lstsq(_design(z), loss[rows], rcond=None)
    curve = Parabola(budget, float(np.log(sizes[best])), z, loss[rows], tokens[rows], coefficients)
    if coefficients[2] <= 0:
        message = (
            f"{label}: the parabola opens downwards; add sizes further from N = {sizes[best]:.3g}"
        )
        return None, {"code": "concave", "message": message}
    if not z.min() <= curve.vertex <= z.max():
        where = np.exp(curve.log_centre + curve.vertex)
        message = f"{label}: the vertex (N = {where:.3g}) is outside the sizes run; add one near it"
        return None, {"code": "vertex_outside", "message": message}
    return curve, {}


def _doubts(curve: Parabola) -> list[dict]:
    """Warnings about a curve that is used."""
    warnings = []
    label = f"budget {curve.budget:.3g} FLOPs"
    z = np.unique(curve.z)
    for side, count, edge, step in (
        ("below", (z < curve.vertex).sum(), z[0], z[0] - z[1]),
        ("above", (z > curve.vertex).sum(), z[-1], z[-1] - z[-2]),
    ):
        if count < 2:
            add = np.exp(curve.log_centre + edge + step)
            message = f"{label}: {count} size {side} the minimum; add one near N = {add:.2g}"
            warnings.append({"code": "off_centre", "message": message})
    r_squared = _r_squared(curve)
    if r_squared < 0.9:
        message = (
            f"{label}: the parabola explains {r_squared:.0%} of the variance (noise or too flat); "
            "add seeds or sizes"
        )
        warnings.append({"code": "poor_parabola", "message": message})
    return warnings


def _r_squared(curve: Parabola) -> float:
    spread = ((curve.loss - curve.loss.mean()) ** 2).sum()
    return float(1 - ((curve.loss - curve.fitted) ** 2).sum() / spread) if spread > 0 else 0.0


def _describe(curve: Parabola) -> dict:
    reach = {level: np.sqrt(level * curve.minimum / curve.coefficients[2]) for level in FLAT_LEVELS}
    centre = curve.log_centre + curve.vertex
    return {
        "budget": curve.budget,
        "n_opt": float(np.exp(centre)),
        "d_opt": float(np.exp(curve.log_tokens_at(curve.vertex))),
        "loss": curve.minimum,
        "r_squared": _r_squared(curve),
        "parabola": {
            "log_centre": curve.log_centre,
            "coefficients": [float(c) for c in curve.coefficients],
            "n_range": [
                float(np.exp(curve.log_centre + z)) for z in (curve.z.min(), curve.z.max())
            ],
            "runs": len(curve.z),
        },
        # sizes whose loss is within this fraction of the minimum: how sharp N_opt really is
        "flat_range": {
            f"{level:.1%}": [float(np.exp(centre - half)), float(np.exp(centre + half))]
            for level, half in reach.items()
        },
        "interval": None,
    }


def _power_law(log_c: np.ndarray, logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slopes and intercepts of least-squares lines through `logs` (..., budgets, 2) on log C."""
    x = log_c - log_c.mean()
    slope = np.einsum("c,...ck->...k", x, logs) / (x @ x)
    return slope, logs.mean(-2) - slope * log_c.mean()


def _add_intervals(result, curves, log_c, count, seed) -> list[dict]:
    """Residual bootstrap over the parabolas: 90% intervals and the bands of both power laws."""
    freedom = sum(len(c.z) - 3 for c in curves)
    if freedom < 1:
        message = "every parabola has 3 runs and no residual: no interval; add sizes or seeds"
        return [{"code": "no_residuals", "message": message}]
    residuals = np.concatenate([c.loss - c.fitted for c in curves])
    residuals = residuals * np.sqrt(len(residuals) / freedom)  # undo what the fits absorbed
    rng = np.random.default_rng(seed)
    logs = np.empty((count, len(curves), 2))
    for i, curve in enumerate(curves):
        noisy = curve.fitted + rng.choice(residuals, size=(count, len(curve.z)))
        c = noisy @ np.linalg.pinv(_design(curve.z)).T
        with np.errstate(divide="ignore", invalid="ignore"):
            vertex = -c[:, 1] / (2 * c[:, 2])
        usable = (c[:, 2] > 0) & (vertex >= curve.z.min()) & (vertex <= curve.z.max())
        vertex = np.where(usable, vertex, np.nan)
        logs[:, i, 0] = curve.log_centre + vertex
        logs[:, i, 1] = np.where(usable, curve.log_tokens_at(np.nan_to_num(vertex)), np.nan)
    used = [e for e in result["budgets"] if e["n_opt"] is not None]
    for entry, draws in zip(used, np.moveaxis(logs, 1, 0), strict=True):
        low, high = np.exp(np.nanpercentile(draws, [5, 95], axis=0))
        entry["interval"] = {
            "n_opt": [float(low[0]), float(high[0])],
            "d_opt": [float(low[1]), float(high[1])],
        }
    kept = ~np.isnan(logs).any((1, 2))
    slopes, offsets = _power_law(log_c, logs[kept])
    result["interval"] = {
        "level": 0.9,
        "resamples": count,
        "kept": float(kept.mean()),
        "a": [float(q) for q in np.percentile(slopes[:, 0], [5, 95])],
        "b": [float(q) for q in np.percentile(slopes[:, 1], [5, 95])],
    }
    result["band"] = _band(log_c, slopes, offsets)
    if kept.mean() < 0.95:
        message = (
            f"{1 - kept.mean():.0%} of the resamples lose the minimum of a budget: the noise is "
            "large against the curvature, and intervals are too narrow; add sizes or seeds"
        )
        return [{"code": "fragile_minimum", "message": message}]
    return []


def _band(log_c: np.ndarray, slopes: np.ndarray, offsets: np.ndarray) -> dict:
    """90% range of both power laws over compute, from below the budgets to `BAND_REACH` above."""
    grid = np.linspace(log_c.min() - np.log(2), log_c.max() + np.log(BAND_REACH), BAND_POINTS)
    lines = np.exp(offsets[:, None] + slopes[:, None] * grid[:, None])
    low, high = np.percentile(lines, [5, 95], axis=0)
    return {
        "flops": np.exp(grid).tolist(),
        "n_opt": [low[:, 0].tolist(), high[:, 0].tolist()],
        "d_opt": [low[:, 1].tolist(), high[:, 1].tolist()],
    }
