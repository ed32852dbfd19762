"""Train one model: kill it at any point, and the same command continues to the same bits.

    python -m experiments.train NAME [options]

    NAME              a named run of experiments/configs/train.py
    --plot-schedule   draw the schedules to a PNG and stop
    --init-from DIR   parameters of a run of ours or of a Hugging Face folder
    --branch-from DIR [--branch-step S] --schedule.cooldown-steps C --schedule.total-steps T
                      a cooldown from a state of another run

The folder `--out` holds config.json, metrics.jsonl, events.jsonl and checkpoints/.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import tyro

from experiments.configs.train import PRESETS
from experiments.console import run_main
from experiments.data import CorpusError, load_dataset
from experiments.training.config import TrainConfig
from experiments.training.plot import plot_schedule, schedule_table
from experiments.training.processes import join_processes
from experiments.training.run_checkpoints import CheckpointError
from experiments.training.run_folder import RunError

ABORTED = 3  # exit code of a run that spikes and rollbacks do not cure


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code. Expected failures print one line."""
    args = list(sys.argv[1:] if argv is None else argv)
    name = args.pop(0) if args and not args[0].startswith("-") else None
    if name not in PRESETS:
        wanted = f"unknown run {name!r}" if name else "name a run"
        print(f"error: {wanted}; choose from {', '.join(PRESETS)}\n\n{__doc__}", file=sys.stderr)
        return 0 if {"-h", "--help"} & set(args) else 2
    try:
        picture, args = take_option(args, "--plot-schedule")
        config = parse(name, args)
        if picture is not None:
            plot_schedule(config, Path(picture))
            print(f"{schedule_table(config)}\n{picture}")
            return 0
        return train(config)
    except KeyboardInterrupt:
        print("\nstopped; the same command continues", file=sys.stderr)
        return 130
    except (RunError, CheckpointError, CorpusError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def take_option(args: list[str], option: str) -> tuple[str | None, list[str]]:
    """The value of an option, and the arguments without it.

    Raises:
      ValueError: the value is missing.
    """
    for i, arg in enumerate(args):
        if arg == option or arg.startswith(f"{option}="):
            given = arg.split("=", 1)[1:] or args[i + 1 : i + 2]
            if not given:
                raise ValueError(f"{option} needs a value, say {option} schedule.png")
            return given[0], args[:i] + args[i + (1 if "=" in arg else 2) :]
    return None, args


def parse(name: str, args: list[str]) -> TrainConfig:
    """A named config with the fields that the options set."""
    return tyro.cli(
        TrainConfig,
        args=args,
        default=PRESETS[name](),
        prog=f"experiments.train {name}",
        description=__doc__,
        config=(tyro.conf.AvoidSubcommands,),
    )


def train(config: TrainConfig) -> int:
    """Train to the end; SIGTERM saves and stops."""
    join_processes(os.environ)
    # After joining: these modules may touch a device.
    from experiments.training.loop import Trainer, TrainingAborted

    dataset = load_dataset(config.data.corpus, vocab_size=config.data.vocab_size)
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        outcome = Trainer(config, dataset, stop=asked.is_set).run()
    except TrainingAborted as error:
        print(f"error: {error}", file=sys.stderr)
        return ABORTED
    print(f"{config.out}: {outcome}")
    return 0 if outcome == "done" else 130


if __name__ == "__main__":
    sys.exit(run_main(main))
