"""Loads a model's class, and runs its batches. The worker calls it."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from . import Context, InvalidInput, Tensor, _tensors

FILE = "model.py"
"""In a model's folder."""

STREAMS = 16
"""That a worker generates at a time, unless the class says otherwise; further requests wait."""

MAX_STREAMS = 1024

TRACEBACK_LINES = 40
"""Of a traceback, the last lines, are logged."""


Spec: TypeAlias = tuple[str, str, list[int]]
"""Name, datatype, whole shape."""

Answered: TypeAlias = tuple[list[int], list[tuple[int, int]]]
"""An output: its shape without the batch axis, and each request's part as address and length."""


Told: TypeAlias = tuple[tuple[list[Answered], list[np.ndarray], bool] | None, bool, str]
"""The outputs' shapes and the addresses of their parts, what keeps them, and whether there is more; or
``None``, whether the input is at fault, and why."""


class Faulty(Exception):
    """The model cannot be loaded; the text says why."""


class Runner:
    """The model of this process."""

    def __init__(self) -> None:
        self.model: Any = None
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.streams = 0
        self.open: dict[int, Iterator[Any]] = {}

    def load(
        self, name: str, path: Path, cache: Path | None, on_gpu: bool
    ) -> tuple[tuple[list[Spec], list[Spec], int] | None, str]:
        """The inputs and outputs, each as name, datatype and shape, and how many streams it generates
        at a time; or ``None`` and why not."""
        try:
            file = source(path)
            context = Context(
                name=name,
                folder=file.parent,
                cache=cache,
                device="cuda" if on_gpu else "cpu",
            )
            if cache:
                os.environ["TMPDIR"] = str(cache)
            self._load(file, context)
        except Faulty as fault:
            return None, str(fault)
        except BaseException as error:
            log_traceback()
            return None, told(error)
        return (listed(self.inputs), listed(self.outputs), self.streams), ""

    def _load(self, file: Path, context: Context) -> None:
        found = model_class(imported(file), file)
        self.inputs = tensors(found, "inputs", file)
        self.outputs = tensors(found, "outputs", file)
        self.streams = streams(found, file)
        self.model = found()
        if hasattr(self.model, "load"):
            self.model.load(context)

    def movable(self) -> str | None:
        """Why batches cannot be run on a CUDA stream that is given, if they cannot."""
        return None if torch() else "of Python models only those that use PyTorch take a stream"

    def left(self) -> None:
        """A stream is not used for a while: PyTorch keeps memory for each."""
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
    ) -> Told:
        """Answers a batch, or begins a stream of this number. The model computes on this CUDA
        stream."""
        try:
            batch = {
                name: _tensors.read(tensor.datatype, shape, memoryview(view))
                for (name, tensor), shape, view in zip(self.inputs.items(), shapes, data)
            }
            if self.streams:
                # The memory of a request is another's once its stream has begun.
                kept = {name: array.copy() for name, array in batch.items()}
                self.open[stream] = iter(self.model.generate(kept))
                return self.step(stream, cuda)
            with on(cuda):
                answered = self.model.infer(batch)
            return (*self._outputs(answered, rows), False), False, ""
        except BaseException as error:
            return failed(error)

    def step(self, stream: int, cuda: int | None) -> Told:
        """The next answer of a stream."""
        generator = self.open.pop(stream)
        try:
            with on(cuda):
                answered = next(generator)
            outputs = self._outputs(answered, None)
        except StopIteration:
            return ([], [], False), False, ""
        except BaseException as error:
            return failed(error)
        self.open[stream] = generator
        return (*outputs, True), False, ""

    def close(self, stream: int) -> None:
        """Nobody waits for the rest of a stream."""
        generator = self.open.pop(stream, None)
        try:
            if hasattr(generator, "close"):
                generator.close()
        except BaseException:
            log_traceback()

    def _outputs(
        self, answered: Any, rows: list[int] | None
    ) -> tuple[list[Answered], list[np.ndarray]]:
        # The abstract class is slow to ask.
        if not isinstance(answered, dict) and not isinstance(answered, Mapping):
            raise TypeError(
                f"{self._did()} {type(answered).__name__}, and must return a dict of arrays"
            )
        missing = [name for name in self.outputs if name not in answered]
        if missing:
            raise KeyError(f"{self._did()} no output {missing[0]!r}, but {list(answered)}")
        outputs, kept = [], []
        for name, tensor in self.outputs.items():
            array = checked(name, tensor, answered[name], rows)
            parts = []
            for part in split(array, rows):
                written = _tensors.written(tensor.datatype, part)
                parts.append((written.__array_interface__["data"][0], written.nbytes))
                kept.append(written)
            row_shape = array.shape if rows is None else array.shape[1:]
            outputs.append((list(row_shape), parts))
        return outputs, kept

    def _did(self) -> str:
        return "generate yielded" if self.streams else "infer returned"

    def unload(self) -> None:
        """The worker ends."""
        for stream in list(self.open):
            self.close(stream)
        try:
            if hasattr(self.model, "unload"):
                self.model.unload()
        except BaseException:
            log_traceback()


def torch() -> Any:
    """PyTorch, if the model uses it on a GPU."""
    found = sys.modules.get("torch")
    return found if found and found.cuda.is_initialized() else None


def on(cuda_stream: int | None) -> AbstractContextManager[Any]:
    """Has PyTorch compute on this stream meanwhile."""
    if cuda_stream is None:
        return nullcontext()
    cuda = torch().cuda
    context: AbstractContextManager[Any] = cuda.stream(cuda.ExternalStream(cuda_stream))
    return context


def source(path: Path) -> Path:
    """The model's file."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise Faulty(f"there is no {file}")
    return file


def imported(file: Path) -> ModuleType:
    """The module. What it imports may lie in its own folder, which hides no package."""
    name = file.stem.replace(".", "_")
    if importlib.util.find_spec(name) is not None:
        name += "_model"
    sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise Faulty(f"{file} is no Python file; its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise Faulty(f"{error.filename}:{error.lineno}: {error.msg}") from error
    except ModuleNotFoundError as error:
        line = line_in(file, error)
        raise Faulty(
            f"{file}:{line}: there is no package {error.name!r} for {sys.executable}; install it there, or "
            "have `python: {executable: ...}` name the interpreter that has it"
        ) from error
    return module


def model_class(module: ModuleType, file: Path) -> Any:
    """The only class of the module that has ``infer`` or ``generate``."""
    own = [
        found
        for _, found in inspect.getmembers(module, inspect.isclass)
        if found.__module__ == module.__name__ and methods(found)
    ]
    if not own:
        raise Faulty(
            f"{file}: no class has a method `infer(self, batch)` or `generate(self, request)`; write one"
        )
    if len(own) > 1:
        names = ", ".join(found.__name__ for found in own)
        raise Faulty(
            f"{file}: several classes have `infer` or `generate` ({names}); leave one, or import the others"
        )
    found: Any = own[0]
    if len(methods(found)) > 1:
        line = inspect.getsourcelines(found)[1]
        raise Faulty(
            f"{file}:{line}: class {found.__name__} has both `infer` and `generate`; leave one"
        )
    (name,) = methods(found)
    method = getattr(found, name)
    takes = {"infer": "batch", "generate": "request"}[name]
    try:
        inspect.signature(method).bind(None, {})
    except TypeError as error:
        line = inspect.getsourcelines(method)[1]
        raise Faulty(
            f"{file}:{line}: `{name}` must take one {takes}, as `{name}(self, {takes})`: {error}"
        ) from error
    return found


def methods(found: type) -> list[str]:
    """Which of the two methods that answer requests a class has."""
    return [name for name in ("infer", "generate") if callable(getattr(found, name, None))]


def streams(found: Any, file: Path) -> int:
    """How many streams a worker generates at a time; 0 for a class with ``infer``."""
    if "generate" not in methods(found):
        return 0
    most = getattr(found, "streams", STREAMS)
    if not isinstance(most, int) or not 0 < most <= MAX_STREAMS:
        line = inspect.getsourcelines(found)[1]
        raise Faulty(
            f"{file}:{line}: `streams` of class {found.__name__} is {most!r}; it must be 1 to {MAX_STREAMS}"
        )
    return most


def tensors(found: type, which: str, file: Path) -> dict[str, Tensor]:
    """The class's inputs or outputs, checked."""
    line = inspect.getsourcelines(found)[1]
    example = f'`{which} = {{"x": Tensor("FP32", [-1, 16])}}`'
    declared = getattr(found, which, None)
    if not isinstance(declared, Mapping) or not declared:
        raise Faulty(
            f"{file}:{line}: class {found.__name__} does not say its {which}; write {example}"
        )
    for name, tensor in declared.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise Faulty(
                f"{file}:{line}: {which} of class {found.__name__}: {name!r} is none; write {example}"
            )
        if tensor.datatype not in _tensors.DTYPES:
            known = ", ".join(_tensors.DTYPES)
            raise Faulty(
                f"{file}:{line}: {name!r} has datatype {tensor.datatype!r}; there are {known}"
            )
        if not all(isinstance(axis, int) and (axis == -1 or axis > 0) for axis in tensor.shape):
            raise Faulty(
                f"{file}:{line}: {name!r} has shape {tensor.shape!r}; an axis is -1 or above 0"
            )
    return dict(declared)


def listed(named: dict[str, Tensor]) -> list[tuple[str, str, list[int]]]:
    """As the worker wants it."""
    return [(name, tensor.datatype, list(tensor.shape)) for name, tensor in named.items()]


def checked(name: str, tensor: Tensor, value: Any, rows: list[int] | None) -> np.ndarray:
    """The output as an array of the datatype and shape that the class declares."""
    array = np.asarray(value)
    wanted = _tensors.DTYPES[tensor.datatype]
    if tensor.datatype == "BYTES":
        if array.dtype.kind not in "OSU":
            raise TypeError(f"output {name!r} has dtype {array.dtype}, and BYTES need bytes or str")
    elif array.dtype != wanted:
        raise TypeError(f"output {name!r} has dtype {array.dtype}, and must have {wanted}")
    shape = list(tensor.shape)
    if rows is not None:
        shape[0] = sum(rows)
    fits = array.ndim == len(shape) and all(
        axis in (-1, size) for axis, size in zip(shape, array.shape)
    )
    if not fits:
        raise ValueError(f"output {name!r} has shape {list(array.shape)}, and must have {shape}")
    return array


def split(array: np.ndarray, rows: list[int] | None) -> list[np.ndarray]:
    """Each request's part."""
    if rows is None or len(rows) == 1:
        return [array]
    ends = accumulate(rows)
    return [array[end - count : end] for end, count in zip(ends, rows)]


def failed(error: BaseException) -> Told:
    """What comes of an exception of the model."""
    if isinstance(error, InvalidInput):
        return None, True, str(error)
    log_traceback()
    return None, False, told(error)


def told(error: BaseException) -> str:
    """An exception in one line."""
    if isinstance(error, SystemExit):
        return "the model called sys.exit"
    return "".join(traceback.format_exception_only(error)).strip()


def line_in(file: Path, error: BaseException) -> int:
    """The last line of the file on the way to the error."""
    frames = traceback.extract_tb(error.__traceback__)
    return next(
        (frame.lineno or 0 for frame in reversed(frames) if Path(frame.filename) == file), 0
    )


def log_traceback() -> None:
    """Writes the exception that is handled to the worker's log."""
    lines = traceback.format_exc().rstrip().splitlines()
    print("\n".join(lines[-TRACEBACK_LINES:]), file=sys.stderr, flush=True)
