"""How a command meets the shell that started it."""

import os
import sys
from collections.abc import Callable

BROKEN_PIPE = 141  # 128 + SIGPIPE: what a shell reports for a program that died writing to a pipe


def run_main(main: Callable[[], int | None]) -> int:
    """The exit code of a command's `main`; output into a pipe that was closed ends it quietly.

    `python -m experiments.sweep plan | head -3` closes the pipe after three lines. Python makes an
    exception of that, and complains once more when it flushes at exit. What a command has to undo
    (child processes, locks) its own `finally` still does.
    """
    try:
        try:
            return main() or 0
        finally:
            sys.stdout.flush()  # here, not at exit, where nobody could catch it
    except BrokenPipeError:
        _silence_broken_streams()
        return BROKEN_PIPE


def _silence_broken_streams() -> None:
    """What is still buffered for a closed pipe goes nowhere, so that the exit is silent."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
