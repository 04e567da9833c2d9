"""What is wrong with a model, told to whoever runs it."""

from __future__ import annotations

import inspect
import sys
import traceback
from pathlib import Path
from typing import Any

from . import _sandbox_errors

TRACEBACK_LINES = 40
"""Of a traceback, the last lines, are logged."""

CHARACTERS = 2000
"""The most of a line of a traceback, and of an exception's text."""

NEXT_LINE = "\x1f"
"""Stands for a line's end inside a record of the log: the supervisor logs each line as a record."""


class ModelError(Exception):
    """The model cannot be loaded; the text says why."""


def describe(error: BaseException) -> str:
    """An exception in one line, with what the sandbox has to do with it."""
    if isinstance(error, SystemExit):
        return "the model called sys.exit"
    text = escape_surrogates(truncate("".join(traceback.format_exception_only(error)).strip()))
    refused = _sandbox_errors.reason(error)
    return f"{text}: {refused}" if refused else text


def truncate(text: str) -> str:
    """The text, or its beginning."""
    return text if len(text) <= CHARACTERS else text[:CHARACTERS] + " ..."


def escape_surrogates(text: str) -> str:
    """The text as UTF-8 can have it."""
    return text.encode(errors="backslashreplace").decode()


def line_of(*objects: Any) -> int:
    """Returns the line of the first of these, such as a method and its class, that has a source."""
    for each in objects:
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
    """Writes the exception that is handled to the worker's log, as one record."""
    lines = traceback.format_exc().rstrip().splitlines()
    record = NEXT_LINE.join(map(truncate, lines[-TRACEBACK_LINES:]))
    print(record, file=sys.stderr, flush=True)
