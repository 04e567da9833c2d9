"""Clients of the gateway, which check every response and record failures and latencies."""

import http.client
import json
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import tritonclient.grpc as grpcclient

WAIT = 0.03  # seconds from a response to the client's next request
TIMEOUT = 20.0
STREAM_MESSAGES = 3  # messages per call
DATATYPES = {"FP32": np.float32, "INT64": np.int64}


@dataclass(frozen=True)
class Case:
    """The inputs of a request, and the expected outputs."""

    inputs: list[dict[str, Any]]
    outputs: dict[str, list[float]]


@dataclass(frozen=True)
class Served:
    name: str
    cases: Callable[[], Case]


def echo(name: str, datatype: str, size: int) -> Served:
    """Returns a model of the emulated engine, whose output y equals its input x."""

    def case() -> Case:
        data = [float(random.randrange(1000)) for _ in range(size)]
        given = data if datatype == "FP32" else [int(each) for each in data]
        return Case(
            [{"name": "x", "datatype": datatype, "shape": [1, size], "data": given}],
            {"y": [float(each) for each in given]},
        )

    return Served(name, case)


def recorded(name: str, file: Path) -> Served:
    """Returns an ONNX model, with the recorded requests and outputs in a file."""
    cases = [
        Case(
            each["inputs"],
            {out["name"]: [float(value) for value in out["data"]] for out in each["outputs"]},
        )
        for each in json.loads(file.read_text())["cases"]
    ]
    return Served(name, lambda: random.choice(cases))


@dataclass
class Result:
    kind: str
    model: str
    at: float
    took: float
    fault: str | None


@dataclass
class Load:
    """Clients that send requests until the context ends."""

    address: str
    http_port: int
    grpc_port: int
    models: list[Served]
    streams: bool = False
    results: list[Result] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        kinds = [self._http, self._grpc] + ([self._stream] if self.streams else [])
        for model in self.models:
            for kind in kinds:
                thread = threading.Thread(target=kind, args=(model,), daemon=True)
                thread.start()
                self.threads.append(thread)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join(TIMEOUT + 5)

    def faults(self, without: tuple[str, ...] = ()) -> list[Result]:
        return [each for each in self.results if each.fault and each.model not in without]

    def longest(self) -> float:
        """Returns the longest latency, in seconds."""
        return max((each.took for each in self.results), default=0.0)

    def summary(self) -> str:
        slow = sorted((each.took for each in self.results), reverse=True)[:3]
        kinds = Counter(each.kind for each in self.results)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        longest = ", ".join(f"{each * 1000:.0f}" for each in slow)
        count, failed = len(self.results), len(self.faults())
        return f"{count} requests ({counts}), {failed} failed, longest {longest} ms"

    def explain(self) -> str:
        began = self.results[0].at if self.results else 0
        return "\n".join(
            f"  +{each.at - began:.2f} s {each.kind} {each.model}, "
            f"after {each.took * 1000:.0f} ms: {each.fault}"
            for each in self.faults()[:30]
        )

    def _note(
        self, kind: str, model: Served, ask: Callable[[Case], dict[str, list[float]]]
    ) -> None:
        case, began, fault = model.cases(), time.monotonic(), None
        try:
            fault = wrong(case, ask(case))
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        self.results.append(Result(kind, model.name, began, time.monotonic() - began, fault))
        self.ended.wait(WAIT)

    def _http(self, model: Served) -> None:
        connection = http.client.HTTPConnection(self.address, self.http_port, timeout=TIMEOUT)

        def ask(case: Case) -> dict[str, list[float]]:
            try:
                connection.request(
                    "POST", f"/v2/models/{model.name}/infer", json.dumps({"inputs": case.inputs})
                )
                answer = connection.getresponse()
                body = answer.read()
            except Exception:
                connection.close()
                raise
            if answer.status != 200:
                raise RuntimeError(f"{answer.status} {body[:200]!r}")
            return {
                out["name"]: [float(each) for each in out["data"]]
                for out in json.loads(body)["outputs"]
            }

        while not self.ended.is_set():
            self._note("http", model, ask)
        connection.close()

    def _grpc(self, model: Served) -> None:
        client = grpcclient.InferenceServerClient(f"{self.address}:{self.grpc_port}")

        def ask(case: Case) -> dict[str, list[float]]:
            return outputs(client.infer(model.name, inputs(case), client_timeout=TIMEOUT), case)

        while not self.ended.is_set():
            self._note("grpc", model, ask)
        client.close()

    def _stream(self, model: Served) -> None:
        """Sends a few messages in each call of ModelStreamInfer."""
        answers: queue.Queue[Any] = queue.Queue()
        client = grpcclient.InferenceServerClient(f"{self.address}:{self.grpc_port}")

        def ask(case: Case) -> dict[str, list[float]]:
            client.async_stream_infer(model.name, inputs(case))
            result, error = answers.get(timeout=TIMEOUT)
            if error is not None:
                raise error
            return outputs(result, case)

        while not self.ended.is_set():
            client.start_stream(lambda result, error: answers.put((result, error)))
            for _ in range(STREAM_MESSAGES):
                self._note("stream", model, ask)
            client.stop_stream()
        client.close()


def inputs(case: Case) -> list[grpcclient.InferInput]:
    made = []
    for each in case.inputs:
        made.append(grpcclient.InferInput(each["name"], each["shape"], each["datatype"]))
        data = np.array(each["data"], DATATYPES[each["datatype"]]).reshape(each["shape"])
        made[-1].set_data_from_numpy(data)
    return made


def outputs(result: Any, case: Case) -> dict[str, list[float]]:
    return {
        name: [float(value) for value in result.as_numpy(name).flatten()] for name in case.outputs
    }


def wrong(case: Case, found: dict[str, list[float]]) -> str | None:
    for name, values in case.outputs.items():
        if name not in found or not np.allclose(found[name], values, rtol=1e-3, atol=1e-3):
            return f"wrong: {name} is {found.get(name)} instead of {values}"[:300]
    return None
