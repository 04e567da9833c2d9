#!/usr/bin/env python3
"""Tests Python models that sleep. Their workers cannot release weights on an emulated GPU, so they exit.

Usage: python_sleep.py SHADOWSLICE_BINARY [unittest arguments]
"""

import json
import os
import signal
import sys
import threading
import unittest

import numpy as np
import tritonclient.grpc as grpcclient

from server import Server, wait_until

MODEL = """
from shadowslice import Tensor

class Doubled:
    inputs = {"x": Tensor("FP32", [-1, 4])}
    outputs = {"y": Tensor("FP32", [-1, 4])}
    def infer(self, batch): return {"y": 2 * batch["x"]}
"""

# A worker takes 210 MiB, so two do not fit into 300 MiB.
PROFILE = """
source: {kind: illustrative}
memory: {context: 100Mi, weights: 100Mi, activations: 10Mi}
start: {process: 20ms, load: 20ms, warm: 10ms}
execution_ms:
  sms: [66]
  1: [1.0]
"""


class SleepServer(Server):
    def configuration(self, models):
        (self.folder / "doubled.py").write_text(MODEL)
        (self.folder / "profile.yaml").write_text(PROFILE)
        memory, slo = models.pop("memory", ""), models.pop("slo", "5s")
        keys = f"path: doubled.py, profile: profile.yaml, slo: {slo}, batch: {{max: 1}}"
        lines = super().configuration({}).replace("sms: 132}", f"sms: 132{memory}}}")
        return lines + "".join(f"  - {{name: {name}, {keys}, {rest}}}\n" for name, rest in models.items())

    def model(self, name):
        models = json.loads(self.command("status", "--json"))["models"]
        return next(model for model in models if model["name"] == name)

    def sleeps(self, name):
        return self.model(name)["sleep"]["phase"] == "asleep"

    def infer(self, name):
        x = np.arange(4, dtype=np.float32).reshape(1, 4)
        tensor = grpcclient.InferInput("x", x.shape, "FP32")
        tensor.set_data_from_numpy(x)
        with grpcclient.InferenceServerClient(f"127.0.0.1:{self.grpc_port}") as client:
            assert client.is_model_ready(name), name
            assert (client.infer(name, [tensor]).as_numpy("y") == 2 * x).all(), name


class PythonSleep(unittest.TestCase):
    def start(self, models):
        server = SleepServer(BINARY, lambda _: models, "workers: {environment: [PYTHONPATH]}")
        self.addCleanup(server.stop)
        return server

    def test_a_model_without_requests_has_no_worker_until_the_next_one(self):
        server = self.start({"p": "sleep: {after: 300ms}"})
        for wakes in (1, 2, 3):
            wait_until(lambda: server.sleeps("p"))
            model = server.model("p")
            self.assertEqual((model["state"], model["workers"], model["sleep"]["cause"]), ("ready", [], "idle"))
            self.assertIn("only Python models that use PyTorch", model["sleep"]["ends_worker"])
            self.assertRegex(server.command("status"), r"p sleeps without a worker for .* because it had no requests")
            asked = [threading.Thread(target=server.infer, args=["p"]) for _ in range(4)]
            for thread in asked:
                thread.start()
            for thread in asked:
                thread.join()
            model = server.model("p")
            self.assertEqual((model["sleep"]["wakes"], model["worker_deaths"]), (wakes, 0))
            self.assertGreater(model["sleep"]["last_wake_ms"], 50)

    def test_models_take_turns_with_the_memory_of_their_workers(self):
        models = {"p": "sleep: on-pressure", "q": "sleep: on-pressure", "memory": ", memory: 300Mi"}
        # A request waits past this deadline, because another worker must exit and one must start.
        server = self.start(models | {"slo": "50ms"})
        for model, other in [("p", "q"), ("q", "p")] * 3:
            server.infer(model)
            wait_until(lambda: server.sleeps(other))
            self.assertEqual(server.model(other)["workers"], [])
        self.assertGreaterEqual(server.model("p")["sleep"]["wakes"], 2)

    def test_models_with_queues_answer_them_before_they_yield(self):
        server = self.start({"p": "sleep: on-pressure", "q": "sleep: on-pressure", "memory": ", memory: 300Mi"})
        begun = {model: server.model(model)["sleep"]["wakes"] for model in "pq"}
        asked = [threading.Thread(target=server.infer, args=[model]) for model in "pq" * 20]
        for thread in asked:
            thread.start()
        for thread in asked:
            thread.join()
        for model in "pq":
            status = server.model(model)
            self.assertEqual(status["requests"]["succeeded"], 20, status["requests"])
            self.assertLessEqual(status["sleep"]["wakes"] - begun[model], 2, "a start for each turn")

    def test_a_change_of_the_share_by_hand_wakes_the_model(self):
        server = self.start({"p": "handover: shadow"})
        server.command("sleep", "p")
        server.command("resize", "p", "50")
        model = server.model("p")
        self.assertEqual((model["share_percent"], model["sleep"]["phase"]), (50, "awake"))
        server.infer("p")

    def test_orders_reloads_and_deaths_around_a_sleep_lose_nothing(self):
        server = self.start({"p": ""})
        self.assertIn("p is asleep", server.command("sleep", "p"))
        self.assertIn("was already asleep", server.command("sleep", "p"))
        server.process.send_signal(signal.SIGHUP)
        self.assertIn("p is awake, after ", server.command("wake", "p"))
        os.kill(server.worker("p"), signal.SIGKILL)
        server.infer("p")
        self.assertIn("p is asleep", server.command("sleep", "p"))
        server.infer("p")
        self.assertEqual(server.model("p")["sleep"]["wakes"], 2)


if __name__ == "__main__":
    BINARY = sys.argv.pop(1)
    unittest.main(verbosity=2)
