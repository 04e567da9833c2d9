"""Loads a model's class and runs batches. The worker's Rust code calls this module."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from . import (
    PENDING,
    Context,
    InvalidInput,
    Tensor,
    _arena,
    _cuda_graphs,
    _environment,
    _model_class,
    _options,
    _sandbox_errors,
    _tensors,
)
from ._errors import ModelError, describe, escape_surrogates, line_in, line_of, log_traceback
from ._step_watch import StepInterrupted, StepWatch
from ._streams import END, FLAGS, TRIAL, Seats, StreamAnswer, Streams, with_flags

Spec: TypeAlias = tuple[str, str, list[int]]
"""The name, datatype and whole shape of a tensor."""

OutputParts: TypeAlias = tuple[list[int], list[tuple[int, int]]]
"""An output's shape without the batch axis, and the address and length of each request's part.
"""

Reply: TypeAlias = tuple[tuple[list[OutputParts], list[np.ndarray], bool] | None, bool, str]
"""The success or failure of a batch, or of one stream in a step.

For a success, the first element has the outputs' parts, the arrays that own the parts' memory, and
whether the stream has more responses. For a failure, the elements are ``None``, whether the request
is invalid, and the reason.
"""

NOT_ANSWERED_YET: Reply = (([], [], True), False, "")
"""The reply for a stream that is open, and whose first response needs a step."""

INDEPENDENT_OF_VALUES = (ImportError, NameError, NotImplementedError, SystemExit)
"""The exceptions that do not depend on the values of the inputs."""


class Runner:
    """The model of this process."""

    def __init__(self) -> None:
        self.model: Any = None
        self.file = Path()
        self.answer: Any = None
        """The model's method that runs a batch, or starts a stream."""
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.streams: _model_class.StreamLimits | None = None
        self.device = "cpu"
        self.recorder: _cuda_graphs.Recorder | None = None
        """The recorder of a model with ``cuda_graph``. Its batches are PyTorch tensors."""
        self.arena: _arena.Arena | None = None
        self.arena_obstacle = ""
        """The reason why PyTorch does not allocate the model's memory in the arena."""
        self.open_streams: Streams | None = None
        """The streams of a model with ``generate`` or ``step``."""
        self.proving = True
        self.has_output = False
        """True after the model's method has returned or yielded. Later errors concern outputs."""
        self.may_be_values = False
        """True if generated input values may have caused the last failure."""
        self.watch = StepWatch()
        self.step_timeout = 0.0
        self.proof_batches: dict[str, tuple[dict[str, np.ndarray], list[int] | None]] = {}
        """A batch of each size for which the proof ran on a CUDA stream."""

    def load(
        self, name: str, path: Path, cache: Path | None, on_gpu: bool, step_timeout: float
    ) -> tuple[tuple[list[Spec], list[Spec], _model_class.StreamLimits | None] | None, str]:
        """Loads the model.

        Returns the inputs, the outputs and the number of streams. On failure, returns ``None`` and
        the reason. The time limit of a step, in s, applies after the proof.
        """
        self.step_timeout = step_timeout
        try:
            file = _model_class.find_source(path)
            context = Context(
                name=name,
                folder=file.parent,
                cache=cache,
                device="cuda" if on_gpu else "cpu",
            )
            _environment.redirect_to(cache, on_gpu)
            self._load(file, context)
        except ModelError as fault:
            return None, str(fault)
        except BaseException as error:
            log_traceback()
            return None, describe(error)
        return (specs(self.inputs), specs(self.outputs), self.streams), ""

    def _load(self, file: Path, context: Context) -> None:
        found = _model_class.model_class(_model_class.load_module(file), file)
        self.inputs = _model_class.tensors(found, "inputs", file)
        self.outputs = _model_class.tensors(found, "outputs", file)
        self.streams = _model_class.streams(found, file)
        recorded = self.outputs if self.streams else {**self.inputs, **self.outputs}
        _options.check(found, file, recorded)
        self.device = context.device
        if self.device == "cuda" and "torch" in sys.modules:
            self.arena, self.arena_obstacle = _arena.create(sys.modules["torch"])
        if getattr(found, "cuda_graph", False):
            self.recorder = _cuda_graphs.Recorder(self.arena)
        with self.arena.use() if self.arena else nullcontext():
            self.file, self.model = file, found()
            if hasattr(self.model, "load"):
                self.model.load(context)
        if self.streams:
            seats = Seats(self.streams.open, self.device) if self.recorder else None
            self.open_streams = Streams(self.model, self.watch, seats)
            self.watch.install()
        else:
            self.answer = self.model.infer
        if self.recorder and "torch" not in sys.modules:
            where = f"{file}:{line_of(found)}"
            raise ModelError(
                f"{where}: class {found.__name__} has `cuda_graph`, but does not use PyTorch; "
                "remove `cuda_graph`"
            )

    def basis(self) -> tuple[tuple[bool, list[_options.WarmupInput] | None] | None, str]:
        """Prepares the proof's reference run, which calls `reference` if the class has this method.

        Returns whether the model is deterministic, and the inputs from `warmup`, if the class has
        this method. On failure, returns ``None`` and the reason.
        """
        found = type(self.model)
        if getattr(found, "reference", None) is not None:
            if self.open_streams:
                self.open_streams.generate = self.model.reference
            else:
                self.answer = self.model.reference
        try:
            warmup_inputs = None
            if getattr(found, "warmup", None) is not None:
                warmup_inputs = _options.warmup_inputs(
                    self.model, self.file, self.inputs, self.batched()
                )
        except ModelError as fault:
            return None, str(fault)
        return (getattr(found, "deterministic", True), warmup_inputs), ""

    def batched(self) -> bool:
        """Checks whether the first axis of all tensors is the batch axis."""
        tensors = [*self.inputs.values(), *self.outputs.values()]
        return not self.streams and all(
            tensor.shape and tensor.shape[0] == -1 for tensor in tensors
        )

    def movable(self) -> str | None:
        """Returns the reason why the model cannot run on a given CUDA stream, or ``None``."""
        return None if torch() else "only Python models that use PyTorch can run on a given stream"

    def outside_arena(self) -> str | None:
        """Returns the reason why the model's GPU memory is not in the arena, or ``None``."""
        if self.arena:
            return None
        if self.arena_obstacle:
            return self.arena_obstacle
        if torch():
            return f"import torch at the top of {self.file}, so that the model can sleep"
        return "only Python models that use PyTorch can release their weights"

    def arena_content(self) -> list[tuple[int, int]]:
        """Frees the memory outside the arena that no tensor uses, before the model sleeps.

        Returns the address and the size of each block of the arena that has a tensor.
        """
        self.left()
        return self.arena.content() if self.arena else []

    def record(self, shapes: list[list[int]]) -> tuple[_cuda_graphs.Recording | None, str | None]:
        """Records the graph that replaces `run` for inputs of these shapes.

        For a model with streams, records the graph that replaces `step`. The shape is that of the
        seats.

        Returns the recording, or the reason of a failure. Returns neither for a class without
        `cuda_graph`.
        """
        if self.recorder is None:
            return None, None
        try:
            if self.open_streams:
                return self.recorder.record(self._step, self._step_tensors(), shapes, True), None
            tensors = (self.inputs, self.outputs)
            return self.recorder.record(self.answer, tensors, shapes, self.batched()), None
        except BaseException as error:
            log_traceback()
            # PyTorch raises a second error when the recording ends. The first error has the cause.
            cause = error.__context__ or error
            where = f"{self.file}:{line_in(self.file, cause)}"
            what = describe(cause).splitlines()[0]
            return None, f"{where}: cannot record a CUDA graph (`cuda_graph = True`): {what}"

    def _step(self, batch: Mapping[str, Any]) -> Any:
        return with_flags(self.model.step(batch["seats"]))

    def _step_tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the input and the outputs of a recorded step, which has a row for each stream."""
        rows = {name: Tensor(of.datatype, [-1, *of.shape]) for name, of in self.outputs.items()}
        flags = {name: Tensor("BOOL", [-1]) for name in FLAGS}
        return {"seats": Tensor("INT64", [-1])}, {**rows, **flags}

    def warmed_up(self) -> None:
        """Ends the proof. From now on, the worker serves requests."""
        self.proving = False
        self.watch.timeout = self.step_timeout

    def unfit(self, cuda: int) -> str | None:
        """Runs the proof's batches on this CUDA stream.

        Returns ``None`` or the reason why the model cannot run on this stream, for example because
        a kernel needs more SMs.
        """
        try:
            with on(cuda):
                for batch, rows in self.proof_batches.values():
                    self._try(batch, rows)
        except BaseException as error:
            return describe(error)
        return None

    def _try(self, batch: dict[str, np.ndarray], rows: list[int] | None) -> None:
        if not self.open_streams:
            self._run_batch(batch, rows)
            return
        answer = self.open_streams.open(
            TRIAL, {name: array.copy() for name, array in batch.items()}
        )
        for _ in range(2):
            if answer is None or answer.more:
                (answer,) = self.open_streams.step([TRIAL])
            if isinstance(answer.value, BaseException):
                raise answer.value
        self.open_streams.close(TRIAL)

    def left(self) -> None:
        """Frees the memory that PyTorch keeps for CUDA streams that the worker no longer uses."""
        if found := torch():
            found._C._cuda_clearCublasWorkspaces()
            found.cuda.empty_cache()

    def run(
        self,
        data: list[memoryview | bytes],
        shapes: list[list[int]],
        rows: list[int] | None,
        cuda: int | None,
        stream: int,
    ) -> Reply:
        """Runs a batch, or starts a stream with the number `stream`.

        `cuda` is the CUDA stream on which the model computes, or ``None``.
        """
        self.has_output = self.may_be_values = False
        try:
            batch = {
                name: _tensors.decode(tensor.datatype, shape, memoryview(view))
                for (name, tensor), shape, view in zip(self.inputs.items(), shapes, data)
            }
            if self.proving and cuda is not None:
                self.proof_batches[str(shapes)] = (
                    {name: array.copy() for name, array in batch.items()},
                    rows,
                )
            with on(cuda):
                if self.open_streams:
                    # The worker reuses the request's memory after the stream has started.
                    kept = {name: array.copy() for name, array in batch.items()}
                    answer = self.open_streams.open(stream, kept)
                    return self._stream_reply(stream, answer) if answer else NOT_ANSWERED_YET
                return (*self._run_batch(batch, rows), False), False, ""
        except BaseException as error:
            return self._failed(error)

    def step(self, streams: list[int], cuda: int | None) -> list[Reply]:
        """Returns the next response of each stream."""
        self.has_output = self.may_be_values = False
        assert self.open_streams
        with on(cuda):
            answers = self.open_streams.step(streams)
            return [self._stream_reply(*answer) for answer in zip(streams, answers)]

    def seats(self, streams: list[int]) -> tuple[list[int], int] | None:
        """Returns the seats of streams and the spare seat.

        Returns ``None`` if the model has no seats.
        """
        all_streams = self.open_streams
        if not all_streams or not all_streams.seats or all_streams.generate:
            return None
        return [all_streams.open_streams[stream] for stream in streams], all_streams.seats.spare

    def _stream_reply(self, stream: int, answer: StreamAnswer) -> Reply:
        if answer.value is END:
            # The values of the inputs may also be the reason why a stream has no responses.
            self.may_be_values = True
            return ([], [], False), False, ""
        if answer.value is PENDING:
            return NOT_ANSWERED_YET
        try:
            if isinstance(answer.value, BaseException):
                raise answer.value
            return (*self._outputs(answer.value, None), answer.more), False, ""
        except BaseException as error:
            self.close(stream)
            return self._failed(error)

    def close(self, stream: int) -> None:
        """Closes a stream whose client needs no further responses."""
        if self.open_streams:
            self.open_streams.close(stream)

    def _failed(self, error: BaseException) -> Reply:
        self.may_be_values = may_depend_on_values(error, self.has_output)
        return failure(error)

    def may_need_warmup(self) -> bool:
        """Checks whether the last failure suggests that the class needs a method `warmup`."""
        return self.may_be_values

    def _run_batch(
        self, batch: dict[str, Any], rows: list[int] | None
    ) -> tuple[list[OutputParts], list[np.ndarray]]:
        if self.recorder:
            batch = {name: _cuda_graphs.tensor(array, self.device) for name, array in batch.items()}
        return self._outputs(self.answer(batch), rows)

    def _outputs(
        self, result: Any, rows: list[int] | None
    ) -> tuple[list[OutputParts], list[np.ndarray]]:
        self.has_output = True
        # `isinstance` is slow for the abstract class, so `dict` comes first.
        if not isinstance(result, dict) and not isinstance(result, Mapping):
            raise TypeError(f"{self._verb()} {type(result).__name__}, not a dict of arrays")
        missing = [name for name in self.outputs if name not in result]
        if missing:
            raise KeyError(f"{self._verb()} no output {missing[0]!r}, only {list(result)}")
        outputs, kept = [], []
        for name, tensor in self.outputs.items():
            array = _tensors.check("output", name, tensor, result[name], rows)
            parts = []
            for part in split(array, rows):
                encoded = _tensors.encode(tensor.datatype, part)
                parts.append((encoded.__array_interface__["data"][0], encoded.nbytes))
                kept.append(encoded)
            row_shape = array.shape if rows is None else array.shape[1:]
            outputs.append((list(row_shape), parts))
        return outputs, kept

    def _verb(self) -> str:
        if self.open_streams:
            return "generate yielded" if self.open_streams.generate else "step returned"
        return f"{getattr(self.answer, '__name__', 'the model')} returned"

    def unload(self) -> None:
        """Closes all streams and calls the model's `unload`. The worker then ends."""
        if self.open_streams:
            self.open_streams.close_all()
        try:
            if hasattr(self.model, "unload"):
                self.model.unload()
        except BaseException:
            log_traceback()


def torch() -> Any:
    """Returns the module `torch` if the model uses it on a GPU."""
    found = sys.modules.get("torch")
    return found if found and found.cuda.is_initialized() else None


def on(cuda_stream: int | None) -> AbstractContextManager[Any]:
    """Returns a context in which PyTorch computes on this CUDA stream."""
    if cuda_stream is None:
        return nullcontext()
    cuda = torch().cuda
    context: AbstractContextManager[Any] = cuda.stream(cuda.ExternalStream(cuda_stream))
    return context


def specs(named: dict[str, Tensor]) -> list[tuple[str, str, list[int]]]:
    """Returns the tensors in the format that the worker expects."""
    return [(name, tensor.datatype, list(tensor.shape)) for name, tensor in named.items()]


def failure(error: BaseException) -> Reply:
    """Returns the reply for an exception of the model, and logs its traceback."""
    if isinstance(error, InvalidInput):
        return None, True, escape_surrogates(str(error))
    log_traceback()
    return None, False, str(error) if isinstance(error, StepInterrupted) else describe(error)


def may_depend_on_values(error: BaseException, has_output: bool) -> bool:
    """Checks whether the values of the inputs may have caused the exception."""
    if has_output:
        # A ValueError means a wrong shape, which may depend on the inputs' values.
        return isinstance(error, ValueError)
    return not isinstance(error, INDEPENDENT_OF_VALUES) and _sandbox_errors.reason(error) is None


def split(array: np.ndarray, rows: list[int] | None) -> list[np.ndarray]:
    """Splits an output into the parts of the requests."""
    if rows is None or len(rows) == 1:
        return [array]
    ends = accumulate(rows)
    return [array[end - count : end] for end, count in zip(ends, rows)]
