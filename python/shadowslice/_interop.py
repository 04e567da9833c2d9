"""Tensors of other libraries as NumPy's arrays on the host."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

HOST = (1, 3)
"""DLPack's devices whose memory the host reads: its own, and what is pinned for CUDA."""


def array(value: Any, dtypes: Mapping[str, np.dtype]) -> np.ndarray:
    """What lies on a GPU is copied on the library's current stream."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return from_torch(torch, value, dtypes)
    if not hasattr(value, "__dlpack__"):
        return np.asarray(value)
    device = int(value.__dlpack_device__()[0])
    if device not in HOST and hasattr(value, "get"):
        # CuPy's arrays are copied by no other way.
        return np.asarray(value.get())
    if hasattr(value, "__array__"):
        return np.asarray(value)
    if device in HOST:
        return np.from_dlpack(value)
    if torch is not None:
        return from_torch(torch, torch.from_dlpack(value), dtypes)
    raise TypeError(f"{type(value).__name__} lies on DLPack's device {device}; copy it to the host")


def from_torch(torch: Any, tensor: Any, dtypes: Mapping[str, np.dtype]) -> np.ndarray:
    """Returns the array, also of a tensor with a gradient, or of bfloat16, unknown to NumPy."""
    on_host = tensor.detach().cpu()
    if on_host.dtype == torch.bfloat16 and "BF16" in dtypes:
        of_bits: np.ndarray = on_host.view(torch.int16).numpy()
        return of_bits.view(dtypes["BF16"])
    of_numbers: np.ndarray = on_host.numpy()
    return of_numbers
