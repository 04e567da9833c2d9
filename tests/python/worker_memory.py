#!/usr/bin/env python3
"""Tests models that allocate more of the host's memory than `workers.memory`.

Usage: worker_memory.py SHADOWSLICE_BINARY [unittest arguments]
"""

import sys
import unittest

import numpy as np
import tritonclient.http as httpclient
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

import models
from server import Server

LIMIT = 512 << 20  # bytes

SERVER = None


def make(folder):
    """Writes the model `hungry`, which allocates `count` FP32 zeros and returns their sum."""
    models.write(folder, "hungry",
                 [helper.make_node("ConstantOfShape", ["count"], ["zeros"]),
                  helper.make_node("ReduceSum", ["zeros"], ["sum"], keepdims=1)],
                 [("count", TensorProto.INT64, [1])], [("sum", TensorProto.FLOAT, [1])])
    models.identity(folder, "modest", [("x", "y", TensorProto.FLOAT)])
    return {"hungry": "batch: {max: 0}", "modest": "batch: {max: 8}"}


def setUpModule():
    global SERVER
    SERVER = Server(sys.argv[0], make, f"workers: {{memory: {LIMIT}}}")


def tearDownModule():
    SERVER.stop()


class Memory(unittest.TestCase):
    def setUp(self):
        self.client = httpclient.InferenceServerClient(f"localhost:{SERVER.http_port}")
        self.addCleanup(self.client.close)

    def ask(self, model, name, values):
        tensor = httpclient.InferInput(name, list(values.shape), "INT64" if values.dtype == np.int64 else "FP32")
        tensor.set_data_from_numpy(values)
        return self.client.infer(model, [tensor])

    def test_a_request_that_exceeds_the_memory_fails_alone(self):
        before = SERVER.worker("hungry"), SERVER.worker("modest")
        for _ in range(5):
            with self.assertRaises(InferenceServerException) as caught:
                self.ask("hungry", "count", np.array([LIMIT // 4], np.int64))
            self.assertNotEqual(caught.exception.status(), "503", "a retry does not help")
            answer = self.ask("hungry", "count", np.array([LIMIT // 16], np.int64))
            self.assertEqual(answer.as_numpy("sum"), [0])
            row = np.ones((1, 3), np.float32)
            self.assertEqual(self.ask("modest", "x", row).as_numpy("y").tolist(), row.tolist())
        self.assertEqual((SERVER.worker("hungry"), SERVER.worker("modest")), before, "no worker ended")

    def test_the_limit_is_the_processs_own(self):
        for model in ["hungry", "modest"]:
            with open(f"/proc/{SERVER.worker(model)}/limits") as limits:
                line = next(line for line in limits if line.startswith("Max data size"))
            self.assertEqual(line.split()[3:5], [str(LIMIT)] * 2)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.argv.pop(0)
    unittest.main(argv=sys.argv)
