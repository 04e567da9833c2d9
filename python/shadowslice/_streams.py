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

CLOSE_TIMEOUT = 1.0
"""The maximum time in s to close a stream. The steps of other streams wait meanwhile."""

END = None
"""The answer of a stream that has ended without another answer."""

FLAGS = ("done", "pending")
"""The flags that a step with seats returns for each stream: it has ended, or has no answer yet."""


class StreamAnswer:
    """The answer of one stream in a step: outputs, `END`, `PENDING` or an exception."""

    def __init__(self, value: Any, more: bool) -> None:
        self.value = value
        self.more = more


TRIAL = -1
"""The number of the stream that tries a partition."""


class Seats:
    """The seats of streams: indices into the tensors of a model with ``cuda_graph``."""

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
        self.watch.open.add(stream)
        try:
            if self.generate:
                self.open_streams[stream] = iter(self.generate(request))
                return self._next(stream)
            if self.seats:
                seat = self.open_streams[stream] = self.seats.take(stream == TRIAL)
                self._call([stream], lambda: self.model.start(request, seat))
            else:
                self.open_streams[stream] = self._call([stream], lambda: self.model.start(request))
        except BaseException:
            self.close(stream)
            raise
        return None

    def step(self, streams: Sequence[int]) -> list[StreamAnswer]:
        """Returns the next answer of each stream."""
        if self.generate:
            return [self._next(stream) for stream in streams]
        answers = self._step_together(list(streams))
        for stream, answer in answers.items():
            if not answer.more:
                self.close(stream)
        return [answers[stream] for stream in streams]

    def close(self, stream: int) -> None:
        """Closes a stream that has ended, or whose client needs no further answers."""
        if stream in self.open_streams:
            ended = self.open_streams.pop(stream)
            timeout = min(self.watch.timeout, CLOSE_TIMEOUT)
            try:
                self.watch.call([stream], timeout, lambda: self._end(ended))
            except BaseException:
                log_traceback()
        self.watch.forget(stream)

    def _end(self, ended: Any) -> None:
        if self.generate:
            if hasattr(ended, "close"):
                ended.close()
            return
        if self.seats:
            self.seats.give_back(ended)
        if hasattr(self.model, "end"):
            self.model.end(ended)

    def close_all(self) -> None:
        """Closes all streams."""
        for stream in list(self.open_streams):
            self.close(stream)

    def _call(self, streams: list[int], function: Callable[[], Any]) -> Any:
        return self.watch.call(streams, self.watch.timeout, function)

    def _next(self, stream: int) -> StreamAnswer:
        try:
            generator = self.open_streams[stream]
            return StreamAnswer(self._call([stream], lambda: next(generator)), True)
        except StopIteration:
            answer = StreamAnswer(END, False)
        except BaseException as error:
            answer = StreamAnswer(error, False)
        self.close(stream)
        return answer

    def _step_together(self, streams: list[int]) -> dict[int, StreamAnswer]:
        try:
            return self._results(streams, self.watch.timeout)
        except BaseException as error:
            if len(streams) == 1 or self.seats:
                # A step with seats may have changed the tensors of all its streams.
                return {stream: StreamAnswer(error, False) for stream in streams}
            log_traceback()
        # Only a step of each stream alone shows which stream is the cause. All of these steps
        # together may take as long as one step.
        timeout = self.watch.timeout / len(streams)
        return {
            each: answer
            for stream in streams
            for each, answer in self._alone(stream, timeout).items()
        }

    def _alone(self, stream: int, timeout: float) -> dict[int, StreamAnswer]:
        try:
            return self._results([stream], timeout)
        except BaseException as error:
            return {stream: StreamAnswer(error, False)}

    def _results(self, streams: list[int], timeout: float) -> dict[int, StreamAnswer]:
        states = [self.open_streams[stream] for stream in streams]
        if self.seats:
            seats = self.seats.tensor(states)
            outputs = self.watch.call(streams, timeout, lambda: self.model.step(seats))
            return dict(zip(streams, rows(outputs, len(states))))
        results = self.watch.call(streams, timeout, lambda: self.model.step(states))
        if not isinstance(results, Sequence) or isinstance(results, (str, bytes)):
            raise TypeError(f"step returned {type(results).__name__}, not a list of answers")
        if len(results) != len(states):
            raise ValueError(f"step returned {len(results)} answers for {len(states)} states")
        return {
            stream: StreamAnswer(result, has_more(result, state))
            for stream, result, state in zip(streams, results, states)
        }


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
    answers = []
    for row, (ends, waits) in enumerate(zip(done, pending)):
        outputs = {name: tensor[row] for name, tensor in whole.items()}
        without = END if ends else PENDING
        answers.append(StreamAnswer(without if waits else outputs, not ends))
    return answers


def with_flags(result: Any) -> dict[str, Any]:
    """Returns the outputs of a step with seats, with both flags."""
    if not isinstance(result, Mapping):
        raise TypeError(f"step returned {type(result).__name__}, not a dict of tensors")
    if "done" not in result:
        raise KeyError(f"step returned no 'done', only {list(result)}")
    nothing = sys.modules["torch"].zeros_like(result["done"])
    return {"pending": nothing, **result}
