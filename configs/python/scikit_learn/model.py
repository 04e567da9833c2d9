"""A classifier of scikit-learn. `python fit.py` writes its file; any other one is served alike."""

import joblib
import numpy as np

from shadowslice import Context, Tensor


class Irises:
    """Says the species of an iris, and how probable each is."""

    inputs = {"measures": Tensor("FP32", [-1, 4])}
    outputs = {"species": Tensor("BYTES", [-1]), "probability": Tensor("FP32", [-1, 3])}

    def load(self, context: Context) -> None:
        """Reading such a file can run any code: it must come from a trusted place."""
        self.classifier = joblib.load(context.folder / "classifier.joblib")

    def infer(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Answers a batch."""
        probability = self.classifier.predict_proba(batch["measures"])
        species = self.classifier.classes_[probability.argmax(axis=1)]
        return {"species": species, "probability": probability.astype(np.float32)}
