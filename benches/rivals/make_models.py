#!/usr/bin/env python3
"""Makes the identity models of the comparison in Triton's layout. Shadowslice reads the same model.onnx.

Usage: make_models.py FOLDER

Writes FOLDER/echo-BYTES, a model that returns the FP32 tensor `x` of BYTES bytes per row as `y`, up to 32 rows per
batch.
"""

import shutil
import sys
from pathlib import Path

from onnx import TensorProto, checker, helper, save

SIZES = (64, 600_000)  # bytes

CONFIG = """backend: "python"
max_batch_size: 32
input [{{ name: "x", data_type: TYPE_FP32, dims: [ {elements} ] }}]
output [{{ name: "y", data_type: TYPE_FP32, dims: [ {elements} ] }}]
instance_group [{{ kind: KIND_CPU, count: 1 }}]
dynamic_batching {{ max_queue_delay_microseconds: 0 }}
"""


def make(folder, elements):
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", elements]) for name in "xy"]
    node = helper.make_node("Identity", ["x"], ["y"])
    graph = helper.make_graph([node], "identity", tensors[:1], tensors[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    checker.check_model(model)
    (folder / "1").mkdir(parents=True, exist_ok=True)
    save(model, folder / "1/model.onnx")
    shutil.copy(Path(__file__).with_name("model.py"), folder / "1/model.py")
    shutil.copy(Path(__file__).with_name("ours.py"), folder / "1/ours.py")
    (folder / "config.pbtxt").write_text(CONFIG.format(elements=elements))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for size in SIZES:
        make(Path(sys.argv[1]) / f"echo-{size}", size // 4)
