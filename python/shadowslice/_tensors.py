"""Converts tensors between the bytes in shared memory and NumPy arrays."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import Tensor, _interop

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "UINT8": np.uint8,
        "UINT16": np.uint16,
        "UINT32": np.uint32,
        "UINT64": np.uint64,
        "INT8": np.int8,
        "INT16": np.int16,
        "INT32": np.int32,
        "INT64": np.int64,
        "FP16": np.float16,
        "FP32": np.float32,
        "FP64": np.float64,
        "BYTES": np.object_,
    }.items()
}


NAMES = (*DTYPES, "BF16")


def is_known(datatype: str) -> bool:
    """Checks whether this datatype exists. Raises ImportError for BF16 without `ml_dtypes`."""
    if datatype == "BF16" and datatype not in DTYPES:
        import ml_dtypes  # type: ignore[import-not-found,unused-ignore]

        DTYPES[datatype] = np.dtype(ml_dtypes.bfloat16)
    return datatype in DTYPES


def decode(datatype: str, shape: Sequence[int], data: memoryview) -> np.ndarray:
    """Decodes bytes in the protocol's encoding. Returns an array of the elements."""
    if datatype == "BYTES":
        elements = np.empty(len(_split_elements(data)), dtype=np.object_)
        elements[:] = _split_elements(data)
        return elements.reshape(shape)
    array = np.frombuffer(data, dtype=DTYPES[datatype]).reshape(shape)
    array.flags.writeable = False
    return array


def _split_elements(data: memoryview) -> list[bytes]:
    elements, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        elements.append(bytes(data[at + 4 : at + 4 + length]))
        at += 4 + length
    return elements


def check(which: str, name: str, tensor: Tensor, value: Any, rows: list[int] | None) -> np.ndarray:
    """Returns the value as an array of the datatype and shape that the class declares.

    Raises TypeError for another datatype, and ValueError for another shape.
    """
    if type(value) is np.ndarray:
        array = value
    elif tensor.datatype == "BYTES" and isinstance(value, list):
        # An object array is used, because NumPy's string types drop trailing zero bytes.
        array = np.asarray(value, dtype=np.object_)
    else:
        array = _interop.array(value, DTYPES)
    wanted = DTYPES[tensor.datatype]
    if tensor.datatype == "BYTES":
        if array.dtype.kind not in "OSU":
            raise TypeError(f"{which} {name!r} has dtype {array.dtype}; BYTES need bytes or str")
    elif array.dtype != wanted:
        raise TypeError(f"{which} {name!r} has dtype {array.dtype}, but {wanted} is declared")
    shape = list(tensor.shape)
    if rows is not None:
        shape[0] = sum(rows)
    fits = array.ndim == len(shape) and all(
        axis in (-1, size) for axis, size in zip(shape, array.shape)
    )
    if not fits:
        raise ValueError(f"{which} {name!r} has shape {list(array.shape)}, but expected {shape}")
    return array


def encode(datatype: str, array: np.ndarray) -> np.ndarray:
    """Returns a contiguous array with the elements in the protocol's encoding."""
    if datatype == "BOOL":
        # A byte of a NumPy `bool` may have a value other than 0 and 1. Clients must only get 0 or
        # 1.
        return np.not_equal(array.view(np.uint8), 0, order="C")
    if datatype != "BYTES":
        return np.ascontiguousarray(array)
    packed = bytearray()
    for element in array.reshape(-1):
        # For an integer n, `bytes(n)` would return n zero bytes, but `memoryview` raises TypeError.
        text = element.encode() if isinstance(element, str) else bytes(memoryview(element))
        packed += struct.pack("<I", len(text)) + text
    return np.frombuffer(bytes(packed), dtype=np.uint8)
