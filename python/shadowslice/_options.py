"""Checks a class's optional members: `warmup`, `reference`, `deterministic`, `cuda_graph`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from . import Tensor, _tensors
from ._errors import ModelError, describe, line_in, line_of, log_traceback

WarmupInput: TypeAlias = tuple[list[int], bytes]
"""The whole shape of an input, and the input's bytes in the protocol's encoding."""

CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "warmup": ("warmup(self)", (None,)),
    "reference": ("reference(self, batch)", (None, {})),
}
"""The signature of each method, and arguments that fit it."""


def check(found: type, file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Checks the optional members of a class. Raises `ModelError` for an invalid one."""
    for name, (written, arguments) in CALLS.items():
        method = getattr(found, name, None)
        if method is None:
            continue
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError as error:
            raise ModelError(
                f"{file}:{line_of(method, found)}: `{name}` must be a method `{written}`: {error}"
            ) from error
    where = f"{file}:{line_of(found)}"
    for name in ("deterministic", "cuda_graph"):
        value = getattr(found, name, False)
        if not isinstance(value, bool):
            raise ModelError(
                f"{where}: `{name}` of class {found.__name__} is {value!r}; use True or False"
            )
    if getattr(found, "cuda_graph", False):
        if hasattr(found, "generate"):
            raise ModelError(
                f"{where}: CUDA graphs do not support `generate`; use `step`, or "
                f"remove `cuda_graph` from class {found.__name__}"
            )
        texts = [name for name, tensor in tensors.items() if tensor.datatype == "BYTES"]
        if texts:
            raise ModelError(
                f"{where}: CUDA graphs do not support BYTES ({texts[0]!r}); remove `cuda_graph`"
            )


def warmup_inputs(
    model: Any, file: Path, inputs: dict[str, Tensor], batched: bool
) -> list[WarmupInput]:
    """Calls `warmup`, and checks and returns its inputs. If `batched`, each must have one row."""
    where = f"{file}:{line_of(model.warmup, type(model))}: `warmup` of class {type(model).__name__}"
    try:
        returned = model.warmup()
    except BaseException as error:
        log_traceback()
        raise ModelError(
            f"{where} failed at line {line_in(file, error)}: {describe(error)}"
        ) from error
    if not isinstance(returned, Mapping):
        raise ModelError(f"{where} returned {type(returned).__name__}; return a dict of arrays")
    unknown = [name for name in returned if name not in inputs]
    if unknown:
        raise ModelError(
            f"{where} returned unknown input {unknown[0]!r}; the inputs are {list(inputs)}"
        )
    missing = [name for name in inputs if name not in returned]
    if missing:
        raise ModelError(
            f"{where} returned no array for input {missing[0]!r}, only for {list(returned)}"
        )
    rows = [1] if batched else None
    try:
        return [encode(name, tensor, returned[name], rows) for name, tensor in inputs.items()]
    except (TypeError, ValueError) as error:
        raise ModelError(f"{where}: {error}") from error


def encode(name: str, tensor: Tensor, value: Any, rows: list[int] | None) -> WarmupInput:
    """Checks an input's value, and returns the input's shape and bytes."""
    array = _tensors.check("input", name, tensor, value, rows)
    return list(array.shape), _tensors.encode(tensor.datatype, array).tobytes()
