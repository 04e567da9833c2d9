"""The Triton model of the comparison, which runs the model.onnx next to this file in ONNX Runtime on one thread.

Each batch contains all pending requests.
"""

import os
import sys
from pathlib import Path

# Triton's stub ignores PYTHONPATH, so the packages in PYTHONPATH are added here. They must precede
# those of the interpreter, because the stub returns empty tensors under NumPy 2.
sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)

import numpy as np
import onnxruntime
import triton_python_backend_utils as triton


class TritonPythonModel:
    def initialize(self, args):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        file = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        self.session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self.inputs = [tensor.name for tensor in self.session.get_inputs()]
        self.outputs = [tensor.name for tensor in self.session.get_outputs()]

    def execute(self, requests):
        tensors = [[triton.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs]
                   for request in requests]
        ends = np.cumsum([row[0].shape[0] for row in tensors])[:-1]
        batch = {name: np.concatenate(parts) if len(parts) > 1 else parts[0]
                 for name, parts in zip(self.inputs, zip(*tensors))}
        answers = [np.split(answer, ends) for answer in self.session.run(self.outputs, batch)]
        return [triton.InferenceResponse([triton.Tensor(name, part) for name, part in zip(self.outputs, parts)])
                for parts in zip(*answers)]
