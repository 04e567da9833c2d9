"""Environment variables that point libraries to the one folder that a model may write to."""

from __future__ import annotations

import os
from pathlib import Path


def redirect_to(cache: Path | None, on_gpu: bool) -> None:
    """Points temporary files, caches and the home folder to `cache`, before libraries are imported.

    Most libraries derive their own folders from these: numba, Matplotlib, Hugging Face, PyTorch's
    compiler, Triton. The variables of single libraries keep the values that the operator passed on.
    """
    # The sandbox has no network. Without this, each lookup of a file would wait for a timeout.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if cache is None:
        return
    if on_gpu:
        # All models share the driver's cache of kernels, so its folder does not move.
        kernels = Path("~/.nv/ComputeCache").expanduser()
        os.environ.setdefault("CUDA_CACHE_PATH", str(kernels))
    for name in ("TMPDIR", "HOME", "XDG_CACHE_HOME"):
        os.environ[name] = str(cache)
