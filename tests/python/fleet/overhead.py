"""Measures the latency that the gateway adds to a request."""

import http.client
import json
import statistics
import time
from collections.abc import Callable

import tritonclient.grpc as grpcclient

from common import Options
from load import echo, inputs
from rig import GRPC, HTTP, Rig


def overhead(rig: Rig, options: Options) -> None:
    """Prints the median latency with and without Envoy. Does not check the latency."""
    host = rig.status()["models"]["echo"]["copies"][0]["host"]
    count = options.times(1000, 3000, 3000)
    for kind, send in (("HTTP", http_sender), ("gRPC", grpc_sender)):
        direct, gateway = send(rig.address(host)), send(rig.address("gw"))
        took: dict[str, list[float]] = {"direct": [], "through Envoy": []}
        for _ in range(count):
            for name, one in (("direct", direct), ("through Envoy", gateway)):
                began = time.perf_counter()
                one()
                took[name].append(time.perf_counter() - began)
        medians = ", ".join(
            f"{statistics.median(times) * 1e6:.0f} us {name}" for name, times in took.items()
        )
        print(f"  {kind}, one connection: p50 {medians}", flush=True)


def http_sender(address: str) -> Callable[[], None]:
    connection = http.client.HTTPConnection(address, HTTP, timeout=10)
    body = json.dumps({"inputs": echo("echo", "FP32", 4).cases().inputs})

    def send() -> None:
        connection.request("POST", "/v2/models/echo/infer", body)
        answer = connection.getresponse()
        assert answer.status == 200 and answer.read()

    return send


def grpc_sender(address: str) -> Callable[[], None]:
    client = grpcclient.InferenceServerClient(f"{address}:{GRPC}")
    given = inputs(echo("echo", "FP32", 4).cases())
    return lambda: client.infer("echo", given)
