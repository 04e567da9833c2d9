"""What a model's class may have besides: `warmup`, `reference`, `deterministic`, `cuda_graph`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from . import Tensor, _tensors
from ._errors import ModelError, describe, line_in, line_of, log_traceback

WarmupInput: TypeAlias = tuple[list[int], bytes]
"""An input's whole shape and its bytes in the protocol."""

CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "warmup": ("warmup(self)", (None,)),
    "reference": ("reference(self, batch)", (None, {})),
}
"""How each method is written, and what it is called with."""


def check(found: type, file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises `Faulty` for what the class has otherwise than it should."""
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
                f"{where}: `{name}` of class {found.__name__} is {value!r}, "
                "and must be True or False"
            )
    if getattr(found, "cuda_graph", False):
        if hasattr(found, "generate"):
            raise ModelError(
                f"{where}: a stream cannot be recorded; "
                f"leave out `cuda_graph` of class {found.__name__}"
            )
        texts = [name for name, tensor in tensors.items() if tensor.datatype == "BYTES"]
        if texts:
            raise ModelError(
                f"{where}: {texts[0]!r} is BYTES, which no GPU computes; leave out `cuda_graph`"
            )


def warmup_inputs(
    model: Any, file: Path, inputs: dict[str, Tensor], batched: bool
) -> list[WarmupInput]:
    """What `warmup` returns, checked: one row of each input if they are batched."""
    where = f"{file}:{line_of(model.warmup, type(model))}: `warmup` of class {type(model).__name__}"
    try:
        returned = model.warmup()
    except BaseException as error:
        log_traceback()
        raise ModelError(
            f"{where} failed at line {line_in(file, error)}: {describe(error)}"
        ) from error
    if not isinstance(returned, Mapping):
        raise ModelError(
            f"{where} returned {type(returned).__name__}, and must return a dict of arrays"
        )
    unknown = [name for name in returned if name not in inputs]
    if unknown:
        raise ModelError(f"{where} returned {unknown[0]!r}, and there is no such input")
    missing = [name for name in inputs if name not in returned]
    if missing:
        raise ModelError(f"{where} returned no input {missing[0]!r}; it returned {list(returned)}")
    rows = [1] if batched else None
    try:
        return [encode(name, tensor, returned[name], rows) for name, tensor in inputs.items()]
    except (TypeError, ValueError) as error:
        raise ModelError(f"{where}: {error}") from error


def encode(name: str, tensor: Tensor, value: Any, rows: list[int] | None) -> WarmupInput:
    """An input's shape and bytes."""
    array = _tensors.check("input", name, tensor, value, rows)
    return list(array.shape), _tensors.encode(tensor.datatype, array).tobytes()
