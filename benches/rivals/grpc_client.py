#!/usr/bin/env python3
"""Runs Triton's gRPC client for Python in a closed loop on one connection, and compares the bytes of every response.

Usage: grpc_client.py, and for each round a line on standard input: ADDRESS MODEL ELEMENTS SECONDS

The first line of output contains the versions. Each round then prints a line of JSON with requests, p50_us and p99_us.
If a response is wrong, the exit code is 1.
"""

import json
import platform
import sys
import time
from importlib.metadata import version

import numpy as np
import tritonclient.grpc as grpcclient

WARM_UP = 0.2  # seconds
TURNS = 2  # tensors sent in turn, so a late response of the previous request counts as wrong


def exchange(client, model, given, expected):
    answer = client.infer(model, [given]).as_numpy("y")
    if answer.shape != expected.shape or answer.tobytes() != expected.tobytes():
        sys.exit(f"wrong response of model {model}")


def measure(address, model, elements, seconds):
    turns = []
    for turn in range(TURNS):
        expected = np.arange(turn, turn + elements, dtype=np.float32).reshape(1, elements)
        given = grpcclient.InferInput("x", [1, elements], "FP32")
        given.set_data_from_numpy(expected)
        turns.append((given, expected))
    took = []
    with grpcclient.InferenceServerClient(address) as client:
        begun = time.perf_counter()
        while (sent := time.perf_counter()) < begun + WARM_UP + seconds:
            exchange(client, model, *turns[len(took) % TURNS])
            took.append((sent, time.perf_counter() - sent))
    times = [time for sent, time in took if sent >= begun + WARM_UP]
    p50, p99 = np.percentile(times, [50, 99]) * 1e6
    return {"requests": len(times), "p50_us": p50, "p99_us": p99}


if __name__ == "__main__":
    print(json.dumps(f"Python {platform.python_version()}, tritonclient {version('tritonclient')}, "
                     f"grpcio {version('grpcio')}, NumPy {version('numpy')}"), flush=True)
    for line in sys.stdin:
        address, model, elements, seconds = line.split()
        print(json.dumps(measure(address, model, int(elements), float(seconds))), flush=True)
