"""Finds a model's class, and what it says of itself."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from . import Tensor, _annotations, _tensors
from ._errors import ModelError, line_in, line_of

FILE = "model.py"
"""In a model's folder."""

STREAMS = 16
"""That a worker generates at a time, unless the class says otherwise; further requests wait."""

MAX_STREAMS = 1024

MAX_AXIS = 2**31 - 1


def find_source(path: Path) -> Path:
    """The model's file."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ModelError(f"there is no {file}")
    return file


def load_module(file: Path) -> ModuleType:
    """The module. What it imports may lie in its own folder, which hides no package."""
    name = file.stem.replace(".", "_")
    if importlib.util.find_spec(name) is not None:
        name += "_model"
    sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ModelError(f"{file} is no Python file; its name must end with .py")
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
            f"{file}:{line}: there is no package {error.name!r} for {sys.executable}; "
            "install it there, or have `python: {executable: ...}` name the interpreter that has it"
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
        raise ModelError(
            f"{file}: no class has a method `infer(self, batch)` or `generate(self, request)`; "
            "write one"
        )
    if len(own) > 1:
        names = ", ".join(found.__name__ for found in own)
        raise ModelError(
            f"{file}: several classes have `infer` or `generate` ({names}); "
            "leave one, or import the others"
        )
    found: Any = own[0]
    if len(methods(found)) > 1:
        line = line_of(found)
        raise ModelError(
            f"{file}:{line}: class {found.__name__} has both `infer` and `generate`; leave one"
        )
    (name,) = methods(found)
    method = getattr(found, name)
    takes = {"infer": "batch", "generate": "request"}[name]
    try:
        inspect.signature(method).bind(None, {})
    except TypeError as error:
        line = line_of(method, found)
        raise ModelError(
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
        line = line_of(found)
        raise ModelError(
            f"{file}:{line}: `streams` of class {found.__name__} is {most!r}; "
            f"it must be 1 to {MAX_STREAMS}"
        )
    return most


def tensors(found: type, which: str, file: Path) -> dict[str, Tensor]:
    """The class's inputs or outputs, checked."""
    line = line_of(found)
    example = f'`{which} = {{"x": Tensor("FP32", [-1, 16])}}`'
    declared = getattr(found, which, None)
    if declared is None:
        (method,) = methods(found)
        declared = _annotations.tensors(getattr(found, method), which, file)
    if not isinstance(declared, Mapping) or not declared:
        raise ModelError(
            f"{file}:{line}: class {found.__name__} does not say its {which}; write {example}, "
            "or annotate its method with a TypedDict"
        )
    for name, tensor in declared.items():
        if not is_name(name) or not isinstance(tensor, Tensor):
            raise ModelError(
                f"{file}:{line}: {which} of class {found.__name__}: {name!r} is none; "
                f"write {example}"
            )
        try:
            is_known = _tensors.is_known(tensor.datatype)
        except ImportError as error:
            raise ModelError(
                f"{file}:{line}: {name!r} is BF16, which NumPy has by another package: {error}; "
                f"`{sys.executable} -m pip install ml_dtypes` installs it"
            ) from error
        if not is_known:
            names = ", ".join(_tensors.NAMES)
            raise ModelError(
                f"{file}:{line}: {name!r} has datatype {tensor.datatype!r}; there are {names}"
            )
        if not all(
            isinstance(axis, int) and (axis == -1 or 0 < axis <= MAX_AXIS) for axis in tensor.shape
        ):
            raise ModelError(
                f"{file}:{line}: {name!r} has shape {tensor.shape!r}; "
                f"an axis is -1 or 1 to {MAX_AXIS}"
            )
    return dict(declared)


def is_name(name: object) -> bool:
    """Whether a tensor may be called so in a message."""
    try:
        return isinstance(name, str) and name != "" and name.encode() != b""
    except UnicodeEncodeError:
        return False
