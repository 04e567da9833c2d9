"""A Python model: a class that declares its inputs and outputs, and computes batches."""

import numpy as np

from shadowslice import Context, InvalidInput, Tensor


class Standardised:
    """Computes the standard scores and the mean of each row."""

    # The first axis, -1, is the batch axis. A batch contains the rows of several requests.
    inputs = {"x": Tensor("FP32", [-1, 16])}
    outputs = {"scores": Tensor("FP32", [-1, 16]), "mean": Tensor("FP32", [-1])}

    def load(self, context: Context) -> None:
        """Prepares the model, once per worker. You can read weights from `context.folder` here."""
        print(f"{context.name} computes on {context.device}")

    def infer(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Computes the outputs of a batch."""
        x = batch["x"]
        if not np.isfinite(x).all():
            raise InvalidInput("x has values that are not finite")
        mean, spread = x.mean(axis=1), x.std(axis=1)
        scores = (x - mean[:, None]) / np.maximum(spread, 1e-6)[:, None]
        return {"scores": scores, "mean": mean}
