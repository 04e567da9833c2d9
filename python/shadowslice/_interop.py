"""Converts tensors of other libraries to NumPy arrays on the host."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

HOST = (1, 3)
"""The DLPack devices whose memory the host can read: CPU and CUDA pinned memory."""


def array(value: Any, dtypes: Mapping[str, np.dtype]) -> np.ndarray:
    """Returns the value as an array. Copies a value on a GPU on the library's current stream."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return from_torch(torch, value, dtypes)
    if not hasattr(value, "__dlpack__"):
        return np.asarray(value)
    device = int(value.__dlpack_device__()[0])
    if device not in HOST and hasattr(value, "get"):
        # Only the method `get` copies a CuPy array to the host.
        return np.asarray(value.get())
    if hasattr(value, "__array__"):
        return np.asarray(value)
    if device in HOST:
        return np.from_dlpack(value)
    if torch is not None:
        return from_torch(torch, torch.from_dlpack(value), dtypes)
    raise TypeError(f"{type(value).__name__} is on DLPack device {device}; copy it to the host")


def from_torch(torch: Any, tensor: Any, dtypes: Mapping[str, np.dtype]) -> np.ndarray:
    """Returns a PyTorch tensor as an array, even if the tensor has a gradient or is bfloat16.

    NumPy itself has no type for bfloat16.
    """
    on_host = tensor.detach().cpu()
    if on_host.dtype == torch.bfloat16 and "BF16" in dtypes:
        of_bits: np.ndarray = on_host.view(torch.int16).numpy()
        return of_bits.view(dtypes["BF16"])
    of_numbers: np.ndarray = on_host.numpy()
    return of_numbers
