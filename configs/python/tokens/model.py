"""A model that streams: it continues a text, one word at a time.

The words come from a table of which word follows which, in the place of a language model.
"""

from collections.abc import Iterator

import numpy as np

from shadowslice import Context, InvalidInput, Tensor

MOST = 1000


class Continued:
    """Continues `prompt` by `count` words."""

    inputs = {"prompt": Tensor("BYTES", [1]), "count": Tensor("INT32", [1])}
    outputs = {"word": Tensor("BYTES", [1])}

    # That a worker generates at a time; a language model has memory for only so many.
    streams = 32

    def load(self, context: Context) -> None:
        """Reads which word follows which."""
        words = (context.folder / "text.txt").read_text().split()
        self.words = words
        self.follows = dict(zip(words, words[1:]))

    def generate(self, request: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """Each `yield` is an answer. The next one is asked for when the client can take it."""
        count = int(request["count"][0])
        if not 0 <= count <= MOST:
            raise InvalidInput(f"count is {count}; it must be 0 to {MOST}")
        said = request["prompt"][0].decode(errors="replace").split()
        word = said[-1] if said else ""
        for _ in range(count):
            word = self.follows.get(word, self.words[0])
            yield {"word": np.array([word.encode()], dtype=object)}
