"""A language model of transformers that generates the tokens of all its streams in one step.

The weights are random, so the tokens have no meaning. To serve trained weights, create the network
with `GPT2LMHeadModel.from_pretrained` in `load`.
"""

import json

import numpy as np
import torch
from torch import Tensor as Torch
from transformers import GPT2Config, GPT2LMHeadModel

from shadowslice import Context, InvalidInput, Tensor


class LanguageModel:
    """Continues a prompt with the most probable tokens."""

    inputs = {"prompt": Tensor("INT64", [-1]), "max_tokens": Tensor("INT32", [1])}
    outputs = {"token": Tensor("INT64", [1])}
    streams = 32
    # On a GPU, the worker records `step` for 1, 2, 4, ... streams as a CUDA graph.
    cuda_graph = True

    def load(self, context: Context) -> None:
        """Creates the network, and a static cache with a seat for each stream and a spare one."""
        self.config = GPT2Config(**json.loads((context.folder / "config.json").read_text()))
        torch.manual_seed(0)
        network = GPT2LMHeadModel(self.config).eval().requires_grad_(False).to(context.device)
        self.network = network.half() if context.device == "cuda" else network
        self.device, dtype = context.device, self.network.dtype
        seats, length, heads = self.streams + 1, self.config.n_positions, self.config.n_head
        cache = (2, self.config.n_layer, seats, heads, length, self.config.n_embd // heads)
        self.cache = torch.zeros(cache, dtype=dtype, device=self.device)
        # The last token of each stream, its position, and the number of tokens that are left.
        self.token, self.position, self.left = torch.zeros(
            (3, seats), dtype=torch.int64, device=self.device
        )
        self.places = torch.arange(length, device=self.device)

    def warmup(self) -> dict[str, np.ndarray]:
        """Returns a prompt for the proof."""
        return {"prompt": np.arange(1, 9), "max_tokens": np.array([8], np.int32)}

    @torch.inference_mode()
    def start(self, request: dict[str, np.ndarray], seat: int) -> None:
        """Reads the prompt except for its last token, which the first step reads."""
        prompt, left = request["prompt"], int(request["max_tokens"][0])
        longest = self.config.n_positions - left
        if not 0 < len(prompt) <= longest:
            raise InvalidInput(f"the prompt has {len(prompt)} tokens; send 1 to {longest}")
        if left < 1 or prompt.min() < 0 or prompt.max() >= self.config.vocab_size:
            raise InvalidInput(f"tokens must be from 0 to {self.config.vocab_size - 1}")
        tokens = torch.from_numpy(prompt).to(self.device)[None]
        if len(prompt) > 1:
            self.hidden(tokens[:, :-1], torch.tensor([seat], device=self.device), self.places[None, : len(prompt) - 1])
        self.token[seat], self.position[seat], self.left[seat] = tokens[0, -1], len(prompt) - 1, left

    @torch.inference_mode()
    def step(self, seats: Torch) -> dict[str, Torch]:
        """Returns the next token of each stream."""
        position = self.position[seats]
        hidden = self.hidden(self.token[seats][:, None], seats, position[:, None])
        token = self.network.lm_head(hidden[:, -1]).argmax(-1)
        left = self.left[seats] - 1
        self.token[seats] = token
        # A recorded step also runs on the spare seat, whose position must stay in the cache.
        self.position[seats] = (position + 1).clamp(max=len(self.places) - 1)
        self.left[seats] = left
        return {"token": token[:, None], "done": (left <= 0) | (token == self.config.eos_token_id)}

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
