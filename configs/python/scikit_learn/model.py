"""A scikit-learn classifier, which `python fit.py` writes. Other estimators work the same way."""

import joblib
import numpy as np

from shadowslice import Context, Tensor


class Irises:
    """Predicts the species of an iris, and the probability of each species."""

    inputs = {"measures": Tensor("FP32", [-1, 4])}
    outputs = {"species": Tensor("BYTES", [-1]), "probability": Tensor("FP32", [-1, 3])}

    def load(self, context: Context) -> None:
        """Reads the classifier. A joblib file can run any code, so use only trusted files."""
        self.classifier = joblib.load(context.folder / "classifier.joblib")

    def infer(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Computes the outputs of a batch."""
        probability = self.classifier.predict_proba(batch["measures"])
        species = self.classifier.classes_[probability.argmax(axis=1)]
        return {"species": species, "probability": probability.astype(np.float32)}
