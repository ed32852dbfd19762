"""Commands end quietly when the reader of their output goes away."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import console, fit, sweep

ROOT = Path(__file__).resolve().parents[2]
POINTS = "experiments/scaling/data/chinchilla_points_rounded.csv"


def run_into_closed_pipe(*command: str) -> tuple[int, str]:
    """Exit code and standard error of a program whose standard output nobody reads."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=240,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
    finally:
        os.close(write)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "body",
    ["print('x' * 10**6)", "print('few')", "raise SystemExit(print('as --help does'))"],
)
def test_a_closed_pipe_is_no_fault(body):
    program = (
        f"import sys\nfrom experiments.console import run_main\ndef main():\n    {body}\n"
        "sys.exit(run_main(main))"
    )
    assert run_into_closed_pipe("-c", program) == (141, "")


def test_a_command_into_a_closed_pipe_is_silent():
    command = ("-m", "experiments.fit", POINTS, "--columns", "params=N", "tokens=D", "flops=C")
    options = ("--bootstrap", "0", "--starts", "4")
    assert run_into_closed_pipe(*command, *options) == (141, "")


def test_commands_leave_a_broken_pipe_to_the_console(monkeypatch):
    """It is an OSError, and those are reported as bad input."""

    def closed(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr(sweep, "parse_config", closed)
    with pytest.raises(BrokenPipeError):
        sweep.main(["plan"])


@pytest.mark.parametrize(("code", "exit_code"), [(None, 0), (0, 0), (2, 2)])
def test_exit_codes_pass(code, exit_code):
    assert console.run_main(lambda: code) == exit_code


def test_other_errors_pass():
    with pytest.raises(OSError, match="disk"):
        console.run_main(lambda: (_ for _ in ()).throw(OSError("disk")))


def test_every_command_goes_through_it():
    commands = [Path(module.__file__ or "") for module in (fit, sweep)]
    commands += [
        ROOT / "experiments/data/__main__.py",
        ROOT / "experiments/benchmarks/attention.py",
    ]
    for path in commands:
        assert "run_main(main)" in path.read_text(), path
