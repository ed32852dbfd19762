"""The main job: plan an IsoFLOP grid -> train every point -> fit the scaling law -> report.

    python -m experiments.sweep [run|plan|status|fit|report|work] [--preset cpu|gpu|smoke] [options]

    run     (default) plan if the folder is new, train what is unfinished, fit, report
    plan    show the grid and what it costs on this machine; writes nothing
    status  how far a sweep is
    fit     fit what is finished again, and report; `report` is the same
    work    join a sweep under way as one more worker

A killed sweep continues when the same command is given again.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import tyro

from experiments.configs.sweeps import PRESETS
from experiments.console import run_main
from experiments.data import CorpusError, TokenDataset, load_dataset
from experiments.scaling import progress, runs
from experiments.scaling.backend import set_up_jax
from experiments.scaling.estimate import plan_for_machine, plan_table
from experiments.scaling.fit import FitConfig, fit_points
from experiments.scaling.ladder import SweepConfig
from experiments.scaling.report import describe_warnings, summary_line, write_report
from experiments.scaling.runs import Run, SweepError
from experiments.scaling.worker import DeviceData, Stopped, work
from experiments.training.checkpoint import read_json, write_json

ROOT = Path(__file__).resolve().parents[1]
VERBS = ("run", "plan", "status", "fit", "report", "work")


@dataclasses.dataclass(frozen=True)
class FolderOptions:
    """Options of the verbs that work on an existing folder."""

    out: str = "runs/sweep"  # folder of the sweep
    bootstrap: int | None = None  # resamples; None: as the sweep says
    delta: float | None = None  # Huber threshold; None: as the sweep says
    parent: int | None = None  # work: stop when this process is no longer the parent


def main(argv: list[str] | None = None) -> int:
    """Run one verb; returns the exit code. Expected failures print one line, not a traceback."""
    args = list(sys.argv[1:] if argv is None else argv)
    verb = args.pop(0) if args and not args[0].startswith("-") else "run"
    if verb not in VERBS:
        print(f"error: unknown command {verb!r}; choose from {', '.join(VERBS)}", file=sys.stderr)
        return 2
    set_up_jax()
    try:
        if verb in ("run", "plan"):
            config = parse_config(args)
            return run_sweep(config) if verb == "run" else show_plan(config)
        options = tyro.cli(FolderOptions, args=args, prog=f"experiments.sweep {verb}")
        run = runs.open_run(Path(options.out))
        return {"status": status, "fit": refit, "report": refit, "work": join}[verb](run, options)
    except Stopped:
        return 130
    except KeyboardInterrupt:
        print("\nstopped; the same command continues", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise  # `run_main` ends it quietly
    except (SweepError, CorpusError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def parse_config(args: list[str]) -> SweepConfig:
    """The preset (chosen for this machine unless named) with the fields that the options set."""
    name = "auto"
    for i, arg in enumerate(args):
        if arg == "--preset" or arg.startswith("--preset="):
            given = arg.split("=", 1)[1:] or args[i + 1 : i + 2]
            name = given[0] if given else ""
            args = args[:i] + args[i + (1 if "=" in arg else 2) :]
            break
    if name == "auto":
        name = "gpu" if jax.default_backend() == "gpu" else "cpu"
    if name not in PRESETS:
        raise ValueError(f"--preset must be auto, {', '.join(PRESETS)}; got {name!r}")
    return tyro.cli(
        SweepConfig,
        args=args,
        default=PRESETS[name](),
        prog="experiments.sweep",
        description=f"{__doc__}\n\nDefaults below are those of --preset {name}.",
    )


def run_sweep(config: SweepConfig) -> int:
    """The whole story."""
    begun = time.monotonic()
    data = DeviceData(open_data(config))
    with runs.exclusive(Path(config.out)):
        run = open_or_create(config, data)
    train_all(run, data, workers=config.workers)
    result = fit_run(run, FitConfig(delta=config.delta, bootstrap=config.bootstrap))
    path = write_report(run, result)
    print(f"done in {progress.clock(time.monotonic() - begun)}")
    print(summary_line(path, result))
    return 0


def open_or_create(config: SweepConfig, data: DeviceData) -> Run:
    """The run in the sweep's folder, planned now if there is none."""
    folder = Path(config.out)
    if (folder / "config.json").exists():
        run = runs.open_run(folder)
        runs.check_same_sweep(run, config)
        runs.check_same_data(run, data.dataset)
        print(
            f"{folder}: continuing, {len(run.unfinished())} of {len(run.plan.points)} points left"
        )
        return run
    plan, scale, estimate = plan_for_machine(config, data)
    run = runs.create_run(config, plan, scale=scale, estimate=estimate, dataset=data.dataset)
    print(plan_table(run))
    return run


def open_data(config: SweepConfig) -> TokenDataset:
    """The corpus of a sweep; auto is ./corpus when it was built, else the sample."""
    corpus = config.corpus
    if corpus == "auto":
        corpus = "corpus" if Path("corpus/manifest.json").exists() else "sample"
    return load_dataset(corpus, vocab_size=config.vocab_size)


def show_plan(config: SweepConfig) -> int:
    dataset = open_data(config)
    plan, scale, estimate = plan_for_machine(config, DeviceData(dataset))
    described = runs.describe_dataset(dataset)
    print(plan_table(Run(Path(config.out), config, plan, scale, described, estimate)))
    return 0


# ---- training --------------------------------------------------------------------------------


def train_all(run: Run, data: DeviceData, *, workers: int) -> None:
    """Finish every point, in this process or in several.

    Raises:
      SweepError: a worker failed, or points are unfinished because another process holds them.
    """
    if not run.unfinished():
        return
    workers = min(workers, len(run.unfinished()))
    with progress.Watcher(run, workers=workers):
        if workers == 1:
            work(run, data)
        else:
            _run_workers(run, workers)
    left = run.unfinished()
    if left:
        raise SweepError(
            f"{len(left)} points are held by another process ({left[0].id}, ...); when it is done "
            "give the same command again"
        )


def _run_workers(run: Run, count: int) -> None:
    if jax.default_backend() != "cpu":
        raise SweepError(
            "--workers above 1 is for CPUs: this process already holds the GPU. For one worker "
            "per GPU start `python -m experiments.sweep work` with CUDA_VISIBLE_DEVICES set"
        )
    command = [sys.executable, "-m", "experiments.sweep", "work", "--out", str(run.folder)]
    command += ["--parent", str(os.getpid())]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    logs = [run.folder / f"worker-{i}.log" for i in range(count)]
    children = []
    try:
        for log in logs:
            with open(log, "w") as file:
                children.append(subprocess.Popen(command, env=env, stdout=file, stderr=file))
        while any(child.poll() is None for child in children):
            time.sleep(0.2)
            failed = [i for i, child in enumerate(children) if child.poll()]
            if failed:
                tail = logs[failed[0]].read_text(errors="replace").strip().splitlines()[-3:]
                raise SweepError(
                    f"a worker failed (exit code {children[failed[0]].returncode}, see "
                    f"{logs[failed[0]]}): {' | '.join(tail) or 'no output'}. Finished points are "
                    "kept; the same command continues"
                )
    finally:
        for child in children:
            if child.poll() is None:
                child.terminate()
        for child in children:
            child.wait()


def join(run: Run, options: FolderOptions) -> int:
    """Be one more worker of a sweep."""
    dataset = open_data(run.config)
    runs.check_same_data(run, dataset)
    # A scheduler's notice, or the death of the sweep that started this: save and go.
    noticed = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: noticed.set())

    def stop() -> bool:
        orphaned = options.parent is not None and os.getppid() != options.parent
        return noticed.is_set() or orphaned

    work(run, DeviceData(dataset), stop=stop)
    return 0


# ---- after training --------------------------------------------------------------------------


def fit_run(run: Run, config: FitConfig) -> dict:
    """Fit the finished points and write fit.json.

    Raises:
      SweepError: nothing is finished.
    """
    points = runs.collect_points(run)
    if not len(points):
        raise SweepError(f"{run.folder}: no point is finished, nothing to fit")
    result = fit_points(points, config=config)
    write_json(run.folder / "fit.json", result)
    warnings, excuse = describe_warnings(run.plan, result)
    for message in warnings:
        print(f"warning: {message}")
    if excuse:
        print(f"note: {excuse}")
    return result


def refit(run: Run, options: FolderOptions) -> int:
    """Fit and report again, with other fit options if given."""
    config = FitConfig(
        delta=options.delta or run.config.delta,
        bootstrap=run.config.bootstrap if options.bootstrap is None else options.bootstrap,
    )
    result = fit_run(run, config)
    print(summary_line(write_report(run, result), result))
    return 0


def status(run: Run, _: FolderOptions) -> int:
    """One line per point, and how far the whole is."""
    now = progress.standing(run)
    for point in run.plan.points:
        result = run.result(point)
        if result is None:
            state = f"{run.steps_done(point):,}/{point.steps:,} steps"
        else:
            loss = result["loss"]
            state = result["status"] if loss is None else f"loss {loss:.4f}"
        print(f"{point.id:<24} {state}")
    share = now.work_done / now.work
    print(f"{now.points_done} of {now.points} points, {share:.0%} of the work ({run.folder})")
    if (run.folder / "fit.json").exists() and now.points_done == now.points:
        print(summary_line(run.folder / "report.html", read_json(run.folder / "fit.json")))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
