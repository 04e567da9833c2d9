"""A network of PyTorch, on a GPU if the model has one, else on the CPU."""

import numpy as np
import torch
from net import Net

from shadowslice import Context, Tensor


class Patterns:
    """Says how probable each of three patterns is: columns, rows, squares."""

    inputs = {"images": Tensor("FP32", [-1, 3, 32, 32])}
    outputs = {"probability": Tensor("FP32", [-1, 3])}

    def load(self, context: Context) -> None:
        """`python train.py` writes the weights."""
        weights = torch.load(context.folder / "weights.pt", weights_only=True)
        self.device, self.net = context.device, Net().eval()
        self.net.load_state_dict(weights)
        self.net.to(self.device)

    @torch.inference_mode()
    def infer(self, batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Answers a batch. The answer may lie on the GPU."""
        images = torch.from_numpy(batch["images"]).to(self.device)
        return {"probability": self.net(images).softmax(1)}
