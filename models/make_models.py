#!/usr/bin/env python3
"""Makes the demo's models, with inputs and the outputs that ONNX Runtime computes for them.

Usage: make_models.py FOLDER

Writes NAME.onnx and NAME.json for each model. The JSON file contains cases. A case is a request with one row:
{"cases": [{"inputs": [TENSOR], "outputs": [TENSOR], "truth": 7}]}, where TENSOR is
{"name", "datatype", "shape", "data"} as in the Open Inference Protocol. `truth`, if present, is the
true label. Seeds are fixed, so every run makes the same models.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import TensorProto, checker, helper, numpy_helper, save

OPSET = 17
DATATYPES = {"float32": "FP32", "int64": "INT64"}


class Graph:
    """Builds an ONNX graph node by node. Each method returns the name of its node's output."""

    def __init__(self):
        self.nodes, self.constants = [], []

    def constant(self, value):
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def weight(self, value):
        return self.constant(np.asarray(value, dtype=np.float32))

    def add(self, operator, *inputs, output=None, **attributes):
        output = output or f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [output], **attributes))
        return output

    def linear(self, x, weight, bias):
        return self.add("Add", self.add("MatMul", x, self.weight(weight)), self.weight(bias))

    def save(self, path, inputs, outputs):
        graph = helper.make_graph(self.nodes, path.stem, inputs, outputs, self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
        checker.check_model(model)
        save(model, path)


def digits(path):
    """Writes a multi-layer perceptron for 8x8 images of digits (digits.txt).

    The cases in its JSON file are the images that are not used for training.
    """
    table = np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",")
    table = np.random.default_rng(0).permutation(table)
    images, truths = table[:, :-1], table[:, -1].astype(int)
    held_out, train = np.split(np.arange(len(table)), [len(table) // 4])
    *hidden, last = trained(images[train] / 16, truths[train], [64, 64, 32, 10])

    graph = Graph()
    layer = graph.add("Div", "image", graph.weight(16))  # Pixels are from 0 to 16.
    for weight, bias in hidden:
        layer = graph.add("Relu", graph.linear(layer, weight, bias))
    logits = graph.linear(layer, *last)
    graph.add("ArgMax", logits, output="label", axis=1, keepdims=0)
    graph.add("Softmax", logits, output="probabilities", axis=1)
    graph.save(path,
               [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 64])],
               [helper.make_tensor_value_info("label", TensorProto.INT64, ["batch"]),
                helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", 10])])

    requests = [{"image": image.astype(np.float32)[None]} for image in images[held_out]]
    return requests, truths[held_out].tolist()


def trained(images, truths, widths, epochs=60, rows=32, rate=0.05, momentum=0.9):
    """Trains a perceptron by stochastic gradient descent. Returns the layers' weights and biases."""
    random = np.random.default_rng(0)
    weights = [random.normal(0, (2 / above) ** 0.5, (above, below)) for above, below in zip(widths, widths[1:])]
    layers = [(weight, np.zeros(weight.shape[1])) for weight in weights]
    moves = [[np.zeros_like(part) for part in layer] for layer in layers]
    for _ in range(epochs):
        for chosen in np.array_split(random.permutation(len(images)), len(images) // rows):
            values = [images[chosen]]
            for weight, bias in layers[:-1]:
                values.append(np.maximum(values[-1] @ weight + bias, 0))
            logits = values[-1] @ layers[-1][0] + layers[-1][1]
            odds = np.exp(logits - logits.max(1, keepdims=True))
            error = (odds / odds.sum(1, keepdims=True) - np.eye(widths[-1])[truths[chosen]]) / len(chosen)
            for (weight, bias), moved, value in zip(layers[::-1], moves[::-1], values[::-1]):
                slopes = value.T @ error, error.sum(0)
                error = (error @ weight.T) * (value > 0)
                for part, move, slope in zip((weight, bias), moved, slopes):
                    move *= momentum
                    move -= rate * slope
                    part += move
    return layers


def encoder(path, layers=2, width=64, heads=4, vocabulary=1000):
    """Writes a small transformer encoder with random weights, whose output is the mean over all
    tokens that are not padding.

    Its cases are sequences of five lengths, so one batch cannot contain all cases. Half of the
    cases end in padding.
    """
    random = np.random.default_rng(7)

    def weight(*shape):
        return random.normal(0, shape[0] ** -0.5, shape)

    graph = Graph()
    mask = graph.add("Cast", "attention_mask", to=TensorProto.FLOAT)
    hidden = graph.add("Add", graph.add("Gather", graph.weight(random.normal(0, 1, (vocabulary, width))), "input_ids"),
                       positions(graph, width))
    # The bias is 0 for tokens, and a large negative number for padding.
    bias = graph.add("Mul", graph.add("Sub", mask, graph.weight(1)), graph.weight(1e9))
    bias = graph.add("Unsqueeze", bias, graph.constant([1, 2]))
    for _ in range(layers):
        attended = attention(graph, normalised(graph, hidden, width), bias, width, heads, weight)
        hidden = graph.add("Add", hidden, attended)
        inner = graph.linear(normalised(graph, hidden, width), weight(width, 4 * width), np.zeros(4 * width))
        outer = graph.linear(graph.add("Relu", inner), weight(4 * width, width), np.zeros(width))
        hidden = graph.add("Add", hidden, outer)
    column = graph.add("Unsqueeze", mask, graph.constant([2]))
    axis = graph.constant([1])
    total = graph.add("ReduceSum", graph.add("Mul", hidden, column), axis, keepdims=0)
    count = graph.add("Max", graph.add("ReduceSum", column, axis, keepdims=0), graph.weight(1))
    graph.add("Div", total, count, output="embedding")
    tokens = ["batch", "length"]
    graph.save(path,
               [helper.make_tensor_value_info("input_ids", TensorProto.INT64, tokens),
                helper.make_tensor_value_info("attention_mask", TensorProto.INT64, tokens)],
               [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["batch", width])])

    requests = []
    for index in range(300):
        length = (5, 8, 13, 21, 34)[index % 5]
        ids = random.integers(0, vocabulary, (1, length), dtype=np.int64)
        padding = int(random.integers(0, length // 2)) if index % 2 else 0
        present = np.arange(length, dtype=np.int64)[None] < length - padding
        requests.append({"input_ids": ids, "attention_mask": present.astype(np.int64)})
    return requests, [None] * len(requests)


def positions(graph, width):
    """Adds sine and cosine position encodings for the tokens of `input_ids`."""
    length = graph.add("Gather", graph.add("Shape", "input_ids"), graph.constant(1))
    steps = graph.add("Range", graph.constant(0), length, graph.constant(1))
    steps = graph.add("Unsqueeze", graph.add("Cast", steps, to=TensorProto.FLOAT), graph.constant([1]))
    frequencies = 10000.0 ** (-np.arange(width // 2) / (width // 2))
    angles = graph.add("Mul", steps, graph.weight(frequencies[None]))
    return graph.add("Concat", graph.add("Sin", angles), graph.add("Cos", angles), axis=1)


def normalised(graph, x, width):
    return graph.add("LayerNormalization", x, graph.weight(np.ones(width)), graph.weight(np.zeros(width)))


def attention(graph, x, bias, width, heads, weight):
    """Adds multi-head self-attention, with `bias` [batch, 1, 1, length] added to the scores."""
    split = graph.constant([0, 0, heads, width // heads])

    def projected(order):
        rows = graph.add("MatMul", x, graph.weight(weight(width, width)))
        return graph.add("Transpose", graph.add("Reshape", rows, split), perm=order)

    queries, keys, values = projected([0, 2, 1, 3]), projected([0, 2, 3, 1]), projected([0, 2, 1, 3])
    scores = graph.add("Mul", graph.add("MatMul", queries, keys), graph.weight((width // heads) ** -0.5))
    shares = graph.add("Softmax", graph.add("Add", scores, bias), axis=-1)
    mixed = graph.add("Transpose", graph.add("MatMul", shares, values), perm=[0, 2, 1, 3])
    return graph.linear(graph.add("Reshape", mixed, graph.constant([0, 0, width])),
                        weight(width, width), np.zeros(width))


def tensor(name, value):
    return {"name": name, "datatype": DATATYPES[value.dtype.name], "shape": value.shape,
            "data": value.reshape(-1).tolist()}


def direct_answers(path, requests, truths):
    """Yields a case for each request, with the outputs that ONNX Runtime computes for it."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    for request, truth in zip(requests, truths):
        answers = zip(names, session.run(names, request))
        case = {"inputs": [tensor(*item) for item in request.items()],
                "outputs": [tensor(*item) for item in answers]}
        yield case if truth is None else case | {"truth": truth}


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for make in (digits, encoder):
        path = folder / f"{make.__name__}.onnx"
        cases = list(direct_answers(path, *make(path)))
        path.with_suffix(".json").write_text(json.dumps({"cases": cases}))
        print(f"{path.name}: {path.stat().st_size} bytes, {len(cases)} cases")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
