#!/usr/bin/env python3
"""Upgrades the supervisor under load of Triton's clients and plain HTTP connections.

Usage: upgrade.py SHADOWSLICE_BINARY [UPGRADES]

Busy and mostly idle clients use HTTP and gRPC, over TCP and Unix sockets. They check each response, and no response may
be lost. The script prints the latencies with and without upgrades.
"""

import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import tritonclient.grpc as grpcclient

from server import Server, wait_until

BUSY = 0.01  # the mean interval between two requests, in seconds
IDLE = 3.0
QUIET = 5  # seconds without upgrades
BETWEEN = 2  # seconds between two upgrades


class Echo(Server):
    def configuration(self, _):
        self.profile = self.folder / "profile.yaml"
        self.profile.write_text("source: {kind: illustrative}\nexecution_ms: {sms: [132], 1: [1.0]}\n")
        tensors = "[{input: x, output: y, datatype: FP32, shape: [4]}]"
        listen = "\n".join(super().configuration({}).splitlines()[:4])
        return f"""{listen}
gpus: [{{device: emulated, sms: 132}}]
models: [{{name: echo, engine: emulated, tensors: {tensors}, profile: profile.yaml, slo: 1s}}]
"""

    def upgrade(self):
        """Upgrades the supervisor, and stores the PID of the new process."""
        said = self.command("upgrade")
        self.pid = int(next(word for word in said.split() if word.isdigit()))


class Load:
    def __init__(self, server):
        self.server, self.over, self.lock = server, threading.Event(), threading.Lock()
        self.latencies, self.lost = [], []
        tcp = ("127.0.0.1", server.grpc_port)
        urls = [f"{tcp[0]}:{tcp[1]}", f"unix:{server.run_dir}/grpc.sock"]
        plans = [(self.over_http, unix, gap) for unix in (False, True) for gap in [BUSY] * 3 + [IDLE] * 8]
        plans += [(self.over_grpc, url, gap) for url in urls for gap in [BUSY] * 3 + [IDLE] * 2]
        self.threads = [threading.Thread(target=each, args=(where, gap)) for each, where, gap in plans]
        for thread in self.threads:
            thread.start()

    def repeat(self, gap, ask):
        while not self.over.is_set():
            values = np.random.rand(1, 4).astype(np.float32)
            begun = time.monotonic()
            try:
                answer = ask(values)
                why = None if np.array_equal(answer, values) else f"wrong: {answer} for {values}"
            except Exception as error:  # Every exception counts as a lost request.
                why = f"{error!r}: {error}"
            with self.lock:
                self.latencies.append(time.monotonic() - begun)
                self.lost += [why] if why else []
            self.over.wait(random.expovariate(1 / gap))

    def over_http(self, unix, gap):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.http_port, timeout=60)

        def ask(values):
            if unix and connection.sock is None:
                connection.sock = socket.socket(socket.AF_UNIX)
                connection.sock.connect(f"{self.server.run_dir}/http.sock")
            tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": values.ravel().tolist()}
            connection.request("POST", "/v2/models/echo/infer", json.dumps({"inputs": [tensor]}))
            answer = connection.getresponse()
            body = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status} {body[:200]}")
            return np.array(json.loads(body)["outputs"][0]["data"], np.float32).reshape(1, 4)

        self.repeat(gap, ask)

    def over_grpc(self, url, gap):
        client = grpcclient.InferenceServerClient(url)

        def ask(values):
            tensor = grpcclient.InferInput("x", [1, 4], "FP32")
            tensor.set_data_from_numpy(values)
            return client.infer("echo", [tensor]).as_numpy("y")

        self.repeat(gap, ask)

    def figures(self, what):
        with self.lock:
            ordered, self.latencies = sorted(self.latencies), []
        at = [1000 * ordered[int(part * (len(ordered) - 1))] for part in (0.5, 0.99, 1)]
        print(f"{what}: {len(ordered)} requests, p50 {at[0]:.1f}, p99 {at[1]:.1f}, longest {at[2]:.1f} ms")

    def end(self):
        self.over.set()
        for thread in self.threads:
            thread.join()


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def main(binary, upgrades):
    server = Echo(binary, lambda _: {})
    before = {server.process.pid}
    load = Load(server)
    try:
        time.sleep(QUIET)
        load.figures("without upgrades")
        for _ in range(upgrades):
            server.upgrade()
            before.add(server.pid)
            time.sleep(BETWEEN)
        load.figures(f"with {upgrades} upgrades")
    finally:
        load.end()
    before.remove(server.pid)
    server.process.wait(120)
    wait_until(lambda: not any(map(alive, before)))
    subprocess.run(["kill", f"-{int(signal.SIGTERM)}", str(server.pid)], check=True)
    wait_until(lambda: not alive(server.pid))
    left = [path.name for path in server.run_dir.rglob("*") if path.is_socket()]
    if load.lost or left:
        sys.exit(f"{len(load.lost)} requests lost or wrong, sockets left: {left}\n" + "\n".join(load.lost[:10]))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3)
