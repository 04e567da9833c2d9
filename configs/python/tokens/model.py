"""A model that streams its answers: it continues a text, one word at a time.

It is not a language model: a table contains the word that follows each word of a text.
"""

from collections.abc import Iterator

import numpy as np

from shadowslice import Context, InvalidInput, Tensor

MAX_COUNT = 1000


class Continuation:
    """Continues `prompt` by `count` words."""

    inputs = {"prompt": Tensor("BYTES", [1]), "count": Tensor("INT32", [1])}
    outputs = {"word": Tensor("BYTES", [1])}

    # The maximum number of streams per worker at the same time. For a language model, the memory
    # limits this number.
    streams = 32

    def load(self, context: Context) -> None:
        """Builds the table from a text."""
        words = (context.folder / "text.txt").read_text().split()
        self.words = words
        self.follows = dict(zip(words, words[1:]))

    def generate(self, request: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """Yields one answer per word. The worker waits until the client can receive the next."""
        count = int(request["count"][0])
        if not 0 <= count <= MAX_COUNT:
            raise InvalidInput(f"count is {count}; use 0 to {MAX_COUNT}")
        words = request["prompt"][0].decode(errors="replace").split()
        word = words[-1] if words else ""
        for _ in range(count):
            word = self.follows.get(word, self.words[0])
            yield {"word": np.array([word.encode()], dtype=object)}
