"""The network, which model.py serves and train.py trains."""

from torch import Tensor, nn


class Net(nn.Module):
    """Tells three patterns apart: images of [N, 3, 32, 32] in, logits of [N, 3] out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 3),
        )

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        return self.layers(images)
