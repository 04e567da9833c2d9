"""Recognises exceptions that the worker's sandbox causes."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

SANDBOX = "the sandbox does not allow this"

PROCESSES = f"{SANDBOX}: models cannot start processes or use the network (docs/security.md)"

FILES = f"{SANDBOX}: models can write files only in `context.cache` (docs/security.md)"


def reason(error: BaseException) -> str | None:
    """Returns the sandbox's rule that caused the exception or one of its causes, or ``None``."""
    for each in causes(error):
        if isinstance(each, OSError):
            if found := reason_of_os_error(each):
                return found
        elif type(each).__name__ == "OfflineModeIsEnabled":
            return PROCESSES
    return None


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the exception, followed by its chain of causes and contexts."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def reason_of_os_error(error: OSError) -> str | None:
    """Returns the sandbox's rule that the system call violated, or ``None``."""
    if type(error).__name__ == "OfflineModeIsEnabled" or isinstance(error, socket.gaierror):
        # The lookup of a host name failed, and such a lookup needs the network.
        return PROCESSES
    # If the seccomp filter returns EPERM, the error has no file name.
    if error.errno == errno.EPERM and error.filename is None:
        return PROCESSES
    if error.errno == errno.EACCES and isinstance(error.filename, (str, bytes)):
        return FILES if is_writable_by_mode(os.fsdecode(error.filename)) else None
    return None


def is_writable_by_mode(file: str) -> bool:
    """Checks whether the file's mode permits writing. Ignores Landlock, as `access` does."""
    place = file if os.path.lexists(file) else os.path.dirname(os.path.abspath(file))
    return os.access(place, os.W_OK)
