"""What is wrong with a model, told to whoever runs it."""

from __future__ import annotations

import inspect
import sys
import traceback
from pathlib import Path
from typing import Any

TRACEBACK_LINES = 40
"""Of a traceback, the last lines, are logged."""

CHARACTERS = 2000
"""The most of a line of a traceback, and of an exception's text."""


class Faulty(Exception):
    """The model cannot be loaded; the text says why."""


def told(error: BaseException) -> str:
    """An exception in one line."""
    if isinstance(error, SystemExit):
        return "the model called sys.exit"
    return speakable(cut("".join(traceback.format_exception_only(error)).strip()))


def cut(text: str) -> str:
    """The text, or its beginning."""
    return text if len(text) <= CHARACTERS else text[:CHARACTERS] + " ..."


def speakable(text: str) -> str:
    """The text as UTF-8 can have it."""
    return text.encode(errors="backslashreplace").decode()


def line_of(*written: Any) -> int:
    """Where the first of these is written whose source is there, such as a method, or else its class."""
    for each in written:
        try:
            return inspect.getsourcelines(each)[1]
        except (TypeError, OSError):
            continue
    return 0


def line_in(file: Path, error: BaseException) -> int:
    """The last line of the file on the way to the error."""
    frames = traceback.extract_tb(error.__traceback__)
    return next(
        (frame.lineno or 0 for frame in reversed(frames) if Path(frame.filename) == file), 0
    )


def log_traceback() -> None:
    """Writes the exception that is handled to the worker's log."""
    lines = traceback.format_exc().rstrip().splitlines()
    print(*map(cut, lines[-TRACEBACK_LINES:]), sep="\n", file=sys.stderr, flush=True)
