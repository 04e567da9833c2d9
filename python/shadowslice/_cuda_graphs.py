"""Models whose batches are recorded as CUDA graphs. Inputs and outputs are PyTorch's tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from . import Tensor, _tensors

Recording: TypeAlias = tuple[int, list[int], list[tuple[list[int], int, int]]]
"""The graph, the inputs' addresses, and of each output a row's shape, its address, its bytes."""

WARMUP_RUNS = 3
"""Runs before a recording, in which libraries choose their kernels."""


class Recorder:
    """Records batches, one of each shape, and keeps what the recordings use."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.pool: Any = None

    def record(
        self,
        answer: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        tensors: tuple[dict[str, Tensor], dict[str, Tensor]],
        shapes: Sequence[Sequence[int]],
        batched: bool,
    ) -> Recording:
        """Records what `answer` does on the GPU with inputs of these shapes."""
        torch = sys.modules["torch"]
        if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
            raise RuntimeError(f"PyTorch {torch.__version__} is too old: 2.8 or later is needed")
        inputs, outputs = tensors
        # Recordings run one at a time, so they can have one memory.
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
        # cuBLAS keeps memory for each stream; a recording's must be its own.
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
            # Its bytes go to clients as they are.
            _tensors.check("output", name, outputs[name], value, rows)
        self.kept.append((graph, batch, whole))
        return (
            graph.raw_cuda_graph(),
            [batch[name].data_ptr() for name in inputs],
            [row(value, batched) for value in whole.values()],
        )


def on_gpu(torch: Any, name: str, value: Any) -> Any:
    """An output in one piece."""
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        raise TypeError(
            f"output {name!r} is no tensor of PyTorch on the GPU, as `cuda_graph = True` wants"
        )
    return value.detach().contiguous()


def row(value: Any, batched: bool) -> tuple[list[int], int, int]:
    """An output's row: shape, address, bytes."""
    shape = list(value.shape[1:] if batched else value.shape)
    rows = value.shape[0] if batched else 1
    return shape, value.data_ptr(), value.numel() * value.element_size() // max(rows, 1)


def tensor(array: np.ndarray, device: str) -> Any:
    """A tensor of PyTorch that the model may change."""
    torch = sys.modules["torch"]
    if array.dtype.name == "bfloat16":
        bits = torch.from_numpy(array.view(np.int16))
        return bits.to(device, copy=True).view(torch.bfloat16)
    return torch.from_numpy(array).to(device, copy=True)
