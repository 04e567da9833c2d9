"""The network that train.py trains and model.py serves."""

from torch import Tensor, nn


class Net(nn.Module):
    """Classifies images [N, 3, 32, 32] into three patterns, as logits [N, 3]."""

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
        """Computes the logits."""
        return self.layers(images)
