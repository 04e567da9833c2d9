"""Sets the environment variables that tell libraries where they can write files."""

from __future__ import annotations

import os
from pathlib import Path


def redirect_to(cache: Path | None, on_gpu: bool) -> None:
    """Makes `cache` the home folder and the folder of temporary files and caches.

    Call this before libraries are imported. Most libraries derive their folders from these, for
    example numba, Matplotlib, Hugging Face, PyTorch's compiler and Triton.

    Variables that only one library reads keep the operator's values.
    """
    # The sandbox has no network. Without this setting, each file lookup would wait for a timeout.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if cache is None:
        return
    if on_gpu:
        # All models share the driver's kernel cache, so this cache keeps its folder.
        kernels = Path("~/.nv/ComputeCache").expanduser()
        os.environ.setdefault("CUDA_CACHE_PATH", str(kernels))
    for name in ("TMPDIR", "HOME", "XDG_CACHE_HOME"):
        os.environ[name] = str(cache)
