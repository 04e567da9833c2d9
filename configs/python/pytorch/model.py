"""A PyTorch network. It runs on the GPU if there is one, otherwise on the CPU."""

import torch
from net import Net

from shadowslice import Context, Tensor


class Patterns:
    """Computes the probabilities of three patterns: columns, rows and squares."""

    inputs = {"images": Tensor("FP32", [-1, 3, 32, 32])}
    outputs = {"probability": Tensor("FP32", [-1, 3])}
    # Batches are PyTorch tensors. On a GPU, each batch size is recorded as a CUDA graph.
    cuda_graph = True

    def load(self, context: Context) -> None:
        """Reads the weights that `python train.py` has written."""
        weights = torch.load(context.folder / "weights.pt", weights_only=True)
        self.net = Net().eval()
        self.net.load_state_dict(weights)
        self.net.to(context.device)

    @torch.inference_mode()
    def infer(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Computes the outputs of a batch."""
        return {"probability": self.net(batch["images"]).softmax(1)}
