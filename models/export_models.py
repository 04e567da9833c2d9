#!/usr/bin/env python3
"""Exports models from PyTorch for the GPU check, in the same way as users. Weights are random, and the batch axis is dynamic.

Usage: export_models.py FOLDER [NAME ...]

A NAME is a model and a precision (fp32, fp16 or bf16), such as vit-fp16. Without names, the script exports the models in ALL. Inputs
and outputs are FP32 at every precision. The script skips files that exist. It needs torch and onnxscript, and the library that defines
the model: timm, torchvision or transformers.
"""

import importlib
import sys
import warnings
from pathlib import Path

import torch

# The opset that most users export by default, and the first opset with BF16 convolutions.
OPSET, OPSET_BF16 = 18, 22

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def timm(name):
    return lambda: importlib.import_module("timm").create_model(name)


def torchvision(name, **settings):
    return lambda: getattr(importlib.import_module("torchvision.models"), name)(**settings)


def transformers(name, settings=None, **more):
    """Returns a function that builds a model of this kind with these settings."""
    def build():
        library = importlib.import_module("transformers")
        config = getattr(library, f"{name}Config")(**(settings or {}))
        return getattr(library, f"{name}Model")(config, **more)
    return build


IMAGES = {
    "convnext": transformers("ConvNext"),
    "convnext-t": timm("convnext_tiny"),
    "deit-s": timm("deit_small_patch16_224"),
    "densenet": torchvision("densenet121"),
    "efficientnet": torchvision("efficientnet_b0"),
    "mixer": timm("mixer_b16_224"),
    "mnasnet": torchvision("mnasnet1_0"),
    "mobilenetv3": torchvision("mobilenet_v3_large"),
    "regnet": torchvision("regnet_y_1_6gf"),
    "resnet": transformers("ResNet"),
    "resnet18": torchvision("resnet18"),
    "resnet50": torchvision("resnet50"),
    "resnet101": torchvision("resnet101"),
    "resnext50": torchvision("resnext50_32x4d"),
    "swin-t": torchvision("swin_t"),
    "vgg19": torchvision("vgg19"),
    "vit": transformers("ViT", {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6,
                                "intermediate_size": 1536}, add_pooling_layer=False),
    "vit-tiny": timm("vit_tiny_patch16_224"),
    "vitb": timm("vit_base_patch16_224"),
    "wide-resnet50": torchvision("wide_resnet50_2"),
}

# The text models: the number of tokens of their inputs, and a function that builds each model.
TEXTS = {
    "albert": (128, transformers("Albert", {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072,
                                            "num_hidden_layers": 6}, add_pooling_layer=False)),
    "bert": (128, transformers("Bert", {"num_hidden_layers": 6}, add_pooling_layer=False)),
    "distilbert": (128, transformers("DistilBert")),
    "electra-small": (128, transformers("Electra")),
    "gpt2": (128, transformers("GPT2", {"n_layer": 6, "use_cache": False})),
    "minilm": (64, transformers("Bert", {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12,
                                         "intermediate_size": 1536}, add_pooling_layer=False)),
    "roberta": (128, transformers("Roberta", {"num_hidden_layers": 6}, add_pooling_layer=False)),
    "tinybert": (128, transformers("Bert", {"hidden_size": 312, "num_hidden_layers": 4, "num_attention_heads": 12,
                                            "intermediate_size": 1200}, add_pooling_layer=False)),
}

ALL = ["vit-fp32", "convnext-fp32", "resnet-fp32", "bert-fp32", "vit-fp16", "resnet-fp16", "bert-bf16", "convnext-bf16",
       "gpt2-fp16", "efficientnet-fp32", "distilbert-fp16", "densenet-fp32", "regnet-fp16"]


class Pooled(torch.nn.Module):
    """Wraps a model: its output is the logits of a classifier, or otherwise the mean of the last layer."""

    def __init__(self, model, dtype):
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, x):
        y = self.model(x.to(self.dtype) if x.is_floating_point() else x)
        if isinstance(y, torch.Tensor):
            return y.float()
        y = y.last_hidden_state
        return (y.mean(dim=(2, 3)) if y.dim() == 4 else y.mean(dim=1)).float()


def fill_empty_weights(model):
    """Draws weights for layers whose weights are all zero, because otherwise the output would not depend on the input."""
    for weights in model.parameters():
        if weights.dim() > 1 and not weights.any():
            torch.nn.init.normal_(weights, std=0.02)


def export(name, path):
    kind, precision = name.rsplit("-", 1)
    dtype = DTYPES[precision]
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if kind in TEXTS:
        tokens, build = TEXTS[kind]
        x = torch.ones(2, tokens, dtype=torch.int64)
    else:
        build = IMAGES[kind]
        x = torch.randn(2, 3, 224, 224)
    model = build()
    fill_empty_weights(model)
    model = Pooled(model.to(dtype), dtype).eval().to(device)
    part = path.with_suffix(".part")
    torch.onnx.export(model, (x.to(device),), str(part), input_names=["x"], output_names=["y"], dynamo=True,
                      dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=1024)},),
                      opset_version=OPSET_BF16 if precision == "bf16" else OPSET, external_data=False, verbose=False)
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
            print(f"error: cannot export {name}: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            print(f"{path}: {path.stat().st_size / 2**20:.0f} MiB", flush=True)


main()
