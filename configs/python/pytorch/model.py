"""A network of PyTorch, on a GPU if the model has one, else on the CPU."""

import torch
from net import Net

from shadowslice import Context, Tensor


class Patterns:
    """Says how probable each of three patterns is: columns, rows, squares."""

    inputs = {"images": Tensor("FP32", [-1, 3, 32, 32])}
    outputs = {"probability": Tensor("FP32", [-1, 3])}
    cuda_graph = True  # batches are tensors of PyTorch, and on a GPU they are recorded

    def load(self, context: Context) -> None:
        """`python train.py` writes the weights."""
        weights = torch.load(context.folder / "weights.pt", weights_only=True)
        self.net = Net().eval()
        self.net.load_state_dict(weights)
        self.net.to(context.device)

    @torch.inference_mode()
    def infer(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Answers a batch."""
        return {"probability": self.net(batch["images"]).softmax(1)}
