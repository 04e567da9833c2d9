#!/usr/bin/env python3
"""Exports models from PyTorch, as users do, for the GPU check: random weights, a free batch axis.

Usage: export_models.py FOLDER [NAME ...]

A name is a model's and a precision, fp32, fp16 or bf16, such as vit-fp16; without one, all in the list below. Those of half precision
take and give FP32 all the same. A file that is there is kept. Needs torch, torchvision, transformers and onnxscript.
"""

import sys
import warnings
from pathlib import Path

import torch
import torchvision
from transformers import (BertConfig, BertModel, ConvNextConfig, ConvNextModel, DistilBertConfig, DistilBertModel,
                          GPT2Config, GPT2Model, ResNetConfig, ResNetModel, ViTConfig, ViTModel)

# The default of most users; and the first in which there are convolutions of BF16.
OPSET, OPSET_BF16 = 18, 22

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

BUILDERS = {
    "vit": lambda: ViTModel(ViTConfig(hidden_size=384, num_hidden_layers=12, num_attention_heads=6,
                                      intermediate_size=1536), add_pooling_layer=False),
    "convnext": lambda: ConvNextModel(ConvNextConfig()),
    "resnet": lambda: ResNetModel(ResNetConfig()),
    "bert": lambda: BertModel(BertConfig(num_hidden_layers=6), add_pooling_layer=False),
    "distilbert": lambda: DistilBertModel(DistilBertConfig()),
    "gpt2": lambda: GPT2Model(GPT2Config(n_layer=6, use_cache=False)),
    "regnet": lambda: torchvision.models.regnet_y_1_6gf(),
    "densenet": lambda: torchvision.models.densenet121(),
    "efficientnet": lambda: torchvision.models.efficientnet_b0(),
}
TEXT = ["bert", "distilbert", "gpt2"]

ALL = ["vit-fp32", "convnext-fp32", "resnet-fp32", "bert-fp32", "vit-fp16", "resnet-fp16", "bert-bf16", "convnext-bf16",
       "gpt2-fp16", "efficientnet-fp32", "distilbert-fp16", "densenet-fp32", "regnet-fp16"]


class Pooled(torch.nn.Module):
    """The mean over all places of the last layer, as an embedding; or what a classifier gives."""

    def __init__(self, model, dtype):
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, x):
        y = self.model(x.to(self.dtype) if x.is_floating_point() else x)
        if isinstance(y, torch.Tensor):
            return y.float()
        y = y.last_hidden_state
        return (y.mean(dim=(2, 3)) if y.dim() == 4 else y.mean(dim=1)).float()


def export(name, path):
    kind, precision = name.rsplit("-", 1)
    dtype = DTYPES[precision]
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Pooled(BUILDERS[kind]().to(dtype), dtype).eval().to(device)
    x = torch.ones(2, 128, dtype=torch.int64) if kind in TEXT else torch.randn(2, 3, 224, 224)
    part = path.with_suffix(".part")
    torch.onnx.export(model, (x.to(device),), str(part), input_names=["x"], output_names=["y"], dynamo=True,
                      dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=1024)},), opset_version=OPSET_BF16 if precision == "bf16" else OPSET,
                      external_data=False, verbose=False)
    part.rename(path)


def main():
    folder, names = Path(sys.argv[1]), sys.argv[2:] or ALL
    folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for name in names:
        path = folder / f"{name}.onnx"
        if path.exists():
            continue
        try:
            export(name, path)
        except Exception as error:
            print(f"error: {name} cannot be exported: {error}", file=sys.stderr)
        else:
            print(f"{path}: {path.stat().st_size / 2**20:.0f} MiB", flush=True)


main()
