"""Loads a model's class, and runs its batches. The worker calls it."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from . import Context, InvalidInput, Tensor, _annotations, _options, _tensors
from ._faults import Faulty, line_in, log_traceback, told

FILE = "model.py"
"""In a model's folder."""

Spec: TypeAlias = tuple[str, str, list[int]]
"""Name, datatype, whole shape."""

Answered: TypeAlias = tuple[list[int], list[tuple[int, int]]]
"""An output: its shape without the batch axis, and each request's part as address and length."""


class Runner:
    """The model of this process."""

    def __init__(self) -> None:
        self.model: Any = None
        self.file = Path()
        self.answer: Any = None
        """The model's method that answers batches."""
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}

    def load(
        self, name: str, path: Path, cache: Path | None, on_gpu: bool
    ) -> tuple[tuple[list[Spec], list[Spec]] | None, str]:
        """The inputs and outputs, each as name, datatype and shape; or ``None`` and why not."""
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
        return (listed(self.inputs), listed(self.outputs)), ""

    def _load(self, file: Path, context: Context) -> None:
        found = model_class(imported(file), file)
        self.inputs = tensors(found, "inputs", file)
        self.outputs = tensors(found, "outputs", file)
        _options.check(found, file)
        self.file, self.model = file, found()
        self.answer = self.model.infer
        if hasattr(self.model, "load"):
            self.model.load(context)

    def basis(self) -> tuple[tuple[bool, list[_options.Given] | None] | None, str]:
        """Whether the same input always has the same answer, and the inputs of `warmup`, if there
        is one; or ``None`` and why not. From now on `reference` answers, if there is one."""
        found = type(self.model)
        if getattr(found, "reference", None) is not None:
            self.answer = self.model.reference
        try:
            given = None
            if getattr(found, "warmup", None) is not None:
                given = _options.given(self.model, self.file, self.inputs, self.batched())
        except Faulty as fault:
            return None, str(fault)
        return (getattr(found, "deterministic", True), given), ""

    def batched(self) -> bool:
        """Whether the first axis of all tensors is the batch."""
        tensors = [*self.inputs.values(), *self.outputs.values()]
        return all(tensor.shape and tensor.shape[0] == -1 for tensor in tensors)

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
        stream: int | None,
    ) -> tuple[tuple[list[Answered], list[np.ndarray]] | None, bool, str]:
        """The outputs' shapes and the addresses of their parts, and what keeps them; or ``None``,
        whether the input is at fault, and why. The model computes on this CUDA stream."""
        try:
            batch = {
                name: _tensors.read(tensor.datatype, shape, memoryview(view))
                for (name, tensor), shape, view in zip(self.inputs.items(), shapes, data)
            }
            with on(stream):
                return self._outputs(self.answer(batch), rows), False, ""
        except InvalidInput as error:
            return None, True, str(error)
        except BaseException as error:
            log_traceback()
            return None, False, told(error)

    def _outputs(
        self, answered: Any, rows: list[int] | None
    ) -> tuple[list[Answered], list[np.ndarray]]:
        # The abstract class is slow to ask.
        if not isinstance(answered, dict) and not isinstance(answered, Mapping):
            raise TypeError(
                f"{self._method()} returned {type(answered).__name__}, "
                "and must return a dict of arrays"
            )
        missing = [name for name in self.outputs if name not in answered]
        if missing:
            raise KeyError(
                f"{self._method()} returned no output {missing[0]!r}; it returned {list(answered)}"
            )
        outputs, kept = [], []
        for name, tensor in self.outputs.items():
            array = _tensors.checked("output", name, tensor, answered[name], rows)
            parts = []
            for part in split(array, rows):
                written = _tensors.written(tensor.datatype, part)
                parts.append((written.__array_interface__["data"][0], written.nbytes))
                kept.append(written)
            row_shape = array.shape if rows is None else array.shape[1:]
            outputs.append((list(row_shape), parts))
        return outputs, kept

    def _method(self) -> str:
        return getattr(self.answer, "__name__", "infer")

    def unload(self) -> None:
        """The worker ends."""
        try:
            if hasattr(self.model, "unload"):
                self.model.unload()
        except BaseException:
            log_traceback()


def torch() -> Any:
    """PyTorch, if the model uses it on a GPU."""
    found = sys.modules.get("torch")
    return found if found and found.cuda.is_initialized() else None


def on(stream: int | None) -> AbstractContextManager[Any]:
    """Has PyTorch compute on this stream meanwhile."""
    if stream is None:
        return nullcontext()
    cuda = torch().cuda
    context: AbstractContextManager[Any] = cuda.stream(cuda.ExternalStream(stream))
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
    """The only class of the module that has ``infer``."""
    own = [
        found
        for _, found in inspect.getmembers(module, inspect.isclass)
        if found.__module__ == module.__name__ and callable(getattr(found, "infer", None))
    ]
    if not own:
        raise Faulty(f"{file}: no class has a method `infer(self, batch)`; write one")
    if len(own) > 1:
        names = ", ".join(found.__name__ for found in own)
        raise Faulty(
            f"{file}: several classes have `infer` ({names}); leave one, or import the others"
        )
    found: Any = own[0]
    try:
        inspect.signature(found.infer).bind(None, {})
    except TypeError as error:
        line = inspect.getsourcelines(found.infer)[1]
        raise Faulty(
            f"{file}:{line}: `infer` must take one batch, as `infer(self, batch)`: {error}"
        ) from error
    return found


def tensors(found: type, which: str, file: Path) -> dict[str, Tensor]:
    """The class's inputs or outputs, checked."""
    line = inspect.getsourcelines(found)[1]
    example = f'`{which} = {{"x": Tensor("FP32", [-1, 16])}}`'
    declared = getattr(found, which, None)
    if declared is None:
        declared = _annotations.tensors(getattr(found, "infer"), which, file)
    if not isinstance(declared, Mapping) or not declared:
        raise Faulty(
            f"{file}:{line}: class {found.__name__} does not say its {which}; write {example}, "
            "or annotate `infer` with a TypedDict"
        )
    for name, tensor in declared.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise Faulty(
                f"{file}:{line}: {which} of class {found.__name__}: {name!r} is none; write {example}"
            )
        try:
            is_known = _tensors.known(tensor.datatype)
        except ImportError as error:
            raise Faulty(
                f"{file}:{line}: {name!r} is BF16, which NumPy has by another package: {error}; "
                f"`{sys.executable} -m pip install ml_dtypes` installs it"
            ) from error
        if not is_known:
            known = ", ".join(_tensors.NAMES)
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


def split(array: np.ndarray, rows: list[int] | None) -> list[np.ndarray]:
    """Each request's part."""
    if rows is None or len(rows) == 1:
        return [array]
    ends = accumulate(rows)
    return [array[end - count : end] for end, count in zip(ends, rows)]
