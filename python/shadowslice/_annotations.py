"""Reads a model's inputs and outputs from the annotations of the model's method."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import Tensor
from ._errors import ModelError, describe, line_of


def tensors(method: Callable[..., Any], which: str, file: Path) -> dict[str, Tensor] | None:
    """Returns the tensors that the annotations of `method` declare.

    `which` is ``inputs`` for the annotation of the batch, or ``outputs`` for the annotation of the
    returned value. Returns ``None`` if this annotation is not a `TypedDict`.
    """
    where = f"{file}:{line_of(method)}"
    try:
        hints = typing.get_type_hints(method, include_extras=True)
        batch = list(inspect.signature(method).parameters)[1]
        fields = hints.get("return" if which == "outputs" else batch)
        if not (isinstance(fields, type) and hasattr(fields, "__total__")):
            return None
        annotated = typing.get_type_hints(fields, include_extras=True)
    except Exception as error:
        raise ModelError(
            f"{where}: cannot read the annotations of `{method.__name__}`: {describe(error)}"
        ) from error
    return {name: tensor(name, hint, fields, where) for name, hint in annotated.items()}


def tensor(name: str, hint: Any, fields: type, where: str) -> Tensor:
    """Returns the `Tensor` in the annotation of a field."""
    found = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Tensor)]
    if not found:
        raise ModelError(
            f"{where}: field {name!r} of {fields.__name__} has no Tensor; write "
            f'`{name}: Annotated[np.ndarray, Tensor("FP32", [-1, 16])]`'
        )
    return found[0]
