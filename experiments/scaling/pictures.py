"""Pictures of a sweep: IsoFLOP curves, both power laws, the loss surface, training curves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, NullFormatter

from experiments.scaling.fit import Points
from experiments.scaling.parametric import predict_loss

STYLE: dict[Any, Any] = {
    "font.size": 10.5,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.dpi": 110,
    "savefig.dpi": 160,
}
REFUSED = "0.6"  # grey: a curve without a usable minimum
N_COLOUR, D_COLOUR = "#31688e", "#b5367a"


def scientific(value: float) -> str:
    """A number as mathtext: 3.16e15 becomes $3.2 \\times 10^{15}$."""
    exponent = int(np.floor(np.log10(value * 1.005)))  # 9.96 and up reads as 10
    mantissa = value / 10.0**exponent
    if abs(mantissa - 1) < 0.05:
        return f"$10^{{{exponent}}}$"
    return f"${mantissa:.2g} \\times 10^{{{exponent}}}$"


def short(value: float) -> str:
    """A count for reading: 12345 becomes 12.3k.

    >>> short(12345), short(3.2e6)
    ('12.3k', '3.2M')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _colours(count: int) -> list:
    return list(matplotlib.colormaps["viridis"](np.linspace(0.08, 0.82, count)))


def _figure(columns: int, width: float, height: float) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _count_axis(axis) -> None:
    """Plain counts (20k, 3M) on a logarithmic axis, enough of them to read a value off."""
    low, high = axis.get_view_interval()
    steps = (1, 2, 5) if high / low < 300 else (1,)
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    ticks = [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]
    axis.set_ticks(ticks, labels=[short(t) for t in ticks])
    axis.set_minor_formatter(NullFormatter())


def draw_isoflop(path: Path, points: Points, isoflop: dict, *, bits: float | None) -> None:
    """Loss against size at each budget, with the local parabola, its minimum and its interval.

    Args:
      path: PNG to write.
      points: finished runs, with budgets.
      isoflop: the `isoflop` entry of a fit.
      bits: factor from nats per token to bits per byte for a second axis, or None.
    """
    with matplotlib.rc_context(STYLE):
        figure, (ax,) = _figure(1, 8.2, 5.4)
        entries = isoflop["budgets"]
        outside = False
        for entry, colour in zip(entries, _colours(len(entries)), strict=True):
            rows = points.budget == entry["budget"]
            usable = entry["n_opt"] is not None
            note = "" if usable else " (no usable minimum)"
            label = f"C = {scientific(entry['budget'])} FLOPs{note}"
            shade = colour if usable else REFUSED
            size, loss = points.params[rows], points.loss[rows]
            inside = _in_window(size, entry)
            outside |= not inside.all()
            ax.scatter(size[inside], loss[inside], s=42, color=shade, label=label, zorder=3)
            ax.scatter(size[~inside], loss[~inside], s=38, fc="white", ec=shade, lw=1.4, zorder=3)
            if usable:
                _draw_parabola(ax, entry, colour)
        ax.set_xscale("log")
        margin = 0.08 * max(np.ptp(points.loss), 1e-3)
        limits = (points.loss.min() - 1.5 * margin, points.loss.max() + margin)
        _count_axis(ax.xaxis)
        ax.set_xlabel("model size N (parameters in blocks and head)")
        ax.set_ylabel("held-out loss (nats per token)")
        ax.set_title("IsoFLOP curves")
        ax.plot(
            [], [], "*", ms=12, color="#f0b429", mec="0.3", label="minimum, interval on the axis"
        )
        if outside:
            ax.plot([], [], "o", mfc="white", mec="0.3", label="run outside the local fit")
        ax.legend(loc="upper right")
        ax.set_ylim(*limits)
        if bits is not None:
            right = ax.secondary_yaxis("right", functions=_proportional(bits))
            right.set_ylabel("bits per byte")
            right.spines["right"].set_visible(True)
        figure.savefig(path)


def _proportional(factor: float) -> tuple[Any, Any]:
    return (lambda y: y * factor, lambda y: y / factor)


def _in_window(params: np.ndarray, entry: dict) -> np.ndarray:
    """Which runs the parabola was fitted to; all of them when it was refused."""
    if entry["n_opt"] is None:
        return np.ones(len(params), bool)
    low, high = entry["parabola"]["n_range"]
    return (params >= low * (1 - 1e-9)) & (params <= high * (1 + 1e-9))


def _draw_parabola(ax: Axes, entry: dict, colour: object) -> None:
    shape = entry["parabola"]
    low, high = np.log(shape["n_range"])
    z = np.linspace(low, high, 100) - shape["log_centre"]
    c0, c1, c2 = shape["coefficients"]
    ax.plot(np.exp(z + shape["log_centre"]), c0 + c1 * z + c2 * z * z, color=colour, lw=1.6)
    n_opt, loss = entry["n_opt"], entry["loss"]
    ax.plot(n_opt, loss, "*", ms=15, color="#f0b429", mec=colour, mew=1.2, zorder=5)
    if entry["interval"]:
        # the interval under the star, where the star does not hide it
        foot = ax.get_xaxis_transform()
        ax.plot([n_opt, n_opt], [0, loss], ":", color=colour, lw=1, zorder=1)
        ax.plot(
            entry["interval"]["n_opt"],
            [0.015] * 2,
            color=colour,
            lw=5,
            transform=foot,
            solid_capstyle="butt",
        )


def draw_power_laws(path: Path, isoflop: dict) -> None:
    """N_opt and D_opt against compute, log-log, with fitted lines and 90% bands."""
    used = [e for e in isoflop["budgets"] if e["n_opt"] is not None]
    panels = (
        ("n_opt", "N", "a", "coefficient_n", "optimal size N (parameters)", N_COLOUR),
        ("d_opt", "D", "b", "coefficient_d", "optimal training tokens D", D_COLOUR),
    )
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(2, 10.4, 4.6)
        for ax, (key, letter, name, coefficient, label, colour) in zip(axes, panels, strict=True):
            budgets = np.array([e["budget"] for e in used])
            values = np.array([e[key] for e in used])
            if isoflop["a"] is not None:
                _draw_law(ax, isoflop, key, name, coefficient, letter, colour, budgets)
            intervals = [
                e["interval"][key] if e["interval"] else [v, v]
                for e, v in zip(used, values, strict=True)
            ]
            low, high = np.array(intervals).reshape(-1, 2).T
            errors = [np.maximum(values - low, 0), np.maximum(high - values, 0)]
            ax.errorbar(
                budgets,
                values,
                errors,
                fmt="o",
                ms=7,
                color=colour,
                capsize=4,
                zorder=4,
                mec="white",
                label="minimum of a budget (90% interval)",
            )
            ax.set_xscale("log")
            ax.set_yscale("log")
            _count_axis(ax.yaxis)
            ax.set_xlabel("training compute C (FLOPs)")
            ax.set_ylabel(label)
            ax.set_title(f"{letter}$_{{opt}}$(C)")
            ax.legend(loc="upper left")
        figure.savefig(path)


def _draw_law(ax, isoflop, key, name, coefficient, letter, colour, budgets) -> None:
    band = isoflop["band"]
    end = band["flops"][-1] if band else 10 * budgets.max()
    measured = np.array([budgets.min() / 2, budgets.max()])
    beyond = np.array([budgets.max(), end])
    for x, style in ((measured, "-"), (beyond, "--")):
        ax.plot(x, isoflop[coefficient] * x ** isoflop[name], style, color=colour, lw=1.6)
    interval = isoflop["interval"]
    spread = f" [{interval[name][0]:.2f}, {interval[name][1]:.2f}]" if interval else ""
    text = f"{letter}$_{{opt}}$ ∝ C$^{{{name}}}$,  {name} = {isoflop[name]:.3f}{spread}"
    ax.plot([], [], color=colour, lw=1.6, label=text)
    if band:
        low, high = band[key]
        ax.fill_between(band["flops"], low, high, color=colour, alpha=0.15, lw=0, label="90% band")


def draw_surface(path: Path, points: Points, parametric: dict) -> None:
    """Contours of the fitted loss over N and D with the runs, and measured against fitted loss."""
    with matplotlib.rc_context(STYLE):
        figure, (ax, check) = _figure(2, 10.4, 4.6)
        n = np.geomspace(points.params.min() / 2, points.params.max() * 2, 120)
        d = np.geomspace(points.tokens.min() / 2, points.tokens.max() * 2, 120)
        grid = predict_loss(parametric, *np.meshgrid(n, d, indexing="ij"))
        low, high = points.loss.min(), points.loss.max()
        levels = np.linspace(low - 0.05 * (high - low), high, 12)
        lines = ax.contour(n, d, grid.T, levels=levels, cmap="viridis", linewidths=1)
        ax.clabel(lines, fmt="%.2f", fontsize=8)
        dots = ax.scatter(
            points.params,
            points.tokens,
            c=points.loss,
            cmap="viridis",
            s=48,
            edgecolor="white",
            zorder=3,
        )
        figure.colorbar(dots, ax=ax, label="held-out loss (nats per token)")
        ax.set_xscale("log")
        ax.set_yscale("log")
        _count_axis(ax.xaxis)
        _count_axis(ax.yaxis)
        ax.set_xlabel("model size N (parameters)")
        ax.set_ylabel("training tokens D")
        ax.set_title("L = E + A/N$^α$ + B/D$^β$")
        fitted = predict_loss(parametric, points.params, points.tokens)
        check.axline((low, low), slope=1, color="0.6", lw=1)
        check.scatter(fitted, points.loss, s=42, color=N_COLOUR, zorder=3)
        worst = np.abs(points.loss / fitted - 1).max()
        check.set_xlabel("fitted loss (nats per token)")
        check.set_ylabel("measured loss (nats per token)")
        check.set_title(f"Fit against runs: largest error {worst:.1%}")
        figure.savefig(path)


def draw_curves(path: Path, curves: Sequence[tuple[float | None, np.ndarray, np.ndarray]]) -> None:
    """Training loss against compute, one line a run.

    Args:
      path: PNG to write.
      curves: (budget, FLOPs spent, training loss) of each run.
    """
    budgets = sorted({b for b, _, _ in curves if b is not None})
    colours = dict(zip(budgets, _colours(len(budgets)), strict=True))
    with matplotlib.rc_context(STYLE):
        figure, (ax,) = _figure(1, 8.2, 4.8)
        for budget, flops, loss in curves:
            colour = N_COLOUR if budget is None else colours[budget]
            ax.plot(flops, loss, color=colour, lw=1, alpha=0.75)
        for budget in budgets:
            ax.plot([], [], color=colours[budget], label=f"C = {scientific(budget)} FLOPs")
        ax.set_xscale("log")
        if all((loss > 0).all() for _, _, loss in curves):
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(FormatStrFormatter("%.2g"))
            ax.yaxis.set_minor_formatter(FormatStrFormatter("%.2g"))
        ax.set_xlabel("training compute spent (FLOPs)")
        ax.set_ylabel("training loss (nats per token)")
        ax.set_title("Training curves")
        if budgets:
            ax.legend()
        figure.savefig(path)
