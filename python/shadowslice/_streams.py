"""Generates the answers of a model's streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from ._errors import log_traceback
from ._step_watch import StepWatch

Request: TypeAlias = dict[str, np.ndarray]

END = None
"""The answer of a stream that has ended without another answer."""


class StreamAnswer:
    """The answer of one stream in a step: outputs, `END`, or an exception."""

    def __init__(self, value: Any, more: bool) -> None:
        self.value = value
        self.more = more


class Streams:
    """The open streams of a model, by number."""

    def __init__(self, model: Any, watch: StepWatch) -> None:
        self.model = model
        self.watch = watch
        self.generate: Callable[[Request], Iterator[Any]] | None = getattr(model, "generate", None)
        """The method that generates streams one by one, or ``None`` for a model with ``step``."""
        self.open_streams: dict[int, Any] = {}
        """The generator or the state of each open stream."""

    def open(self, stream: int, request: Request) -> StreamAnswer | None:
        """Opens a stream. Returns its first answer, or ``None`` if the answer needs a step."""
        if self.generate:
            self.open_streams[stream] = iter(self.generate(request))
            return self._next(stream)
        with self.watch.call(stream):
            self.open_streams[stream] = self.model.start(request)
        return None

    def step(self, streams: Sequence[int]) -> list[StreamAnswer]:
        """Returns the next answer of each stream."""
        if self.generate:
            return [self._next(stream) for stream in streams]
        answers: dict[int, StreamAnswer] = {}
        for stream in streams:
            try:
                self.watch.raise_failure(stream)
            except BaseException as error:
                answers[stream] = StreamAnswer(error, False)
        rest = [stream for stream in streams if stream not in answers]
        answers.update(self._step_together(rest) if rest else {})
        for stream, answer in answers.items():
            if not answer.more:
                self.close(stream)
        return [answers[stream] for stream in streams]

    def close(self, stream: int) -> None:
        """Closes a stream that has ended, or whose client needs no further answers."""
        if stream not in self.open_streams:
            return
        ended = self.open_streams.pop(stream)
        self.watch.forget(stream)
        try:
            if self.generate:
                if hasattr(ended, "close"):
                    ended.close()
            elif hasattr(self.model, "end"):
                self.model.end(ended)
        except BaseException:
            log_traceback()

    def close_all(self) -> None:
        """Closes all streams."""
        for stream in list(self.open_streams):
            self.close(stream)

    def _next(self, stream: int) -> StreamAnswer:
        try:
            with self.watch.call(stream):
                return StreamAnswer(next(self.open_streams[stream]), True)
        except StopIteration:
            answer = StreamAnswer(END, False)
        except BaseException as error:
            answer = StreamAnswer(error, False)
        self.close(stream)
        return answer

    def _step_together(self, streams: list[int]) -> dict[int, StreamAnswer]:
        try:
            results = self._results(streams)
        except BaseException as error:
            if len(streams) == 1:
                return {streams[0]: StreamAnswer(error, False)}
            log_traceback()
            # Only a step of each stream alone shows which stream is the cause.
            return {
                stream: answer
                for each in streams
                for stream, answer in self._step_together([each]).items()
            }
        return {
            stream: StreamAnswer(result, self._has_more(stream, result))
            for stream, result in zip(streams, results)
        }

    def _results(self, streams: list[int]) -> Sequence[Any]:
        states = [self.open_streams[stream] for stream in streams]
        with self.watch.call(streams[0] if len(streams) == 1 else None):
            results = self.model.step(states)
        if not isinstance(results, Sequence) or isinstance(results, (str, bytes)):
            raise TypeError(f"step returned {type(results).__name__}, not a list of answers")
        if len(results) != len(states):
            raise ValueError(f"step returned {len(results)} answers for {len(states)} states")
        return results

    def _has_more(self, stream: int, result: Any) -> bool:
        is_answer = result is not END and not isinstance(result, BaseException)
        return is_answer and not getattr(self.open_streams[stream], "done", False)
