"""The picture of a long-context evaluation: loss by position above, passkey retrieval below."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the picture of what `long_context.measure` returned."""
    variants = result["variants"]
    figure = Figure(figsize=(max(7.0, 2.4 * len(variants)), 6.4), layout="constrained")
    rows: Any = figure.subfigures(2, 1, height_ratios=(1.3, 1))
    _losses(rows[0].subplots(), result)
    cells = rows[1].subplots(1, len(variants), sharey=True, squeeze=False)[0]
    image = None
    for axis, variant in zip(cells, variants, strict=True):
        image = _passkey(axis, variant, result)
    cells[0].set_ylabel("depth of the passkey")
    rows[1].colorbar(image, ax=list(cells), label="passkeys found", ticks=(0, 0.5, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def _losses(axis: Axes, result: dict[str, Any]) -> None:
    colours = colormaps["viridis"](np.linspace(0.05, 0.85, len(result["variants"])))
    for variant, colour in zip(result["variants"], colours, strict=True):
        edges = np.array(variant["positions"]["edges"])
        middles, loss = (edges[:-1] + edges[1:]) / 2, np.array(variant["positions"]["loss"])
        axis.plot(middles, loss, color=colour, label=variant["name"])
        errors = variant["positions"]["standard_error"]
        if errors is not None:
            around = np.array(errors)
            axis.fill_between(middles, loss - around, loss + around, color=colour, alpha=0.2, lw=0)
    axis.axvline(result["trained_len"], color="grey", linewidth=0.8, linestyle="--")
    axis.set_title(
        f"Held-out loss by position ({result['windows']} windows, ± standard error; dashed: "
        f"trained length {result['trained_len']:,})",
        loc="left", fontsize=10,
    )  # fmt: skip
    axis.set_xlabel("position")
    axis.set_ylabel("loss (nats a token)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)


def _passkey(axis: Axes, variant: dict[str, Any], result: dict[str, Any]) -> Any:
    lengths, depths = result["lengths"], result["depths"]
    by_cell = {(c["length"], c["depth"]): c["accuracy"] for c in variant["passkey"]}
    grid = np.array([[by_cell[length, depth] for length in lengths] for depth in depths])
    image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for (i, j), value in np.ndenumerate(grid):
        dark = value < 0.6
        axis.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7,
                  color="white" if dark else "black")  # fmt: skip
    axis.set_title(variant["name"], fontsize=8.5)
    axis.set_xticks(range(len(lengths)), [f"{x:,}" for x in lengths], fontsize=8)
    axis.set_yticks(range(len(depths)), [f"{d:g}" for d in depths], fontsize=8)
    axis.set_xlabel("prompt tokens", fontsize=8.5)
    return image
