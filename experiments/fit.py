"""Fit a scaling law to finished runs: python -m experiments.fit POINTS.csv [--json] [options].

The CSV has columns params, tokens, loss (final held-out loss, one unit for all rows) and, if
known, flops, budget (planned FLOPs: equal values form one IsoFLOP curve) and seed.

    python -m experiments.fit experiments/scaling/data/chinchilla_points_rounded.csv \\
        --columns params=N tokens=D flops=C
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from experiments.console import run_main
from experiments.scaling.fit import FitConfig, fit_points, read_points


@dataclass(frozen=True)
class FitOptions:
    """Fit a scaling law to finished runs."""

    points: Annotated[Path, tyro.conf.Positional]  # CSV of finished runs
    json: bool = False  # print one JSON object and nothing else on standard output
    columns: tuple[str, ...] = ()  # other names of columns, as ours=theirs: params=N tokens=D
    fit: Annotated[FitConfig, tyro.conf.OmitArgPrefixes] = field(default_factory=FitConfig)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = tyro.cli(FitOptions, args=argv, prog="experiments.fit", description=__doc__)
    try:
        result = fit_points(read_points(options.points, names=_names(options)), config=options.fit)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=1, allow_nan=False) if options.json else describe(result))
    if result["parametric"] is None and result["isoflop"] is None:
        print("error: nothing could be fitted; the warnings say why", file=sys.stderr)
        return 1
    return 0


def _names(options: FitOptions) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in options.columns]
    wrong = [ours + sign + theirs for ours, sign, theirs in pairs if not (ours and theirs)]
    if wrong:
        raise ValueError(f"columns must be OURS=THEIRS, for example params=N; got {wrong[0]!r}")
    return {ours: theirs for ours, _, theirs in pairs}


def describe(result: dict) -> str:
    """The fit as text: coefficients with intervals, minima, warnings."""
    lines = [f"{result['points']} runs"]
    parametric, isoflop = result["parametric"], result["isoflop"]
    if parametric:
        lines.append("L = E + A/N^alpha + B/D^beta (90% interval):")
        lines += [_line(key, parametric) for key in ("E", "A", "B", "alpha", "beta", "a", "b")]
        proof = parametric["certificate"]
        lines.append(
            f"  objective {parametric['objective']:.6e}; {proof['starts_within_1pct']:.0%} of "
            f"{proof['starts']} starts within 1% of it; gradient {proof['gradient']:.0e}"
        )
    if isoflop:
        lines.append("IsoFLOP minima:")
        for entry in isoflop["budgets"]:
            if entry["n_opt"] is None:
                lines.append(f"  {entry['refused']}")
                continue
            lines.append(
                f"  C {entry['budget']:.3g}: N_opt {entry['n_opt']:.3g}, D_opt "
                f"{entry['d_opt']:.3g}, loss {entry['loss']:.4f}"
            )
        if isoflop["a"] is not None:
            lines += [_line("a", isoflop), _line("b", isoflop)]
    lines += [f"warning ({w['code']}): {w['message']}" for w in result["warnings"]]
    return "\n".join(lines)


def _line(key: str, fit: dict) -> str:
    interval = fit["interval"]
    spread = f"  [{interval[key][0]:.5g}, {interval[key][1]:.5g}]" if interval else ""
    return f"  {key:<6} {fit[key]:.6g}{spread}"


if __name__ == "__main__":
    sys.exit(run_main(main))
