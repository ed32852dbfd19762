"""From finished runs to `fit.json`: checks, the IsoFLOP fit, the parametric fit, what to doubt.

Losses in a fit must be comparable: final (fully decayed), on the same held-out tokens, in one
unit. A row that cannot be used is left out with a warning that names it; nothing is dropped
silently, and nothing is invented: a result that the data do not support is None.
"""

import csv
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from experiments.scaling.isoflop import fit_isoflop
from experiments.scaling.parametric import ParametricConfig, fit_parametric

REQUIRED = ("params", "tokens", "loss")
OPTIONAL = ("flops", "budget", "seed")
LETTERS = {"params": "N", "tokens": "D", "flops": "C"}  # also taken, as the papers write them
SAME_BUDGET = 0.02  # without a budget column, FLOPs this close count as one budget


@dataclass(frozen=True)
class FitConfig:
    """Options of both fits."""

    delta: float = 1e-3  # Huber threshold on the log loss
    reduction: str = "sum"  # of the Huber terms: "sum" or "mean"; the optimum is the same
    starts: int = 256  # starts of the parametric fit
    bootstrap: int = 1000  # resamples behind every interval; 0 for none
    seed: int = 0  # of the resampling

    def __post_init__(self) -> None:
        ParametricConfig(**asdict(self))  # one place checks the fields


@dataclass(frozen=True)
class Points:
    """Finished runs as columns; `rows` says where each came from (file row or point id)."""

    params: Float[np.ndarray, "P"]  # N
    tokens: Float[np.ndarray, "P"]  # D
    loss: Float[np.ndarray, "P"]  # final held-out loss, one unit for all
    flops: Float[np.ndarray, "P"] | None = None  # training FLOPs
    budget: Float[np.ndarray, "P"] | None = None  # planned FLOPs: equal values are one curve
    seed: Float[np.ndarray, "P"] | None = None
    rows: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.loss)

    def __getitem__(self, keep: np.ndarray) -> "Points":
        columns = {
            name: value[keep]
            for name in REQUIRED + OPTIONAL
            if (value := getattr(self, name)) is not None
        }
        return Points(**columns, rows=tuple(r for r, k in zip(self.rows, keep, strict=True) if k))


def make_points(table: dict[str, list], rows: list[str]) -> Points:
    """Points from columns of numbers; missing optional columns stay None."""
    columns = {k: np.asarray(v, np.float64) for k, v in table.items() if k in REQUIRED + OPTIONAL}
    return Points(**columns, rows=tuple(rows))


def _column(name: str, header: list[str], given: dict[str, str]) -> str:
    """The header's name of a column: what the caller said, ours, or the papers' letter."""
    if name in given:
        return given[name]
    letter = LETTERS.get(name, name)
    return letter if name not in header and letter in header else name


def read_points(path: Path, *, names: dict[str, str] | None = None) -> Points:
    """Read a CSV with columns params, tokens, loss and optionally flops, budget, seed.

    Args:
      path: the file; other columns are ignored.
      names: names in the file for columns that are called otherwise there.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a column is missing, a cell is not a number, or there are no rows; the message
        names the column and the line.
    """
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        header = [name.strip() for name in reader.fieldnames or []]
        reader.fieldnames = header
        names = {name: _column(name, header, names or {}) for name in REQUIRED + OPTIONAL}
        missing = [names[name] for name in REQUIRED if names[name] not in header]
        if missing:
            raise ValueError(
                f"{path}: no column {', '.join(missing)}; the header is "
                f"{', '.join(header) or 'empty'}. Needed: {', '.join(REQUIRED)}; optional: "
                f"{', '.join(OPTIONAL)}. Other names: --columns params=YOURS tokens=YOURS"
            )
        present = [name for name in REQUIRED + OPTIONAL if names[name] in header]
        table: dict[str, list] = {name: [] for name in present}
        for line, row in enumerate(reader, start=2):
            for name in present:
                table[name].append(
                    _number(row[names[name]], f"{path}, line {line}, column {names[name]}")
                )
    count = len(table["loss"])
    if not count:
        raise ValueError(f"{path}: no rows below the header")
    return make_points(table, [f"line {i + 2}" for i in range(count)])


def _number(text: str | None, where: str) -> float:
    try:
        return float(text or "")
    except ValueError:
        raise ValueError(f"{where}: {text!r} is not a number") from None


def fit_points(points: Points, *, config: FitConfig | None = None) -> dict:
    """Fit finished runs: IsoFLOP minima with their power laws, and the parametric surface.

    Args:
      points: the runs.
      config: options of both fits.

    Returns:
      A JSON-ready dict: `parametric` (see `fit_parametric`; None when it cannot be fitted),
      `isoflop` (see `fit_isoflop`; None without budgets), `warnings` [{code, message, rows?}],
      `points` (how many were used), `config`.
    """
    config = config or FitConfig()
    points, warnings = _usable(points)
    points, more = _with_budgets(points)
    warnings += more
    isoflop = None
    if points.budget is not None and len(points):
        isoflop, more = fit_isoflop(
            points.params,
            points.tokens,
            points.loss,
            points.budget,
            bootstrap=config.bootstrap,
            seed=config.seed,
        )
        warnings += more
    parametric, more = _parametric(points, config)
    warnings += more
    warnings += _disagreement(isoflop, parametric)
    return {
        "parametric": parametric,
        "isoflop": isoflop,
        "warnings": warnings,
        "points": len(points),
        "config": asdict(config),
    }


def _usable(points: Points) -> tuple[Points, list[dict]]:
    """Leave out rows that cannot enter a logarithm, and say which."""
    warnings = []
    bad_loss = ~(np.isfinite(points.loss) & (points.loss > 0))
    bad_size = ~(np.isfinite(points.params * points.tokens) & (points.params > 0))
    bad_size |= ~(points.tokens > 0)
    for bad, code, what in (
        (bad_loss, "non_finite_loss", "the loss is not a positive finite number (diverged?)"),
        (bad_size & ~bad_loss, "bad_size", "params or tokens is not a positive finite number"),
    ):
        if bad.any():
            rows = [r for r, b in zip(points.rows, bad, strict=True) if b]
            message = f"left out {bad.sum()} of {len(points)} runs: {what}: {', '.join(rows)}"
            warnings.append({"code": code, "message": message, "rows": rows})
    points = points[~(bad_loss | bad_size)]
    return points, warnings + _duplicates(points) + _flop_units(points)


def _duplicates(points: Points) -> list[dict]:
    seed = points.seed if points.seed is not None else np.zeros(len(points))
    seen: dict[tuple, str] = {}
    repeats = []
    for row, *key in zip(points.rows, points.params, points.tokens, seed, points.loss, strict=True):
        if tuple(key) in seen:
            repeats.append(row)
        seen.setdefault(tuple(key), row)
    if not repeats:
        return []
    message = f"{len(repeats)} rows repeat another exactly and count twice: {', '.join(repeats)}"
    return [{"code": "duplicate_rows", "message": message, "rows": repeats}]


def _flop_units(points: Points) -> list[dict]:
    if points.flops is None or not len(points):
        return []
    ratio = 6 * points.params * points.tokens / points.flops
    odd = ~((ratio >= 0.5) & (ratio <= 2))
    if not odd.any():
        return []
    rows = [r for r, o in zip(points.rows, odd, strict=True) if o]
    message = (
        f"6 N D / FLOPs is {ratio[odd].min():.2g} to {ratio[odd].max():.2g} in {odd.sum()} rows, "
        "outside 0.5 to 2: N, D and FLOPs may be counted by different conventions"
    )
    return [{"code": "flop_units", "message": message, "rows": rows}]


def _with_budgets(points: Points) -> tuple[Points, list[dict]]:
    """Group runs into budgets when the column is missing but the FLOPs are clearly grouped."""
    if points.budget is not None or not len(points):
        return points, []
    flops = points.flops if points.flops is not None else 6 * points.params * points.tokens
    order = np.argsort(flops)
    starts = np.concatenate([[True], np.diff(np.log(flops[order])) > SAME_BUDGET])
    group = np.empty(len(points), int)
    group[order] = np.cumsum(starts) - 1
    members = [flops[group == g] for g in range(group.max() + 1)]
    grouped = all(len(m) >= 3 and np.log(m.max() / m.min()) <= SAME_BUDGET for m in members)
    if not grouped:
        message = "no budget column and FLOPs that do not form groups: IsoFLOP fit skipped"
        return points, [{"code": "no_budgets", "message": message}]
    budget = np.array([np.exp(np.log(members[g]).mean()) for g in group])
    columns = {name: getattr(points, name) for name in (*REQUIRED, "flops", "seed")}
    return Points(**columns, budget=budget, rows=points.rows), []


def _parametric(points: Points, config: FitConfig) -> tuple[dict | None, list[dict]]:
    distinct = min(len(np.unique(points.params)), len(np.unique(points.tokens)))
    if len(points) < 6 or distinct < 3:
        message = (
            f"the parametric form needs at least 6 runs with 3 sizes and 3 token counts; got "
            f"{len(points)} runs, {len(np.unique(points.params))} sizes, "
            f"{len(np.unique(points.tokens))} token counts"
        )
        return None, [{"code": "parametric_unidentified", "message": message}]
    result = fit_parametric(
        points.params, points.tokens, points.loss, config=ParametricConfig(**asdict(config))
    )
    warnings = []
    certificate = result["certificate"]
    weak = [k for k in ("alpha", "beta") if not 0.02 <= result[k] <= 2]
    if weak or abs(certificate["correlation_alpha_beta"]) > 0.98:
        message = (
            "the runs do not identify the surface: "
            + (f"{', '.join(weak)} at an extreme; " if weak else "")
            + f"correlation of alpha and beta {certificate['correlation_alpha_beta']:.3f}. "
            "Do not read its exponents; add runs with other tokens per parameter"
        )
        warnings.append({"code": "parametric_unidentified", "message": message})
    if result["E"] < 0.05 * points.loss.min():
        message = (
            f"E = {result['E']:.2g} is near 0: the runs are too far from the irreducible loss to "
            "tell it from zero; extrapolate with care"
        )
        warnings.append({"code": "irreducible_near_zero", "message": message})
    if certificate["gradient"] > 1e-4:
        message = f"not converged: scaled gradient {certificate['gradient']:.1e}; raise starts"
        warnings.append({"code": "not_converged", "message": message})
    return result, warnings


def _disagreement(isoflop: dict | None, parametric: dict | None) -> list[dict]:
    """Warn when the 90% intervals of `a` of the two approaches do not meet."""
    intervals = [fit and fit.get("interval") for fit in (isoflop, parametric)]
    if not all(intervals):
        return []
    (low2, high2), (low3, high3) = (i["a"] for i in intervals if i)
    if low2 <= high3 and low3 <= high2:
        return []
    message = (
        f"the exponent a is {low2:.3f} to {high2:.3f} by IsoFLOP minima and {low3:.3f} to "
        f"{high3:.3f} by the parametric fit (90%): one of them is biased"
    )
    return [{"code": "approaches_disagree", "message": message}]
