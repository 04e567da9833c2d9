"""Interrupts a step of streams that takes too long, or that waits for a thread that has failed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar
from weakref import WeakKeyDictionary

from ._errors import describe

T = TypeVar("T")

REPEAT_INTERVAL = 1.0
"""The time in s after which a call that goes on after its interrupt is interrupted again.

Without a repetition, a ``finally`` that waits for a thread would wait without a limit.
"""


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
        self.open: set[int] = set()
        """The streams that are open or opening. Only their threads are watched."""
        self.called: frozenset[int] = frozenset()
        """The streams to which the current call belongs, or none between two calls."""
        self.deadline = 0.0
        self.known: set[threading.Thread] = set()
        """The threads that ran before the current call."""
        self.owners: WeakKeyDictionary[threading.Thread, int] = WeakKeyDictionary()
        """The streams that started threads."""
        self.failures: dict[int, BaseException] = {}
        """The exceptions that ended threads of open streams."""

    def install(self) -> None:
        """Starts to interrupt calls. Call this in the main thread."""
        signal.signal(signal.SIGALRM, self._on_signal)
        self.log_failure = threading.excepthook
        threading.excepthook = self._on_thread_failure

    def call(self, streams: list[int], timeout: float, function: Callable[[], T]) -> T:
        """Calls a function for these streams.

        Raises `StepInterrupted` if the call takes longer than `timeout` s, or if a thread of one of
        the streams fails. A timeout of 0 means no limit.
        """
        self.known = set(threading.enumerate())
        self.deadline = time.monotonic() + timeout if timeout else float("inf")
        self.called = frozenset(streams)
        try:
            if timeout:
                signal.setitimer(signal.ITIMER_REAL, timeout, REPEAT_INTERVAL)
            self._raise_failure()
            return function()
        finally:
            self.called = frozenset()
            if timeout:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if len(streams) == 1:
                for thread in threading.enumerate():
                    if thread not in self.known:
                        self.owners[thread] = streams[0]
            self.known = set()

    def forget(self, stream: int) -> None:
        """Forgets a stream that has ended."""
        self.open.discard(stream)
        self.failures.pop(stream, None)

    def _raise_failure(self) -> None:
        for stream in self.called & self.failures.keys():
            error = self.failures[stream]
            raise StepInterrupted(f"a thread of this stream failed: {describe(error)}") from error

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if not self.called:
            return
        self._raise_failure()
        if time.monotonic() >= self.deadline:
            raise StepInterrupted(f"no answer within step_timeout ({self.timeout:g} s)")

    def _on_thread_failure(self, failed: threading.ExceptHookArgs) -> None:
        self.log_failure(failed)
        if failed.thread is None or failed.exc_value is None:
            return
        owner = self.owners.get(failed.thread)
        if owner is None and len(self.called) == 1 and failed.thread not in self.known:
            # The current call has started this thread, which has ended before the call has.
            (owner,) = self.called
        if owner not in self.open or owner is None:
            return
        self.failures[owner] = failed.exc_value
        if owner in self.called and (main := threading.main_thread().ident):
            signal.pthread_kill(main, signal.SIGALRM)
