"""Makes PyTorch allocate a model's tensors on the GPU in the worker's arena.

A model that sleeps releases the arena. Its tensors keep their addresses.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from . import _worker


class Arena:
    """PyTorch's memory pool over the arena.

    The pool contains what the model's ``load`` allocates, and the memory of recordings. Other
    batches use PyTorch's usual memory, which it can free at any time.
    """

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        allocator = torch.cuda.memory.CUDAPluggableAllocator(
            _worker.__file__, "shadowslice_allocate", "shadowslice_free"
        )
        self.pool = torch.cuda.MemPool(allocator.allocator())

    def use(self) -> AbstractContextManager[None]:
        """Returns a context in which this thread allocates from the pool."""
        context: AbstractContextManager[None] = self.torch.cuda.use_mem_pool(self.pool)
        return context

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


def create(torch: Any) -> tuple[Arena | None, str]:
    """Creates the arena, or returns the reason why this PyTorch cannot use one."""
    if not hasattr(torch.cuda, "MemPool") or not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        return None, f"PyTorch {torch.__version__} is too old to sleep; install 2.8 or later"
    try:
        return Arena(torch), ""
    except RuntimeError as error:
        return None, f"PyTorch cannot use a memory pool: {error}"
