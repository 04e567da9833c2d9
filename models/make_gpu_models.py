#!/usr/bin/env python3
"""Makes the models of `make gpu-check`: published network architectures with random weights.

Usage: make_gpu_models.py FOLDER [NAME ...]

Names: resnet50 mobilenet-v2 vgg19 alexnet bert-base resnet50-fp16 bert-base-fp16 convnext-bf16. The
default is all names. If a name contains a precision, the model computes in that precision. All inputs
and outputs are FP32.
The models have everything that takes time on a GPU: layers, channels, kernels, strides. Batch norms,
which matter only for trained weights, are folded into the convolutions before them. Weights are drawn
from fixed seeds and scaled by the number of a layer's inputs (He et al., 2015). Signals therefore
neither vanish nor explode, and outputs can be compared. The first axis of every tensor is the batch
axis. The script skips files that exist. It needs only numpy and onnx.
"""

import sys
import zlib
from pathlib import Path

import numpy as np
from onnx import TensorProto, checker, helper, numpy_helper, save

OPSET = 17
# The first opset with BF16 convolutions.
OPSET_BF16 = 22

# The element types in which models compute, by the suffix of the model's name.
PRECISIONS = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}


def precision(name):
    """Returns the element type in which a model of this name computes."""
    return PRECISIONS.get(name.rsplit("-", 1)[-1], TensorProto.FLOAT)


def rounded_to_bf16(values):
    """Returns BF16 values: the upper halves of FP32 values, rounded to the nearest."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Graph:
    """Builds an ONNX graph node by node. Each method returns the name of its node's output."""

    def __init__(self, name):
        self.random = np.random.default_rng(zlib.crc32(name.encode()))
        self.element = precision(name)
        self.nodes, self.constants, self.channels = [], [], {}

    def constant(self, value, dtype=np.float32):
        name = f"c{len(self.constants)}"
        value = np.asarray(value, dtype)
        if dtype == np.float32 and self.element == TensorProto.BFLOAT16:
            raw = rounded_to_bf16(value).tobytes()
            self.constants.append(helper.make_tensor(name, TensorProto.BFLOAT16, value.shape, raw, raw=True))
        else:
            half = dtype == np.float32 and self.element == TensorProto.FLOAT16
            self.constants.append(numpy_helper.from_array(value.astype(np.float16) if half else value, name))
        return name

    def entered(self, x):
        """Adds an FP32 input, and casts it to the model's element type."""
        return x if self.element == TensorProto.FLOAT else self.add("Cast", x, to=self.element)

    def left(self, x, output):
        """Adds an FP32 output with this name."""
        return self.add("Cast", x, output=output, to=TensorProto.FLOAT)

    def add(self, operator, *inputs, output=None, **attributes):
        output = output or f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [output], **attributes))
        return output

    def weight(self, shape, fan_in, gain):
        """Draws normal weights whose sums have a variance of `gain` times the inputs' mean square."""
        values = self.random.standard_normal(shape, dtype=np.float32)
        return self.constant(values * np.float32((gain / fan_in) ** 0.5))

    def bias(self, width):
        return self.constant(self.random.standard_normal(width, dtype=np.float32) * np.float32(0.1))

    def conv(self, x, width, kernel, stride=1, pad=None, group=1, gain=2.0):
        """Adds a convolution with bias. A gain of 2 makes up for a ReLU, which zeroes half of the input."""
        depth = self.channels.get(x, 3) // group
        pads = [kernel // 2 if pad is None else pad] * 4
        weight = self.weight((width, depth, kernel, kernel), depth * kernel * kernel, gain)
        y = self.add("Conv", x, weight, self.bias(width), kernel_shape=[kernel] * 2, strides=[stride] * 2,
                     pads=pads, group=group)
        self.channels[y] = width
        return y

    def keep(self, operator, *inputs, **attributes):
        """Adds an operator that keeps the number of channels."""
        y = self.add(operator, *inputs, **attributes)
        self.channels[y] = self.channels[inputs[0]]
        return y

    def relu(self, x):
        return self.keep("Relu", x)

    def relu6(self, x):
        return self.keep("Clip", x, self.constant(0), self.constant(6))

    def pool(self, x, kernel, stride, pad=0):
        return self.keep("MaxPool", x, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4)

    def gelu(self, x):
        raised = self.add("Add", self.add("Erf", self.add("Div", x, self.constant(2**0.5))), self.constant(1))
        return self.add("Mul", self.add("Mul", x, raised), self.constant(0.5))

    def dense(self, x, inputs, width, gain=2.0, output=None):
        return self.add("Gemm", x, self.weight((width, inputs), inputs, gain), self.bias(width), transB=1, output=output)

    def linear(self, x, inputs, width):
        return self.add("Add", self.add("MatMul", x, self.weight((inputs, width), inputs, 1.0)), self.bias(width))

    def norm(self, x, width):
        return self.add("LayerNormalization", x, self.constant(np.ones(width)), self.constant(np.zeros(width)))

    def save(self, path, inputs, outputs):
        graph = helper.make_graph(self.nodes, path.stem, inputs, outputs, self.constants)
        opset = OPSET_BF16 if self.element == TensorProto.BFLOAT16 else OPSET
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
        checker.check_model(model)
        # The file is renamed when it is complete, so a file with the final name is never partial.
        save(model, path.with_suffix(".part"), format="protobuf")
        path.with_suffix(".part").rename(path)


def image_model(path, body):
    """Writes a classifier of 3x224x224 images. `body` adds its nodes and the output `logits`."""
    graph = Graph(path.stem)
    body(graph, graph.entered("image"))
    graph.save(path,
               [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 224, 224])],
               [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1000])])


def head(graph, x, hidden=()):
    """Adds a Flatten node and dense layers. `x` is the input's name and number of elements."""
    x, elements = graph.add("Flatten", x[0], axis=1), x[1]
    for width in hidden:
        x, elements = graph.add("Relu", graph.dense(x, elements, width)), width
    if graph.element == TensorProto.FLOAT:
        graph.dense(x, elements, 1000, output="logits")
    else:
        graph.left(graph.dense(x, elements, 1000), "logits")


def resnet50(graph, x):
    """Adds ResNet-50 (He et al., 2016), with the stride of a block in its 3x3 convolution."""
    x = graph.pool(graph.relu(graph.conv(x, 64, 7, stride=2, gain=1.0)), 3, 2, pad=1)
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            step = stride if block == 0 else 1
            y = graph.relu(graph.conv(x, width, 1))
            y = graph.relu(graph.conv(y, width, 3, stride=step))
            # The gain is small, because otherwise the sums of sixteen blocks would explode.
            y = graph.conv(y, 4 * width, 1, gain=0.5)
            short = graph.conv(x, 4 * width, 1, stride=step, gain=1.5) if block == 0 else x
            x = graph.relu(graph.keep("Add", y, short))
    head(graph, (graph.add("GlobalAveragePool", x), 2048))


def mobilenet_v2(graph, x):
    """Adds MobileNetV2 (Sandler et al., 2018)."""
    x = graph.relu6(graph.conv(x, 32, 3, stride=2, gain=1.0))
    settings = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for factor, width, blocks, stride in settings:
        for block in range(blocks):
            wide = graph.channels[x] * factor
            y = x if factor == 1 else graph.relu6(graph.conv(x, wide, 1, gain=1.0))
            y = graph.relu6(graph.conv(y, wide, 3, stride=stride if block == 0 else 1, group=wide))
            if block == 0:
                x = graph.conv(y, width, 1)
            else:
                x = graph.keep("Add", x, graph.conv(y, width, 1, gain=0.5))
    x = graph.relu6(graph.conv(x, 1280, 1, gain=1.0))
    head(graph, (graph.add("GlobalAveragePool", x), 1280))


def vgg19(graph, x):
    """Adds VGG-19 (Simonyan and Zisserman, 2015)."""
    gain = 1.0
    for width, layers in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(layers):
            x, gain = graph.relu(graph.conv(x, width, 3, gain=gain)), 2.0
        # The maximum of four values is larger than their mean, so a gain of 1 is enough for the
        # next layer.
        x, gain = graph.pool(x, 2, 2), 1.0
    head(graph, (x, 512 * 7 * 7), hidden=(4096, 4096))


def convnext(graph, x):
    """Adds ConvNeXt-T (Liu et al., 2022), chosen because ONNX Runtime has no BF16 pooling."""
    x = graph.conv(x, 96, 4, stride=4, pad=0, gain=1.0)
    for width, blocks in ((96, 3), (192, 3), (384, 9), (768, 3)):
        if width > 96:
            x = graph.conv(x, width, 2, stride=2, pad=0, gain=1.0)
        for _ in range(blocks):
            y = graph.add("Transpose", graph.conv(x, width, 7, group=width, gain=1.0), perm=[0, 2, 3, 1])
            y = graph.linear(graph.gelu(graph.linear(graph.norm(y, width), width, 4 * width)), 4 * width, width)
            y = graph.add("Mul", graph.add("Transpose", y, perm=[0, 3, 1, 2]), graph.constant(0.2))
            x = graph.keep("Add", x, y)
    head(graph, (graph.add("ReduceMean", x, graph.constant([2, 3], np.int64), keepdims=1), 768))


def alexnet(graph, x):
    """Adds AlexNet (Krizhevsky, 2014), in torchvision's version."""
    x = graph.pool(graph.relu(graph.conv(x, 64, 11, stride=4, pad=2, gain=1.0)), 3, 2)
    x = graph.pool(graph.relu(graph.conv(x, 192, 5, gain=1.0)), 3, 2)
    for width, gain in ((384, 1.0), (256, 2.0), (256, 2.0)):
        x = graph.relu(graph.conv(x, width, 3, gain=gain))
    head(graph, (graph.pool(x, 3, 2), 256 * 6 * 6), hidden=(4096, 4096))


def bert_base(path, layers=12, width=768, heads=12, length=128, vocabulary=30522):
    """Writes BERT base (Devlin et al., 2019): 128 tokens of one type, no padding, pooled output."""
    graph = Graph(path.stem)
    tokens = graph.weight((vocabulary, width), 1, 1.0)
    places = graph.weight((length, width), 1, 1.0)
    x = graph.norm(graph.add("Add", graph.add("Gather", tokens, "input_ids"), places), width)
    shape = lambda *sizes: graph.constant(sizes, np.int64)
    split, joined = shape(0, 0, heads, width // heads), shape(0, 0, width)

    def projected(x, order):
        return graph.add("Transpose", graph.add("Reshape", graph.linear(x, width, width), split), perm=order)

    for _ in range(layers):
        scores = graph.add("MatMul", projected(x, [0, 2, 1, 3]), projected(x, [0, 2, 3, 1]))
        shares = graph.add("Softmax", graph.add("Div", scores, graph.constant((width // heads) ** 0.5)), axis=-1)
        mixed = graph.add("Transpose", graph.add("MatMul", shares, projected(x, [0, 2, 1, 3])), perm=[0, 2, 1, 3])
        attended = graph.linear(graph.add("Reshape", mixed, joined), width, width)
        x = graph.norm(graph.add("Add", x, attended), width)
        inner = graph.gelu(graph.linear(x, width, 4 * width))
        x = graph.norm(graph.add("Add", x, graph.linear(inner, 4 * width, width)), width)
    first = graph.add("Gather", x, graph.constant(0, np.int64), axis=1)
    pooled = graph.linear(first, width, width)
    if graph.element == TensorProto.FLOAT:
        graph.add("Tanh", pooled, output="pooled")
    else:
        graph.left(graph.add("Tanh", pooled), "pooled")
    graph.save(path,
               [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", length])],
               [helper.make_tensor_value_info("pooled", TensorProto.FLOAT, ["batch", width])])


MODELS = {
    "resnet50": lambda path: image_model(path, resnet50),
    "mobilenet-v2": lambda path: image_model(path, mobilenet_v2),
    "vgg19": lambda path: image_model(path, vgg19),
    "alexnet": lambda path: image_model(path, alexnet),
    "bert-base": bert_base,
    "resnet50-fp16": lambda path: image_model(path, resnet50),
    "bert-base-fp16": bert_base,
    "convnext-bf16": lambda path: image_model(path, convnext),
}


def main(folder, names):
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        sys.exit(f"error: unknown models: {', '.join(unknown)}; use {' '.join(MODELS)}")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or MODELS:
        path = folder / f"{name}.onnx"
        if not path.exists():
            MODELS[name](path)
        print(f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
