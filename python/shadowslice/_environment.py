"""The one folder that a model may write, as libraries look for it."""

from __future__ import annotations

import os
from pathlib import Path


def redirect_to(cache: Path | None, on_gpu: bool) -> None:
    """Points temporary files, caches and the home folder to `cache`, before libraries are imported.

    Most libraries derive their own folders from these: numba, Matplotlib, Hugging Face, PyTorch's
    compiler, Triton. Variables of single libraries stay as the operator let them through.
    """
    # A worker reaches no network, and without this each look-up of a file waits for it.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if cache is None:
        return
    if on_gpu:
        # The driver's cache of kernels, which all models share, stays where it is.
        kernels = Path("~/.nv/ComputeCache").expanduser()
        os.environ.setdefault("CUDA_CACHE_PATH", str(kernels))
    for name in ("TMPDIR", "HOME", "XDG_CACHE_HOME"):
        os.environ[name] = str(cache)
