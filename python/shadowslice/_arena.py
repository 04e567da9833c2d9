"""Makes PyTorch allocate a model's GPU memory in the worker's arena.

A model that sleeps releases the arena. Its tensors keep their addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import _worker


class Arena:
    """PyTorch's memory pool over the arena. The thread that creates it allocates from it."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        allocator = torch.cuda.memory.CUDAPluggableAllocator(
            _worker.__file__, "shadowslice_allocate", "shadowslice_free"
        )
        self.pool = torch.cuda.MemPool(allocator.allocator())
        self._enter()

    def _enter(self) -> None:
        self.use = self.torch.cuda.use_mem_pool(self.pool)
        self.use.__enter__()

    def content(self) -> list[tuple[int, int]]:
        """Returns the address and the size in bytes of each block that has a tensor."""
        blocks = []
        for segment in self.torch.cuda.memory_snapshot(self.pool.id):
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    blocks.append((address, block["size"]))
                address += block["size"]
        return blocks

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Returns a context in which the thread does not use the pool, so that a recording can."""
        self.use.__exit__(None, None, None)
        try:
            yield
        finally:
            self._enter()


def create(torch: Any) -> tuple[Arena | None, str]:
    """Creates the arena, or returns the reason why this PyTorch cannot use one."""
    if not hasattr(torch.cuda, "MemPool") or not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        return None, f"PyTorch {torch.__version__} is too old to sleep; install 2.8 or later"
    try:
        return Arena(torch), ""
    except RuntimeError as error:
        return None, f"PyTorch cannot use a memory pool: {error}"
