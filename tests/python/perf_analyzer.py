#!/usr/bin/env python3
"""Runs Triton's perf_analyzer against a server. All runs must succeed without warnings and failed requests.

Usage: perf_analyzer.py SHADOWSLICE_BINARY RIVALS_FOLDER

The runs cover both protocols, with and without system shared memory. They send one or eight concurrent requests, with
tensors of 64 bytes or 600 kB. Further runs use ModelStreamInfer, with models that send one response or twenty.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import streams
from server import Server

SIZES = {64: 2000, 600_000: 200}  # the number of requests, by the size of a tensor in bytes
CONCURRENCY = (1, 8)  # With more concurrent requests, perf_analyzer itself may need minutes.
TIMEOUT = 90  # seconds for a run, which usually takes one or two seconds
COMPLAINT = re.compile(r"error|fail|unable|unsupported|not supported|unstable", re.IGNORECASE)


class Subject(Server):
    def __init__(self, binary, models):
        self.models = models
        super().__init__(binary, self.write)

    def write(self, folder):
        (folder / "counter.py").write_text(streams.COUNTER)
        load = {name: {"content": [value], "shape": [1]} for name, value in streams.TWENTY.items()}
        (folder / "asked.json").write_text(json.dumps({"data": [load]}))
        return {}

    def configuration(self, _):
        lines = ["listen:",
                 f'  http: ["unix:http.sock", "127.0.0.1:{self.http_port}"]',
                 f'  grpc: ["unix:grpc.sock", "127.0.0.1:{self.grpc_port}"]',
                 "  metrics: []",
                 "limits: {shared_memory: true}",
                 "gpus: [{device: emulated}]",
                 "controller: {policy: static}",
                 "models:"]
        lines += [f"  - {{name: echo-{size}, path: {self.models}/echo-{size}/1/model.onnx, slo: 10s, "
                  "queue: {on_late: serve}}" for size in SIZES]
        lines += [f"  - {{path: counter.py, slo: 10s, python: {{executable: {sys.executable}}}}}",
                  "workers: {environment: [PYTHONPATH]}"]
        return "\n".join(lines) + "\n"

    def requests(self, model):
        models = json.loads(self.command("status", "--json"))["models"]
        requests = next(each["requests"] for each in models if each["name"] == model)
        return {name: requests[name] for name in ("accepted", "succeeded", "rejected")}


def analyze(server, rivals, size, protocol, memory, concurrency):
    more = ["--shared-memory", memory]
    return run(server, rivals, (f"echo-{size}", SIZES[size]), protocol, concurrency, more)


def stream(server, rivals, model, count, concurrency):
    more = ["--streaming"] + (["--input-data", server.folder / "asked.json"] if model == "counter" else [])
    return run(server, rivals, (model, count), "grpc", concurrency, more)


def run(server, rivals, load, protocol, concurrency, more):
    """Runs perf_analyzer once. Returns the reason if the run fails."""
    model, count = load
    address = f"127.0.0.1:{server.http_port if protocol == 'http' else server.grpc_port}"
    command = [rivals / "perf/perf_analyzer", "-m", model, "-i", protocol, "-u", address,
               "--concurrency-range", str(concurrency), "--request-count", str(count), *more]
    before = server.requests(model)
    try:
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT,
                              env=os.environ | {"LD_LIBRARY_PATH": str(rivals / "perf/lib")})
    except subprocess.TimeoutExpired as late:
        return f"it did not end within {TIMEOUT} s:\n{late.stdout}"
    after = {name: value - before[name] for name, value in server.requests(model).items()}
    p50 = re.search(r"p50 latency: (\d+) usec", done.stdout)
    complaints = [line for line in done.stdout.splitlines() if COMPLAINT.search(line)]
    lost = after["accepted"] - after["succeeded"] + after["rejected"]
    if done.returncode or complaints or lost or after["succeeded"] < count or not p50:
        return f"it ended with {done.returncode}, {after}:\n{done.stdout}"
    print(f"{model} {protocol} x{concurrency} {' '.join(map(str, more[:2]))}: p50 {p50[1]} us, {after['succeeded']} answered",
          flush=True)
    return None


def main(binary, rivals):
    rivals = Path(rivals).resolve()
    server = Subject(binary, rivals / "models")
    wrong = 0
    try:
        for setting in itertools.product(SIZES, ("http", "grpc"), ("none", "system"), CONCURRENCY):
            fault = analyze(server, rivals, *setting)
            if fault:
                wrong += 1
                print(f"error: {setting}: {fault}", file=sys.stderr, flush=True)
        for setting in itertools.product((("echo-64", 2000), ("counter", 100)), CONCURRENCY):
            fault = stream(server, rivals, *setting[0], setting[1])
            if fault:
                wrong += 1
                print(f"error: {setting}: {fault}", file=sys.stderr, flush=True)
    finally:
        server.stop()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) == 3 else __doc__)
