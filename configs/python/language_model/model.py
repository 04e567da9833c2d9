"""A language model of transformers that generates the tokens of all its streams in one step.

A step reads up to `CHUNK` tokens of each prompt beside the last token of the other streams, so a long
prompt delays no other stream.

The weights are random, so the tokens have no meaning. To serve trained weights, create the network
with `GPT2LMHeadModel.from_pretrained` in `load`.
"""

import json

import numpy as np
import torch
from torch import Tensor as Torch
from transformers import GPT2Config, GPT2LMHeadModel

from shadowslice import Context, InvalidInput, Tensor


CHUNK = 8  # tokens of a prompt in one step


class LanguageModel:
    """Continues a prompt with the most probable tokens."""

    inputs = {"prompt": Tensor("INT64", [-1]), "max_tokens": Tensor("INT32", [1])}
    outputs = {"token": Tensor("INT64", [1])}
    streams = 32
    # On a GPU, the worker records `step` for 1, 2, 4, ... streams as a CUDA graph.
    cuda_graph = True
    # In half precision, rounding decides between tokens that are about equally probable.
    deterministic = False

    def load(self, context: Context) -> None:
        """Creates the network, and a static cache with a seat for each stream and a spare one."""
        self.config = GPT2Config(**json.loads((context.folder / "config.json").read_text()))
        torch.manual_seed(0)
        network = GPT2LMHeadModel(self.config).eval().requires_grad_(False).to(context.device)
        self.network = network.half() if context.device == "cuda" else network
        seats, length, heads = self.streams + 1, self.config.n_positions, self.config.n_head
        cache = (2, self.config.n_layer, seats, heads, length, self.config.n_embd // heads)
        self.cache = torch.zeros(cache, dtype=self.network.dtype, device=context.device)
        self.text = torch.zeros((seats, length), dtype=torch.int64, device=context.device)
        # Of each stream: the tokens in `text`, those in the cache, and those still to generate.
        self.known, self.read, self.left = torch.zeros((3, seats), dtype=torch.int64, device=context.device)
        self.places = torch.arange(length, device=context.device)

    def warmup(self) -> dict[str, np.ndarray]:
        """Returns a prompt for the proof."""
        return {"prompt": np.arange(1, 13), "max_tokens": np.array([8], np.int32)}

    def start(self, request: dict[str, np.ndarray], seat: int) -> None:
        """Stores the prompt, which the next steps read."""
        prompt, left = request["prompt"], int(request["max_tokens"][0])
        length = self.config.n_positions
        if left < 1 or len(prompt) < 1 or len(prompt) + left > length:
            raise InvalidInput(
                f"prompt and max_tokens need at least 1 token each, and at most {length} together"
            )
        if prompt.min() < 0 or prompt.max() >= self.config.vocab_size:
            raise InvalidInput(f"tokens must be from 0 to {self.config.vocab_size - 1}")
        self.text[seat, : len(prompt)] = torch.from_numpy(prompt)
        self.known[seat], self.read[seat], self.left[seat] = len(prompt), 0, left

    @torch.inference_mode()
    def step(self, seats: Torch) -> dict[str, Torch]:
        """Reads the next tokens of each stream, and returns a new one if all of them are read."""
        known, read, left = self.known[seats], self.read[seats], self.left[seats]
        # A recorded step also runs on the spare seat, whose positions must stay in the cache.
        last = len(self.places) - 1
        positions = (read[:, None] + self.places[:CHUNK]).clamp(max=last)
        hidden = self.hidden(self.text[seats[:, None], positions], seats, positions)
        count = (known - read).clamp(0, CHUNK)
        rows = torch.arange(len(seats), device=seats.device)
        token = self.network.lm_head(hidden[rows, (count - 1).clamp(min=0)]).argmax(-1)
        is_new = read + count == known
        self.text[seats, known] = token
        self.known[seats] = (known + is_new).clamp(max=last)
        self.read[seats] = read + count
        self.left[seats] = left - is_new.long()
        done = is_new & ((left <= 1) | (token == self.config.eos_token_id))
        return {"token": token[:, None], "done": done, "pending": ~is_new}

    def hidden(self, tokens: Torch, seats: Torch, positions: Torch) -> Torch:
        """Runs the network on tokens at these positions of their streams (seats x tokens)."""
        body = self.network.transformer
        hidden = body.wte(tokens) + body.wpe(positions)
        visible = self.places <= positions[:, None, :, None]
        for block, (keys, values) in zip(body.h, self.cache.transpose(0, 1)):
            query, key, value = (
                part.unflatten(-1, (self.config.n_head, -1))
                for part in block.attn.c_attn(block.ln_1(hidden)).chunk(3, -1)
            )
            keys[seats[:, None], :, positions] = key
            values[seats[:, None], :, positions] = value
            scores = query.transpose(1, 2) @ keys[seats].transpose(2, 3) / query.shape[-1] ** 0.5
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            attended = (weights @ values[seats]).transpose(1, 2).flatten(2)
            hidden = hidden + block.attn.c_proj(attended)
            hidden = hidden + block.mlp(block.ln_2(hidden))
        return body.ln_f(hidden)
