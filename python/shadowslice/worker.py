"""The worker of a Python model, as the supervisor starts it: ``PYTHON -m shadowslice.worker``."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from io import TextIOWrapper

USAGE = 64
"""As sysexits has it."""


def missing(error: ImportError) -> str:
    """Says what to do about a package that is needed here, which is NumPy."""
    return f"{error}: `{sys.executable} -m pip install {error.name or 'numpy'}` installs it"


class MissingPackage:
    """In the place of a `Runner` that cannot be imported."""

    def __init__(self, error: ImportError) -> None:
        self.why = missing(error)

    def load(self, *_: object) -> tuple[None, str]:
        """There is no model."""
        return None, self.why


def main(arguments: list[str]) -> int:
    """Serves until there is no more work; returns the exit code."""
    match arguments:
        case ["--boot"]:
            user = None
        case ["--boot", number] if number.isdecimal():
            user = int(number)
        case _:
            print("error: this program is started by the supervisor, not by hand", file=sys.stderr)
            return USAGE
    # What a model prints belongs into its log.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    # Nobody interrupts a worker: it ends with its supervisor.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Inputs are not writable on purpose, and models that only read them need no warning.
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
    # Threads of the model do not hold the process.
    os._exit(code)
