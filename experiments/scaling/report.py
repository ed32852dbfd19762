"""`report.html`: the sweep on one page that needs no other file."""

import base64
import html
import json
from pathlib import Path

import numpy as np

from experiments.scaling import pictures
from experiments.scaling.fit import Points
from experiments.scaling.ladder import ENOUGH_BUDGETS, ENOUGH_SIZES, Plan
from experiments.scaling.runs import Run, collect_points
from experiments.training.checkpoint import read_json, write_atomic

CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.headline { font-size: 1.25rem; background: #f0f4f8; border-left: 4px solid #31688e;
            padding: .7rem 1rem; }
.warning { background: #fff6e5; border-left: 4px solid #d98c00; padding: .35rem 1rem;
           margin: .3rem 0; }
.note { color: #555; } img { max-width: 100%; } code { background: #f4f4f4; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
"""


# What the fit warns about for want of sizes and budgets alone.
EXPECTED_OF_SMOKE = frozenset(
    {
        *("off_centre", "edge_minimum", "too_few_sizes", "no_residuals"),
        *("two_budgets", "too_few_budgets", "parametric_unidentified", "irreducible_near_zero"),
    }
)


def describe_warnings(plan: Plan, fit: dict) -> tuple[list[str], str | None]:
    """The fit's warnings, and a line on those at the end that so small a plan always has.

    The line is None unless the plan is a smoke test (`Plan.is_smoke`) and has such warnings;
    others, such as a diverged run, come first and are not excused.
    """
    expected = [w for w in fit["warnings"] if plan.is_smoke and w["code"] in EXPECTED_OF_SMOKE]
    others = [w for w in fit["warnings"] if w not in expected]
    messages = [w["message"] for w in (*others, *expected)]
    if not expected:
        return messages, None
    budgets, sizes = len(plan.sizes_by_budget), max(map(len, plan.sizes_by_budget.values()))
    which = "all warnings above are" if not others else f"the last {len(expected)} warnings are"
    return messages, (
        f"{which} expected of so small a plan (budgets: {budgets}, sizes: {sizes}), which tests "
        f"that everything works; with {ENOUGH_BUDGETS} budgets or {ENOUGH_SIZES} sizes they count"
    )


def write_report(run: Run, fit: dict) -> Path:
    """Draw the pictures and write `report.html` into the run's folder; returns its path."""
    points = collect_points(run)
    keep = np.isfinite(points.loss)
    pngs = _draw(run, points[keep], fit)
    machine = read_json(run.folder / "config.json")["machine"]
    warnings, excuse = describe_warnings(run.plan, fit)
    sections = [
        f"<h1>Scaling law: {html.escape(run.folder.name)}</h1>",
        f"<p class=note>{len(run.plan.points)} runs, {run.plan.flops:.3g} FLOPs, on "
        f"{html.escape(run.dataset['name'])} ({run.dataset['train_tokens']:,} training tokens, "
        f"vocabulary {run.dataset['vocab_size']}), {html.escape(machine['device'])}, "
        f"jax {machine['jax']}</p>",
        f"<p class=headline>{html.escape(headline(fit))}</p>",
        *(f"<p class=warning>{html.escape(message)}</p>" for message in warnings),
        *([f"<p class=note>{html.escape(excuse)}</p>"] if excuse else []),
        "<h2>IsoFLOP minima</h2>",
        _budget_table(fit["isoflop"]),
        *(_image(path, text) for path, text in pngs),
        "<h2>Parametric fit</h2>",
        _parametric_table(fit["parametric"]),
        "<h2>Runs</h2>",
        _run_table(run),
        "<h2>How it was made</h2>",
        _conventions(),
        f"<pre>{html.escape(json.dumps(_settings(run), indent=1))}</pre>",
    ]
    page = (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport "
        f'content="width=device-width"><title>{html.escape(run.folder.name)}</title>'
        f"<style>{CSS}</style>{''.join(sections)}</html>"
    )
    path = run.folder / "report.html"
    write_atomic(path, page.encode())
    return path


def headline(fit: dict) -> str:
    """Both exponents with intervals, or why there are none."""
    isoflop = fit["isoflop"]
    if isoflop is None or isoflop["a"] is None:
        why = [e["refused"] for e in (isoflop or {"budgets": []})["budgets"] if "refused" in e]
        return "exponents not determined: " + ("; ".join(why) or "no IsoFLOP curves")
    interval = isoflop["interval"]
    a, b = (
        f"{isoflop[k]:.3f}" + (f" [{interval[k][0]:.3f}, {interval[k][1]:.3f}]" if interval else "")
        for k in ("a", "b")
    )
    return f"N_opt ∝ C^a with a = {a},  D_opt ∝ C^b with b = {b}" + (" (90%)" if interval else "")


def summary_line(path: Path, fit: dict) -> str:
    """The last line that a sweep prints: the report and the two exponents."""
    return f"report: {path}   {headline(fit)}"


def _draw(run: Run, points: Points, fit: dict) -> list[tuple[Path, str]]:
    """Write the PNGs that the data allow; path and caption of each."""
    drawn = []
    isoflop, parametric = fit["isoflop"], fit["parametric"]
    if isoflop and len(points):
        bits = 1 / np.log(2) / run.dataset["bytes_per_token"]
        path = run.folder / "isoflop.png"
        pictures.draw_isoflop(path, points, isoflop, bits=bits)
        drawn.append(
            (
                path,
                "Each dot is a run; stars are minima of the local parabolas, bars on the axis "
                "their 90% intervals; hollow runs lie outside the local fit.",
            )
        )
        if any(e["n_opt"] is not None for e in isoflop["budgets"]):
            path = run.folder / "power_laws.png"
            pictures.draw_power_laws(path, isoflop)
            drawn.append((path, "Power laws through the minima, dashed where extrapolated."))
    if parametric and len(points):
        path = run.folder / "surface.png"
        pictures.draw_surface(path, points, parametric)
        drawn.append((path, "The parametric loss surface with the runs on it."))
    curves = _curves(run)
    if curves:
        path = run.folder / "curves.png"
        pictures.draw_curves(path, curves)
        drawn.append(
            (
                path,
                "Training loss, mean of each chunk of steps; the drop at the end of "
                "every curve is the cooldown.",
            )
        )
    return drawn


def _curves(run: Run) -> list[tuple[float | None, np.ndarray, np.ndarray]]:
    curves = []
    for point in run.plan.points:
        path = run.point_folder(point) / "metrics.jsonl"
        if not path.exists():
            continue
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows = [r for r in rows if r["loss"] is not None]
        if rows:
            flops = np.array([r["tokens"] for r in rows]) * point.flops_per_token
            curves.append((point.budget, flops, np.array([r["loss"] for r in rows])))
    return curves


def _image(path: Path, caption: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,{data}">'
        f"<figcaption class=note>{html.escape(caption)}</figcaption></figure>"
    )


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return f"<table>{line(header, 'th')}{''.join(line(r, 'td') for r in rows)}</table>"


def _budget_table(isoflop: dict | None) -> str:
    if not isoflop:
        return "<p>No budgets: runs do not form IsoFLOP curves.</p>"
    rows = []
    for entry in isoflop["budgets"]:
        budget = f"{entry['budget']:.3g}"
        if entry["n_opt"] is None:
            rows.append((budget, entry["refused"], *[""] * 5))
            continue
        ranges = [entry["interval"] and entry["interval"]["n_opt"], entry["flat_range"]["0.1%"]]
        cells = [" to ".join(map(pictures.short, r)) if r else "" for r in ranges]
        ratio = f"{entry['d_opt'] / entry['n_opt']:.3g}"
        n_opt, d_opt = pictures.short(entry["n_opt"]), pictures.short(entry["d_opt"])
        rows.append((budget, n_opt, cells[0], d_opt, ratio, f"{entry['loss']:.4f}", cells[1]))
    header = (
        "budget (FLOPs)",
        "N_opt",
        "90% interval",
        "D_opt",
        "D/N",
        "loss",
        "N within 0.1% of it",
    )
    return _table(header, rows)


def _parametric_table(parametric: dict | None) -> str:
    if not parametric:
        return "<p>Not fitted; see the warnings.</p>"
    interval = parametric["interval"] or {}
    rows = [
        (key, f"{parametric[key]:.4g}", " to ".join(f"{v:.4g}" for v in interval.get(key, ())))
        for key in ("E", "A", "B", "alpha", "beta", "a", "b")
    ]
    certificate = parametric["certificate"]
    return _table(("L = E + A/N^alpha + B/D^beta", "value", "90% interval"), rows) + (
        f"<p class=note>{certificate['starts_within_1pct']:.0%} of {certificate['starts']} starts "
        f"end within 1% of the best objective; scaled gradient there {certificate['gradient']:.1e};"
        f" correlation of alpha and beta {certificate['correlation_alpha_beta']:.2f}.</p>"
    )


def _run_table(run: Run) -> str:
    rows = []
    for p in run.plan.points:
        result = run.result(p)
        loss = result["loss"] if result else None
        state = (
            f"{loss:.4f}" if loss is not None else (result or {"status": "unfinished"})["status"]
        )
        numbers = (
            f"{p.params:,}",
            f"{p.tokens:,}",
            f"{p.flops:.3g}",
            f"{p.steps:,}",
            f"{p.lr:.2g}",
        )
        seconds = f"{result['seconds']:.1f}" if result else ""
        rows.append((p.id, *numbers, state, seconds))
    return _table(
        ("point", "N", "D", "FLOPs", "steps", "peak lr", "held-out loss", "seconds"), rows
    )


def _conventions() -> str:
    return (
        "<p class=note>N counts blocks and head. FLOPs are 6 per parameter and token plus causal "
        "attention counted once (half of all pairs). Every loss is the mean cross-entropy on the "
        "same held-out tokens after a full cooldown. Parabolas are fitted to the lowest point and "
        "two sizes on either side; intervals are from a residual bootstrap and hold for this "
        "recipe: they do not include a mistuned learning rate.</p>"
    )


def _settings(run: Run) -> dict:
    stored = read_json(run.folder / "config.json")
    return {k: stored[k] for k in ("config", "scale", "notes", "dataset", "machine")}
