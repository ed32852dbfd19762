"""What a run is going to do, before it does it: a table and a picture of its schedules."""

from pathlib import Path

import jax
import numpy as np

from experiments.training.config import TrainConfig
from experiments.training.schedule import learning_rate
from models.rope_scaling import RopeScaling


def schedule_table(config: TrainConfig) -> str:
    """The phases of a run and its learning rates at the turning points, as text."""
    lines = ["from batch   sequences x tokens   tokens a batch   RoPE base   extension"]
    for phase in config.curriculum().phases:
        lines.append(
            f"{phase.start:>10,}   {phase.batch_size:>9,} x {phase.seq_len:<6,}   "
            f"{phase.tokens:>14,}   {phase.rope_theta:>9,.0f}   {scaling_label(phase.rope_scaling)}"
        )
    schedule = config.schedule.make()
    start = int(schedule.total_steps - schedule.cooldown_steps)
    points = {0, int(schedule.warmup_steps), start, int(schedule.total_steps) - 1}
    lines.append("step and learning rate:")
    for step in sorted(s for s in points if 0 <= s < schedule.total_steps):
        lines.append(f"{step:>10,}   {float(learning_rate(schedule, step)):.3e}")
    return "\n".join(lines)


def scaling_label(scaling: RopeScaling | None) -> str:
    """A context extension in a word: its type and factor.

    >>> scaling_label(RopeScaling(type="linear", factor=4.0)), scaling_label(None)
    ('linear x4', 'none')
    """
    if scaling is None:
        return "none"
    return scaling.type if scaling.factor is None else f"{scaling.type} x{scaling.factor:g}"


def plot_schedule(config: TrainConfig, path: Path) -> None:
    """Write learning rate, tokens of a batch and sequence length over the steps as a PNG.

    Without skipped batches, step and data index are the same.
    """
    from matplotlib.figure import Figure

    schedule, curriculum = config.schedule.make(), config.curriculum()
    steps = np.unique(np.linspace(0, schedule.total_steps - 1, 2000, dtype=np.int64))
    rates = jax.jit(jax.vmap(learning_rate, in_axes=(None, 0)))(schedule, steps)
    phases = [curriculum.phase_at(int(s)) for s in steps]
    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    rows = (
        ("learning rate", rates),
        ("tokens a batch", [p.tokens for p in phases]),
        ("tokens a sequence", [p.seq_len for p in phases]),
    )
    for axis, (label, values) in zip(axes, rows, strict=True):
        axis.plot(steps, values)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    for phase in curriculum.phases[1:]:
        axes[2].axvline(phase.start, color="grey", linewidth=0.5)
    axes[2].set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
