"""What a plan costs on this machine, and budgets that fit the minutes that were asked for."""

import dataclasses
import time

import jax

from experiments.scaling.ladder import Plan, Point, SweepConfig, make_plan, scale_budgets
from experiments.scaling.progress import COMPILE_ALL, START_SECONDS, clock
from experiments.scaling.runs import Run, Seconds
from experiments.scaling.worker import DeviceData, measure_step, precompile

LEAST_SCALE = 0.25  # budgets are not scaled below this part of what was asked
EVAL_SHARE = 1 / 3  # a held-out token costs a forward pass, a third of a training token
MEASURED_FLOPS = 2e10  # of one step that a CPU is timed with, at most
MARGIN = 1.15  # workers share caches and memory; the measurement ran alone


def plan_for_machine(
    config: SweepConfig, data: DeviceData
) -> tuple[Plan, float, dict[str, Seconds]]:
    """A plan that fits `max_minutes` here, the factor on its budgets, and seconds per point.

    Budgets shrink to `LEAST_SCALE` at most: a smaller sweep would be another experiment, so it is
    left as it is and takes longer than asked; its plan says how long.
    """
    begun = time.monotonic()
    tokens = len(data.dataset.train)
    rates: dict[tuple, tuple[float, float]] = {}
    scale = 1.0
    for _ in range(4):
        plan = make_plan(scale_budgets(config, scale), corpus_tokens=tokens)
        estimate = estimate_seconds(plan, data, rates)
        total = total_seconds({k: sum(s) for k, s in estimate.items()}, config.workers)
        room = 60 * config.max_minutes - (time.monotonic() - begun)
        if total <= room or scale <= LEAST_SCALE:
            break
        # Leave what does not shrink with the budgets (compiling, evaluating) out of the ratio.
        fixed = total_seconds({k: sum(s[1:]) for k, s in estimate.items()}, config.workers)
        share = min(0.9, (0.95 * room - fixed) / max(total - fixed, 1e-9))
        scale = max(LEAST_SCALE, float(f"{scale * max(share, 0.01):.2g}"))
    return plan, scale, estimate


def estimate_seconds(
    plan: Plan, data: DeviceData, rates: dict[tuple, tuple[float, float]]
) -> dict[str, Seconds]:
    """Seconds of one worker for each point, from a measured step.

    On a GPU every shape is measured (utilisation differs by a factor of 5 between sizes, and the
    programs are needed anyway); on a CPU one middle shape stands for all. Compiling is charged to
    the point of a shape that a worker takes first, the largest.
    """
    on_cpu = jax.default_backend() == "cpu"
    shapes = {p.shape: p for p in sorted(plan.points, key=lambda p: p.flops_per_token)}
    new = [p for shape, p in shapes.items() if shape not in rates]
    if on_cpu:
        new = [] if rates else [_quick_to_measure(new[len(new) // 2])]
    else:
        precompile(new, data)
    for point in new:
        step, compiling = measure_step(point, data)
        step_flops = point.flops_per_token * point.batch_size * point.seq_len
        rates[point.shape] = (step / step_flops, COMPILE_ALL * compiling if on_cpu else 0.0)
    seconds, seen = {}, set()
    for point in sorted(plan.points, key=lambda p: (-p.flops, p.id)):
        per_flop, compiling = rates.get(point.shape) or next(iter(rates.values()))
        evaluation = EVAL_SHARE * point.flops_per_token * point.heldout_tokens * per_flop
        seconds[point.id] = Seconds(
            training=MARGIN * per_flop * point.flops,
            compiling=0.0 if point.shape in seen else MARGIN * compiling,
            evaluation=MARGIN * evaluation,
        )
        seen.add(point.shape)
    return seconds


def _quick_to_measure(point: Point) -> Point:
    """The point, or the same with smaller batches if one step would take a CPU many seconds."""
    sequence_flops = point.flops_per_token * point.seq_len
    return dataclasses.replace(
        point, batch_size=max(1, min(point.batch_size, int(MEASURED_FLOPS / sequence_flops)))
    )


def total_seconds(seconds: dict[str, float], workers: int) -> float:
    """Wall time: work shared by the workers, but never less than the longest point."""
    start = START_SECONDS if workers > 1 else 0.0
    return start + max(sum(seconds.values()) / workers, max(seconds.values()))


def plan_table(run: Run) -> str:
    """The grid and its cost as text: a table, then what to know about it, then the total."""
    workers, limit = run.config.workers, run.config.max_minutes
    seconds = {k: sum(s) for k, s in run.estimate.items()}
    total = total_seconds(seconds, workers)
    compiling = max(s.compiling for s in run.estimate.values())
    notes = list(run.plan.notes)
    if run.scale != 1:
        notes.append(
            f"budgets are {run.scale:g} of what was asked, to fit --max-minutes {limit:g} at the "
            "rate measured here"
        )
    if total > 60 * limit:
        notes.append(f"this is slower than --max-minutes {limit:g}: a busy machine?")
    lines = _grid(run)
    if compiling:
        lines.append(
            f"* about {compiling:.1f} of these seconds compile: the first of a size to be trained "
            "does it for all of that size"
        )
    lines += [f"- {note}" for note in notes]
    lines.append(
        f"{len(run.plan.points)} points, {run.plan.flops:.3g} FLOPs on {run.dataset['name']} "
        f"({run.dataset['train_tokens']:,} training tokens), about {clock(total)} with "
        f"{workers} worker{'s' if workers > 1 else ''}, compiling "
        + ("included" if compiling else "done before")
    )
    return "\n".join(lines)


def _grid(run: Run) -> list[str]:
    """One line per point under a header; a star where the seconds hold compiling."""
    header = ("point", "N", "D", "D/N", "steps", "epochs", "lr", "FLOPs", "seconds")
    rows = [
        (
            p.id,
            f"{p.params:,}",
            f"{p.tokens:,}",
            f"{p.tokens / p.params:.3g}",
            f"{p.steps:,}",
            f"{p.tokens / run.dataset['train_tokens']:.2f}",
            f"{p.lr:.2g}",
            f"{p.flops:.3g}",
            f"{sum(cost):.1f}" + ("*" if cost.compiling else " "),
        )
        for p in run.plan.points
        for cost in (run.estimate[p.id],)
    ]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return lines
