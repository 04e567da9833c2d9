"""Finds a model's class, and reads the inputs, outputs and streams that it declares."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from . import Tensor, _annotations, _tensors
from ._errors import ModelError, line_in, line_of

FILE = "model.py"
"""The name of the model's file if the model's path is a folder."""

STREAMS = 16
"""The default number of streams that a worker generates at a time."""

MAX_STREAMS = 1024

MAX_AXIS = 2**31 - 1

ARGUMENTS = {"infer": "batch", "generate": "request", "start": "request", "step": "states"}
"""The arguments of the methods that a class can have."""


class StreamLimits(NamedTuple):
    """The number of streams that a worker can generate."""

    open: int
    """The maximum number of open streams."""
    per_step: int
    """The maximum number of streams that advance together. It is 1 if streams take turns."""


def find_source(path: Path) -> Path:
    """Returns the model's file. `path` is this file or the folder that contains it."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ModelError(f"{file} not found; correct `path`")
    return file


def load_module(file: Path) -> ModuleType:
    """Imports the model's file. The file may import modules from its folder.

    The folder comes last in the search path, so that its modules hide no installed package.
    """
    name = file.stem.replace(".", "_")
    if importlib.util.find_spec(name) is not None:
        name += "_model"
    sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ModelError(f"{file} is not a Python file; rename it so that it ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        where = f"{error.filename or file}:{error.lineno or 0}"
        raise ModelError(f"{where}: {error.msg}") from error
    except ModuleNotFoundError as error:
        line = line_in(file, error)
        raise ModelError(
            f"{file}:{line}: {sys.executable} has no package {error.name!r}; install it there, "
            "or set `python: {executable: ...}` to the interpreter that has it"
        ) from error
    return module


def model_class(module: ModuleType, file: Path) -> Any:
    """Returns the only class of the module that has ``infer``, ``generate`` or ``step``."""
    own = [
        found
        for _, found in inspect.getmembers(module, inspect.isclass)
        if found.__module__ == module.__name__ and methods(found)
    ]
    if not own:
        raise ModelError(
            f"{file}: no class has a method `infer(self, batch)`, `generate(self, request)` or "
            "`step(self, states)`; add one of them"
        )
    if len(own) > 1:
        names = ", ".join(found.__name__ for found in own)
        raise ModelError(
            f"{file}: several classes have `infer`, `generate` or `step` ({names}); "
            "keep one, or import the others from another file"
        )
    found: Any = own[0]
    if len(methods(found)) > 1:
        line, (one, other) = line_of(found), methods(found)[:2]
        raise ModelError(
            f"{file}:{line}: class {found.__name__} has both `{one}` and `{other}`; remove one"
        )
    (name,) = methods(found)
    check_call(found, name, file)
    if name == "step":
        if not callable(getattr(found, "start", None)):
            raise ModelError(
                f"{file}:{line_of(found)}: class {found.__name__} has `step`, but no "
                "`start(self, request)`; add it"
            )
        check_call(found, "start", file, ("seat",) if getattr(found, "cuda_graph", False) else ())
    return found


def check_call(found: Any, name: str, file: Path, more: tuple[str, ...] = ()) -> None:
    """Checks that a method of the class takes its arguments."""
    method, takes = getattr(found, name), ", ".join((ARGUMENTS[name], *more))
    try:
        inspect.signature(method).bind(None, {}, *more)
    except TypeError as error:
        line = line_of(method, found)
        raise ModelError(
            f"{file}:{line}: `{name}` must be a method `{name}(self, {takes})`: {error}"
        ) from error


def methods(found: type) -> list[str]:
    """Returns which of ``infer``, ``generate`` and ``step`` a class has."""
    names = ("infer", "generate", "step")
    return [name for name in names if callable(getattr(found, name, None))]


def streams(found: Any, file: Path) -> StreamLimits | None:
    """Returns the number of streams that a worker generates, or ``None`` for ``infer``."""
    (method,) = methods(found)
    if method == "infer":
        return None
    most = getattr(found, "streams", STREAMS)
    if not isinstance(most, int) or not 0 < most <= MAX_STREAMS:
        line = line_of(found)
        raise ModelError(
            f"{file}:{line}: `streams` of class {found.__name__} is {most!r}; "
            f"use an integer from 1 to {MAX_STREAMS}"
        )
    return StreamLimits(most, most if method == "step" else 1)


def tensors(found: type, which: str, file: Path) -> dict[str, Tensor]:
    """Checks and returns the class's ``inputs`` or ``outputs``."""
    line = line_of(found)
    example = f'`{which} = {{"x": Tensor("FP32", [-1, 16])}}`'
    declared = getattr(found, which, None)
    (method,) = methods(found)
    if declared is None and method != "step":
        declared = _annotations.tensors(getattr(found, method), which, file)
    if not isinstance(declared, Mapping) or not declared:
        raise ModelError(
            f"{file}:{line}: class {found.__name__} does not declare its {which}; "
            f"add {example}, or annotate its method with a TypedDict"
        )
    for name, tensor in declared.items():
        if not is_name(name) or not isinstance(tensor, Tensor):
            raise ModelError(
                f"{file}:{line}: {which} of class {found.__name__}: invalid entry {name!r}; "
                f"use for example {example}"
            )
        try:
            is_known = _tensors.is_known(tensor.datatype)
        except ImportError as error:
            raise ModelError(
                f"{file}:{line}: {name!r} is BF16, which needs the package ml_dtypes: {error}; "
                f"run `{sys.executable} -m pip install ml_dtypes`"
            ) from error
        if not is_known:
            names = ", ".join(_tensors.NAMES)
            raise ModelError(
                f"{file}:{line}: {name!r} has unknown datatype {tensor.datatype!r}; "
                f"use one of {names}"
            )
        if not all(
            isinstance(axis, int) and (axis == -1 or 0 < axis <= MAX_AXIS) for axis in tensor.shape
        ):
            raise ModelError(
                f"{file}:{line}: {name!r} has shape {tensor.shape!r}; "
                f"each axis must be -1, or from 1 to {MAX_AXIS}"
            )
    return dict(declared)


def is_name(name: object) -> bool:
    """Checks whether the name of a tensor is not empty and can be encoded in UTF-8."""
    try:
        return isinstance(name, str) and name != "" and name.encode() != b""
    except UnicodeEncodeError:
        return False
