#!/usr/bin/env python3
"""Runs Python models under load through many hand-overs and kills. No response may be lost or wrong.

Usage: endure.py SHADOWSLICE_BINARY [HAND_OVERS [KILLS]]

If a worker dies, its streams fail, because no other worker can continue them. The clients of these streams retry. No
other request may fail, and no stream may fail during a hand-over.
"""

import itertools
import os
import signal
import sys
import threading
import time

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

import streams
from server import Server, wait_until

HAND_OVERS, KILLS = 200, 50
BROKEN_OFF = ("send the request again", "died while computing")

DOUBLED = """
from shadowslice import Tensor

class Doubled:
    inputs = {"x": Tensor("FP32", [-1, 16])}
    outputs = {"y": Tensor("FP32", [-1, 16])}

    def infer(self, batch):
        return {"y": batch["x"] * 2}
"""


class Models(Server):
    def __init__(self, binary):
        super().__init__(binary, self.write)

    def write(self, folder):
        (folder / "doubled.py").write_text(DOUBLED)
        (folder / "counter.py").write_text(streams.COUNTER)
        return {}

    def configuration(self, _):
        python = "python: {executable: " + sys.executable + "}, slo: 1s, share: {initial: 20%}, handover: shadow"
        return "\n".join([
            "listen:",
            f'  http: ["127.0.0.1:{self.http_port}"]',
            f'  grpc: ["127.0.0.1:{self.grpc_port}"]',
            "  metrics: []",
            "gpus: [{device: emulated, sms: 132}]",
            "controller: {policy: static}",
            "workers: {environment: [PYTHONPATH]}",
            # A shadow starts slowly, because the load uses most of the CPU time.
            "timeouts: {spawn: 60s}",
            "models:",
            f"  - {{path: doubled.py, {python}, batch: {{max: 8}}}}",
            f"  - {{path: counter.py, {python}}}",
        ]) + "\n"


class Load:
    """Clients of all kinds, which run until the script ends. `outcomes` counts the results of their requests."""

    def __init__(self, server):
        self.server, self.over, self.lock, self.outcomes = server, threading.Event(), threading.Lock(), {}
        asks = [self.over_grpc] * 2 + [self.over_http] * 2 + [self.in_streams] * 3
        self.threads = [threading.Thread(target=self.go_on, args=[ask]) for ask in asks]
        for thread in self.threads:
            thread.start()

    def go_on(self, ask):
        for outcome in ask():
            with self.lock:
                self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
            if self.over.is_set():
                return

    def over_grpc(self):
        with grpcclient.InferenceServerClient(f"localhost:{self.server.grpc_port}") as client:
            yield from self.doubled(grpcclient, client)

    def over_http(self):
        with httpclient.InferenceServerClient(f"localhost:{self.server.http_port}") as client:
            yield from self.doubled(httpclient, client)

    @staticmethod
    def doubled(module, client):
        draw = np.random.default_rng()
        while True:
            x = draw.random((int(draw.integers(1, 5)), 16), np.float32)
            tensor = module.InferInput("x", list(x.shape), "FP32")
            tensor.set_data_from_numpy(x)
            try:
                answer = client.infer("doubled", [tensor]).as_numpy("y")
                yield "right" if np.array_equal(answer, x * 2) else "wrong"
            except Exception as error:  # Every exception counts as a lost request.
                yield repr(error)
            time.sleep(0.002)

    def in_streams(self):
        stream, draw = streams.Stream(self.server), np.random.default_rng()
        while True:
            try:
                # Each input is different. If several workers die while they process the same input, the server refuses
                # it.
                inputs = streams.counting(200, 0.001, int(draw.integers(1, 10_000)))
                answers = stream.until_the_end("counter", inputs)
                yield "stream right" if [streams.counted(answer) for answer in answers] == [*range(200)] else "wrong"
            except InferenceServerException as error:
                yield "stream broken off" if any(why in str(error) for why in BROKEN_OFF) else str(error)

    def end(self):
        self.over.set()
        for thread in self.threads:
            thread.join()
        fine = {"right", "stream right", "stream broken off"}
        return {why: count for why, count in self.outcomes.items() if why not in fine}


def main(binary, hand_overs=HAND_OVERS, kills=KILLS):
    server = Models(binary)
    load = Load(server)
    models = ("doubled", "counter")
    began = time.monotonic()
    for number in range(int(hand_overs)):
        said = server.command("resize", models[number % 2], str(10 + 5 * (number // 2 % 6)))
        assert "completed" in said, said
    took = time.monotonic() - began
    broken = load.outcomes.get("stream broken off", 0)
    print(f"{hand_overs} hand-overs in {took:.0f} s, {broken} streams broken off: {load.outcomes}", flush=True)
    for model in itertools.islice(itertools.cycle(models), int(kills)):
        before = server.worker(model)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: server.worker(model) not in (None, before))
    lost = load.end()
    server.stop()
    print(f"{kills} kills: {load.outcomes}")
    if lost or broken:
        sys.exit(f"lost or wrong: {lost}; {broken} streams broke off in hand-overs")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
