"""Measure what a trained model can do.

    python -m experiments.evaluate EVALUATION --model DIR [options]

    long_context   loss by position and passkey retrieval beyond the trained length

Each evaluation is a module of `experiments.evaluation` with a dataclass `Options` and a function
`run(options) -> int`, named in `EVALUATIONS`. `EVALUATION --help` lists its options.
"""

import importlib
import sys

import tyro

from experiments.console import run_main
from experiments.data import CorpusError
from experiments.training.run_checkpoints import CheckpointError
from experiments.training.run_folder import RunError

EVALUATIONS = {"long_context": "experiments.evaluation.long_context"}


def main(argv: list[str] | None = None) -> int:
    """Run one evaluation; returns the exit code. Expected failures print one line."""
    args = list(sys.argv[1:] if argv is None else argv)
    name = args.pop(0) if args and not args[0].startswith("-") else None
    if name not in EVALUATIONS:
        wanted = f"unknown evaluation {name!r}" if name else "name an evaluation"
        print(
            f"error: {wanted}; choose from {', '.join(EVALUATIONS)}\n\n{__doc__}", file=sys.stderr
        )
        return 0 if {"-h", "--help"} & set(args) else 2
    module = importlib.import_module(EVALUATIONS[name])
    try:
        options = tyro.cli(
            module.Options,
            args=args,
            prog=f"experiments.evaluate {name}",
            description=module.__doc__,
        )
        return module.run(options)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise  # `run_main` ends it quietly
    except (RunError, CheckpointError, CorpusError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(run_main(main))
