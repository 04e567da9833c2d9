"""Generates the answers of a model's streams."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from . import PENDING
from ._errors import log_traceback
from ._step_watch import StepWatch

Request: TypeAlias = dict[str, np.ndarray]

END = None
"""The answer of a stream that has ended without another answer."""

FLAGS = ("done", "pending")
"""The outputs of a step with seats that tell which streams have ended or have no answer yet."""


class StreamAnswer:
    """The answer of one stream in a step: outputs, `END`, `PENDING` or an exception."""

    def __init__(self, value: Any, more: bool) -> None:
        self.value = value
        self.more = more


TRIAL = -1
"""The number of the stream that tries a partition."""


class Seats:
    """The numbers by which a step of a model with ``cuda_graph`` finds its streams."""

    def __init__(self, count: int, device: str) -> None:
        self.spare = count
        """The seat of the trial stream. A recorded step also uses it for padding."""
        self.device = device
        self.free = list(range(count))[::-1]

    def take(self, is_trial: bool) -> int:
        """Returns a free seat."""
        return self.spare if is_trial else self.free.pop()

    def give_back(self, seat: int) -> None:
        """Makes a seat free."""
        if seat != self.spare:
            self.free.append(seat)

    def tensor(self, seats: list[int]) -> Any:
        """Returns seats as a tensor on the model's device."""
        torch = sys.modules["torch"]
        return torch.tensor(seats, dtype=torch.int64, device=self.device)


class Streams:
    """The open streams of a model, by number."""

    def __init__(self, model: Any, watch: StepWatch, seats: Seats | None = None) -> None:
        self.model = model
        self.watch = watch
        self.seats = seats
        self.generate: Callable[[Request], Iterator[Any]] | None = getattr(model, "generate", None)
        """The method that generates streams one by one, or ``None`` for a model with ``step``."""
        self.open_streams: dict[int, Any] = {}
        """The generator, the state or the seat of each open stream."""

    def open(self, stream: int, request: Request) -> StreamAnswer | None:
        """Opens a stream. Returns its first answer, or ``None`` if the answer needs a step."""
        if self.generate:
            self.open_streams[stream] = iter(self.generate(request))
            return self._next(stream)
        with self.watch.call(stream):
            if not self.seats:
                self.open_streams[stream] = self.model.start(request)
                return None
            seat = self.open_streams[stream] = self.seats.take(stream == TRIAL)
            try:
                self.model.start(request, seat)
            except BaseException:
                self.close(stream)
                raise
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
        if self.seats and not self.generate:
            self.seats.give_back(ended)
        try:
            with self.watch.call(stream):
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
            return dict(zip(streams, self._results(streams)))
        except BaseException as error:
            if len(streams) == 1:
                return {streams[0]: StreamAnswer(error, False)}
            log_traceback()
        # Only a step of each stream alone shows which stream is the cause.
        alone = [self._step_together([stream]) for stream in streams]
        return {stream: answer for each in alone for stream, answer in each.items()}

    def _results(self, streams: list[int]) -> list[StreamAnswer]:
        states = [self.open_streams[stream] for stream in streams]
        with self.watch.call(streams[0] if len(streams) == 1 else None):
            if self.seats:
                return rows(self.model.step(self.seats.tensor(states)), len(states))
            results = self.model.step(states)
        if not isinstance(results, Sequence) or isinstance(results, (str, bytes)):
            raise TypeError(f"step returned {type(results).__name__}, not a list of answers")
        if len(results) != len(states):
            raise ValueError(f"step returned {len(results)} answers for {len(states)} states")
        return [
            StreamAnswer(result, has_more(result, state)) for result, state in zip(results, states)
        ]


def has_more(result: Any, state: Any) -> bool:
    """Checks whether further answers follow this result of a step."""
    if result is END or isinstance(result, BaseException):
        return False
    return result is PENDING or not getattr(state, "done", False)


def rows(result: Any, streams: int) -> list[StreamAnswer]:
    """Splits the outputs of a step with seats into the answers of its streams."""
    whole = with_flags(result)
    for name, tensor in whole.items():
        if not len(tensor.shape) or tensor.shape[0] != streams:
            raise ValueError(f"{name!r} has shape {list(tensor.shape)} for {streams} streams")
    done, pending = (whole.pop(name).tolist() for name in FLAGS)
    return [
        StreamAnswer(
            PENDING if waits else {name: tensor[row] for name, tensor in whole.items()}, not ends
        )
        for row, (ends, waits) in enumerate(zip(done, pending))
    ]


def with_flags(result: Any) -> dict[str, Any]:
    """Returns the outputs of a step with seats, with both flags."""
    if not isinstance(result, Mapping):
        raise TypeError(f"step returned {type(result).__name__}, not a dict of tensors")
    if "done" not in result:
        raise KeyError(f"step returned no 'done', only {list(result)}")
    nothing = sys.modules["torch"].zeros_like(result["done"])
    return {"pending": nothing, **result}
