"""Runs the worker of a Python model. The supervisor runs ``PYTHON -m shadowslice.worker``."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from io import TextIOWrapper

USAGE = 64
"""The exit code for wrong usage (EX_USAGE of sysexits.h)."""


def missing(error: ImportError) -> str:
    """Returns advice on how to install a missing package, usually NumPy."""
    return f"{error}; run `{sys.executable} -m pip install {error.name or 'numpy'}`"


class MissingPackage:
    """A replacement for `Runner` if a package that it imports is missing."""

    def __init__(self, error: ImportError) -> None:
        self.why = missing(error)

    def load(self, *_: object) -> tuple[None, str]:
        """Returns no model, but the reason why the package is missing."""
        return None, self.why


def main(arguments: list[str]) -> int:
    """Serves until the supervisor closes the socket. Returns the exit code."""
    match arguments:
        case ["--boot"]:
            user = None
        case ["--boot", number] if number.isdecimal():
            user = int(number)
        case _:
            print(
                "error: this is an internal program of the supervisor; run `shadowslice serve`",
                file=sys.stderr,
            )
            return USAGE
    # The model's standard output goes to the worker's log.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    # Ctrl-C must not end a worker. A worker ends when the supervisor closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Inputs are intentionally read-only, so a model that only reads its inputs needs no warning.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

    from . import _worker

    try:
        from ._runner import Runner
    except ImportError as error:
        return _worker.serve(MissingPackage(error), user)
    runner = Runner()
    code = _worker.serve(runner, user)
    runner.unload()
    return code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # Threads that the model has started must not keep the process alive.
    os._exit(code)
