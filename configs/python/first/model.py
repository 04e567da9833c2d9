"""A model in Python: a class that says its inputs and outputs, and answers batches."""

import numpy as np

from shadowslice import Context, InvalidInput, Tensor


class Standardised:
    """Answers each row with its standard scores, and with its mean."""

    # The first axis, -1, is the batch: rows of several requests come together.
    inputs = {"x": Tensor("FP32", [-1, 16])}
    outputs = {"scores": Tensor("FP32", [-1, 16]), "mean": Tensor("FP32", [-1])}

    def load(self, context: Context) -> None:
        """Called once. Weights are read here, from `context.folder` say."""
        print(f"{context.name} computes on {context.device}")

    def infer(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Answers a batch."""
        x = batch["x"]
        if not np.isfinite(x).all():
            raise InvalidInput("x has values that are not finite")
        mean, spread = x.mean(axis=1), x.std(axis=1)
        scores = (x - mean[:, None]) / np.maximum(spread, 1e-6)[:, None]
        return {"scores": scores, "mean": mean}
