"""Interrupts a step of streams that takes too long, or that waits for a thread that has failed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from weakref import WeakKeyDictionary

from ._errors import describe


class StepInterrupted(BaseException):
    """The step has no answer. Code that catches every ``Exception`` does not catch this."""


class StepWatch:
    """Watches the calls of a model's methods that give the answers of streams.

    Python runs handlers of signals in the main thread, in which the worker calls the model. A
    signal interrupts Python code and waits such as ``queue.get``, but not a library that never
    returns.
    """

    def __init__(self) -> None:
        self.timeout = 0.0
        """The maximum time of a call in s, or 0 if calls are not interrupted."""
        self.stream: int | None = None
        """The stream to which the current call belongs, or ``None`` if it belongs to several."""
        self.is_calling = False
        self.deadline = 0.0
        self.owners: WeakKeyDictionary[threading.Thread, int] = WeakKeyDictionary()
        """The streams that started threads."""
        self.failures: dict[int, BaseException] = {}
        """The exceptions that ended threads of streams."""

    def install(self) -> None:
        """Starts to interrupt calls. Call this in the main thread."""
        signal.signal(signal.SIGALRM, self._on_signal)
        self.log_failure = threading.excepthook
        threading.excepthook = self._on_thread_failure

    @contextmanager
    def call(self, stream: int | None) -> Iterator[None]:
        """Watches a call. Raises `StepInterrupted` if it takes too long or its thread fails."""
        before = set(threading.enumerate())
        self.stream = stream
        self.deadline = time.monotonic() + self.timeout
        self.is_calling = True
        try:
            if self.timeout:
                signal.setitimer(signal.ITIMER_REAL, self.timeout)
            self.raise_failure(stream)
            yield
        finally:
            self.is_calling = False
            if self.timeout:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if stream is not None:
                for thread in threading.enumerate():
                    if thread not in before:
                        self.owners[thread] = stream

    def raise_failure(self, stream: int | None) -> None:
        """Raises the exception that ended a thread of the stream, if any."""
        if stream is not None and (error := self.failures.pop(stream, None)):
            raise StepInterrupted(f"a thread of this stream failed: {describe(error)}") from error

    def forget(self, stream: int) -> None:
        """Forgets a stream that has ended."""
        self.failures.pop(stream, None)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if not self.is_calling:
            return
        self.raise_failure(self.stream)
        if self.timeout and time.monotonic() >= self.deadline:
            raise StepInterrupted(f"no answer within step_timeout ({self.timeout:g} s)")

    def _on_thread_failure(self, failed: threading.ExceptHookArgs) -> None:
        self.log_failure(failed)
        owner = self.owners.get(failed.thread) if failed.thread else None
        if owner is None and self.is_calling:
            # The call may have started this thread, which has ended before the call has.
            owner = self.stream
        if owner is None or failed.exc_value is None:
            return
        self.failures[owner] = failed.exc_value
        if self.is_calling and self.stream == owner and (main := threading.main_thread().ident):
            signal.pthread_kill(main, signal.SIGALRM)
