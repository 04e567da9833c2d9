"""Records batches of PyTorch models as CUDA graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from . import Tensor, _arena, _tensors

Recording: TypeAlias = tuple[int, list[int], list[tuple[list[int], int, int]]]
"""The graph, the inputs' addresses, and each output's row shape, address and bytes per row."""

WARMUP_RUNS = 3
"""The number of runs before a recording. Libraries choose their kernels in these runs."""


class Recorder:
    """Records a batch for each set of shapes, and keeps the tensors that the recordings use."""

    def __init__(self, arena: _arena.Arena | None) -> None:
        self.kept: list[Any] = []
        self.pool: Any = arena.pool.id if arena else None

    def record(
        self,
        answer: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        tensors: tuple[dict[str, Tensor], dict[str, Tensor]],
        shapes: Sequence[Sequence[int]],
        batched: bool,
    ) -> Recording:
        """Records the work of `answer` on the GPU for inputs of these shapes."""
        torch = sys.modules["torch"]
        if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
            raise RuntimeError(f"PyTorch {torch.__version__} is too old; install 2.8 or later")
        inputs, outputs = tensors
        # Only one recording runs at a time, so all recordings can share one memory pool.
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        batch = {
            name: tensor(np.zeros(shape, _tensors.DTYPES[spec.datatype]), "cuda")
            for (name, spec), shape in zip(inputs.items(), shapes)
        }
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_RUNS):
                answer(batch)
        # cuBLAS keeps a workspace for each stream. A recording must allocate a new workspace.
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(
            graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"
        ):
            result = answer(batch)
            whole = {name: on_gpu(torch, name, result[name]) for name in outputs}
        torch._C._cuda_clearCublasWorkspaces()
        rows = [shapes[0][0]] if batched else None
        for name, value in whole.items():
            # The worker does not check the outputs of replays, so the outputs are checked here.
            _tensors.check("output", name, outputs[name], value, rows)
        self.kept.append((graph, batch, whole))
        return (
            graph.raw_cuda_graph(),
            [batch[name].data_ptr() for name in inputs],
            [row(value, batched) for value in whole.values()],
        )


def on_gpu(torch: Any, name: str, value: Any) -> Any:
    """Returns an output as a contiguous tensor. Raises TypeError for an output on the CPU."""
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        raise TypeError(
            f"output {name!r} is not a PyTorch tensor on the GPU; "
            "return one, or remove `cuda_graph`"
        )
    return value.detach().contiguous()


def row(value: Any, batched: bool) -> tuple[list[int], int, int]:
    """Returns the shape of an output's row, the output's address and the bytes of a row."""
    shape = list(value.shape[1:] if batched else value.shape)
    rows = value.shape[0] if batched else 1
    return shape, value.data_ptr(), value.numel() * value.element_size() // max(rows, 1)


def tensor(array: np.ndarray, device: str) -> Any:
    """Copies an array to a PyTorch tensor, which the model may change."""
    torch = sys.modules["torch"]
    if array.dtype.name == "bfloat16":
        bits = torch.from_numpy(array.view(np.int16))
        return bits.to(device, copy=True).view(torch.bfloat16)
    return torch.from_numpy(array).to(device, copy=True)
