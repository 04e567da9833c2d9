"""What the sandbox refuses to a model, recognised in the exception that comes of it."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

SANDBOX = "the sandbox refuses this"

PROCESSES = f"{SANDBOX}: models may not start processes or reach the network (docs/security.md)"

FILES = f"{SANDBOX}: models may only write files in `context.cache` (docs/security.md)"


def reason(error: BaseException) -> str | None:
    """Returns what the sandbox has refused, if the exception or one of its causes comes of that."""
    for each in causes(error):
        if isinstance(each, OSError):
            if found := reason_of_os_error(each):
                return found
        elif type(each).__name__ == "OfflineModeIsEnabled":
            return PROCESSES
    return None


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the exception, and those that it was raised from or beside."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def reason_of_os_error(error: OSError) -> str | None:
    """Returns what the sandbox has refused, if the system's answer is one of the sandbox's."""
    if type(error).__name__ == "OfflineModeIsEnabled" or isinstance(error, socket.gaierror):
        # Names are looked up over the network.
        return PROCESSES
    # The filter of system calls answers EPERM, and knows no files.
    if error.errno == errno.EPERM and error.filename is None:
        return PROCESSES
    if error.errno == errno.EACCES and isinstance(error.filename, (str, bytes)):
        return FILES if is_writable_by_mode(os.fsdecode(error.filename)) else None
    return None


def is_writable_by_mode(file: str) -> bool:
    """Whether the file's mode would let this process write it; `access` does not ask Landlock."""
    place = file if os.path.lexists(file) else os.path.dirname(os.path.abspath(file))
    return os.access(place, os.W_OK)
