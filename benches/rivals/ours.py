"""The model that shadowslice runs in the comparison with `engine: python`. Triton runs model.py."""

from pathlib import Path

import onnxruntime

from shadowslice import Tensor

ELEMENTS = int(Path(__file__).parent.parent.name.rpartition("-")[2]) // 4


class Identity:
    inputs = {"x": Tensor("FP32", [-1, ELEMENTS])}
    outputs = {"y": Tensor("FP32", [-1, ELEMENTS])}

    def load(self, context):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        file = context.folder / "model.onnx"
        self.session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def infer(self, batch):
        (answer,) = self.session.run(["y"], batch)
        return {"y": answer}
