"""Writes ONNX models for the outside clients: models with all datatypes, with dynamic axes, or without a batch axis."""

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, save

# The datatypes of the protocol that NumPy also has, with their names in NumPy and ONNX.
PLAIN = {
    "BOOL": (np.bool_, TensorProto.BOOL),
    "UINT8": (np.uint8, TensorProto.UINT8),
    "UINT16": (np.uint16, TensorProto.UINT16),
    "UINT32": (np.uint32, TensorProto.UINT32),
    "UINT64": (np.uint64, TensorProto.UINT64),
    "INT8": (np.int8, TensorProto.INT8),
    "INT16": (np.int16, TensorProto.INT16),
    "INT32": (np.int32, TensorProto.INT32),
    "INT64": (np.int64, TensorProto.INT64),
    "FP16": (np.float16, TensorProto.FLOAT16),
    "FP32": (np.float32, TensorProto.FLOAT),
    "FP64": (np.float64, TensorProto.DOUBLE),
}


def write(folder, name, nodes, inputs, outputs, constants=()):
    values = [[helper.make_tensor_value_info(*value) for value in values] for values in (inputs, outputs)]
    graph = helper.make_graph(nodes, name, *values, initializer=list(constants))
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9),
         folder / f"{name}.onnx")


def identity(folder, name, tensors):
    """Writes a model that copies inputs to outputs. `tensors` are tuples (input, output, ONNX type)."""
    write(folder, name,
          [helper.make_node("Identity", [source], [target]) for source, target, _ in tensors],
          [(source, kind, ["batch", 3]) for source, _, kind in tensors],
          [(target, kind, ["batch", 3]) for _, target, kind in tensors])


def make(folder):
    """Writes all models. Returns each model's keys in the configuration."""
    identity(folder, "types", [(f"in_{t}", f"out_{t}", kind) for t, (_, kind) in PLAIN.items()])
    identity(folder, "text", [("words", "same_words", TensorProto.STRING)])
    identity(folder, "brain", [("x", "y", TensorProto.BFLOAT16)])
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [1])
    write(folder, "dynamic",
          [helper.make_node("ReduceSum", ["x", "axis"], ["total"], keepdims=0),
           helper.make_node("Add", ["x", "x"], ["doubled"])],
          [("x", TensorProto.FLOAT, ["batch", "columns"])],
          [("total", TensorProto.FLOAT, ["batch"]), ("doubled", TensorProto.FLOAT, ["batch", "columns"])],
          [axis])
    write(folder, "unbatched",
          [helper.make_node("MatMul", ["left", "right"], ["product"])],
          [("left", TensorProto.FLOAT, [2, 3]), ("right", TensorProto.FLOAT, [3, 4])],
          [("product", TensorProto.FLOAT, [2, 4])])
    # A test needs a new worker of `text` at each change of the share, so the model uses shadows.
    return {name: "batch: {max: 8}" for name in ("types", "brain", "dynamic")} | {
        "text": "batch: {max: 8}, handover: shadow", "unbatched": "batch: {max: 0}"}


def plain_input(rows):
    """Returns inputs with the minimum, the maximum and another value of every plain datatype."""
    arrays = {}
    for datatype, (numpy_type, _) in PLAIN.items():
        if datatype == "BOOL":
            row = [True, False, True]
        elif datatype.startswith("FP"):
            row = [np.finfo(numpy_type).max, -0.5, np.finfo(numpy_type).tiny]
        else:
            row = [np.iinfo(numpy_type).max, np.iinfo(numpy_type).min, 7]
        arrays[f"in_{datatype}"] = datatype, np.array([row] * rows, dtype=numpy_type)
    return arrays


def dynamic_input(rows, columns):
    numbers = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    return {"x": ("FP32", numbers / 4)}


def unbatched_input():
    return {"left": ("FP32", np.arange(6, dtype=np.float32).reshape(2, 3)),
            "right": ("FP32", np.arange(12, dtype=np.float32).reshape(3, 4))}


def direct_answer(folder, model, arrays):
    """Calls ONNX Runtime directly, and returns its outputs."""
    session = onnxruntime.InferenceSession(folder / f"{model}.onnx", providers=["CPUExecutionProvider"])
    feed = {name: texts(array) if datatype == "BYTES" else array for name, (datatype, array) in arrays.items()}
    answers = session.run(None, feed)
    named = zip((output.name for output in session.get_outputs()), answers)
    return {name: raw(answer) if answer.dtype == np.object_ else answer for name, answer in named}


def texts(array):
    """Converts the protocol's bytes to the text that ONNX Runtime expects."""
    return np.vectorize(bytes.decode, otypes=[np.object_])(array)


def raw(array):
    return np.vectorize(str.encode, otypes=[np.object_])(array)
