"""Describes errors of models for the operator."""

from __future__ import annotations

import inspect
import sys
import traceback
from pathlib import Path
from typing import Any

from . import _sandbox_errors

TRACEBACK_LINES = 40
"""The maximum number of lines of a traceback that are logged. The last lines are kept."""

CHARACTERS = 2000
"""The maximum length of a line of a traceback, and of an exception's text."""

NEXT_LINE = "\x1f"
"""The line separator inside a log record. The supervisor logs each line as its own record."""


class ModelError(Exception):
    """The model cannot be loaded. The error's text has the reason."""


def describe(error: BaseException) -> str:
    """Returns the text of an exception, and the sandbox's rule that caused it, if any."""
    if isinstance(error, SystemExit):
        return "the model called sys.exit"
    text = escape_surrogates(truncate("".join(traceback.format_exception_only(error)).strip()))
    refused = _sandbox_errors.reason(error)
    return f"{text}: {refused}" if refused else text


def truncate(text: str) -> str:
    """Returns the text, or its first `CHARACTERS` characters."""
    return text if len(text) <= CHARACTERS else text[:CHARACTERS] + " ..."


def escape_surrogates(text: str) -> str:
    """Escapes surrogates in the text, because UTF-8 cannot encode surrogates."""
    return text.encode(errors="backslashreplace").decode()


def line_of(*objects: Any) -> int:
    """Returns the line number of the first object with source code, such as a method or class."""
    for each in objects:
        try:
            return inspect.getsourcelines(each)[1]
        except (TypeError, OSError):
            continue
    return 0


def line_in(file: Path, error: BaseException) -> int:
    """Returns the line number of the innermost frame in `file` of the error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return next(
        (frame.lineno or 0 for frame in reversed(frames) if Path(frame.filename) == file), 0
    )


def log_traceback() -> None:
    """Logs the exception that is being handled, as one record of the worker's log."""
    lines = traceback.format_exc().rstrip().splitlines()
    record = NEXT_LINE.join(map(truncate, lines[-TRACEBACK_LINES:]))
    print(record, file=sys.stderr, flush=True)
