#!/usr/bin/env python3
"""Runs MLPerf LoadGen's Server scenario (Poisson arrivals) against a server, over both protocols.

Usage: loadgen.py SHADOWSLICE_BINARY RIVALS_FOLDER

LoadGen must call each run VALID, and every byte of every response must be correct. LoadGen's own logs are in
RIVALS_FOLDER/loadgen.
"""

import itertools
import queue
import sys
import threading
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from perf_analyzer import Subject

# The bytes of a tensor, the requests per second, and the number of different tensors.
LOADS = ((64, 200, 1024), (600_000, 100, 16))
SECONDS = 8  # For a p99, LoadGen needs about 500 requests or more to call a run VALID.
LATENCY_MS = 100  # the limit for LoadGen's p99
THREADS = 16  # Each HTTP client needs its own thread.
SHOWN = ("Result is", "Completed samples per second", "50.00 percentile latency", "99.00 percentile latency")


class Client:
    """A client that sends samples. It passes each result, which is an array or an exception, to `done`."""

    def __init__(self, module, server, model, samples):
        self.module, self.model = module, model
        self.inputs = [[self.tensor(sample)] for sample in samples]
        if module is grpcclient:
            self.client, self.ask = module.InferenceServerClient(f"127.0.0.1:{server.grpc_port}"), self.ask_grpc
            return
        self.address = f"127.0.0.1:{server.http_port}"
        self.waiting, self.ask = queue.SimpleQueue(), lambda *job: self.waiting.put(job)
        self.threads = [threading.Thread(target=self.ask_http) for _ in range(THREADS)]
        for thread in self.threads:
            thread.start()

    def tensor(self, sample):
        tensor = self.module.InferInput("x", list(sample.shape), "FP32")
        tensor.set_data_from_numpy(sample)
        return tensor

    def ask_grpc(self, index, done):
        self.client.async_infer(self.model, self.inputs[index],
                                lambda result, error: done(error or result.as_numpy("y")))

    def ask_http(self):
        with self.module.InferenceServerClient(self.address) as client:
            while (job := self.waiting.get()) is not None:
                index, done = job
                try:
                    answer = client.infer(self.model, self.inputs[index]).as_numpy("y")
                except Exception as error:  # LoadGen needs a result for every sample. The check counts an exception as wrong.
                    answer = error
                done(answer)

    def close(self):
        if self.module is grpcclient:
            self.client.close()
            return
        for _ in self.threads:
            self.waiting.put(None)
        for thread in self.threads:
            thread.join()


class Check:
    """A counter of correct and wrong responses. It keeps the first wrong response."""

    def __init__(self, samples):
        self.samples, self.lock = samples, threading.Lock()
        self.right, self.wrong, self.first = 0, 0, None

    def __call__(self, index, answer):
        right = isinstance(answer, np.ndarray) and answer.tobytes() == self.samples[index].tobytes()
        with self.lock:
            self.right += right
            self.wrong += not right
            if not right and self.first is None:
                self.first = repr(answer)


def settings(loadgen, qps):
    it = loadgen.TestSettings()
    it.scenario, it.mode = loadgen.TestScenario.Server, loadgen.TestMode.PerformanceOnly
    it.server_target_qps = qps
    it.server_target_latency_ns = LATENCY_MS * 1_000_000
    it.min_duration_ms = SECONDS * 1000
    it.min_query_count = 1
    return it


def run(loadgen, server, module, load, logs):
    """Runs LoadGen once. Returns true if LoadGen's result is valid and all responses are correct."""
    size, qps, count = load
    samples = np.random.default_rng(0).standard_normal((count, 1, size // 4), dtype=np.float32)
    client, check = Client(module, server, f"echo-{size}", samples), Check(samples)

    def issue(queries):
        for query in queries:
            def done(answer, id=query.id, index=query.index):
                check(index, answer)
                loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(id, 0, 0)])
            client.ask(query.index, done)

    to = loadgen.LogSettings()
    to.log_output.outdir, to.enable_trace = str(logs), False
    sut = loadgen.ConstructSUT(issue, lambda: None)
    qsl = loadgen.ConstructQSL(count, count, lambda _: None, lambda _: None)
    loadgen.StartTestWithLogSettings(sut, qsl, settings(loadgen, qps), to, "")
    loadgen.DestroyQSL(qsl)
    loadgen.DestroySUT(sut)
    client.close()

    summary = (logs / "mlperf_log_summary.txt").read_text()
    print("\n".join(line for line in summary.splitlines() if any(word in line for word in SHOWN)))
    print(f"answers right {check.right}, wrong {check.wrong}" + (f"; the first: {check.first}" if check.wrong else ""), flush=True)
    return "Result is : VALID" in summary and check.right > 0 and not check.wrong


def main(binary, rivals):
    rivals = Path(rivals).resolve()
    # The folder is last in the path, so that packages in other folders take precedence.
    sys.path.append(str(rivals / "python"))
    import mlperf_loadgen
    server = Subject(binary, rivals / "models")
    valid = True
    try:
        for module, load in itertools.product((httpclient, grpcclient), LOADS):
            name = f"{module.__name__.rsplit('.', 1)[1]}-{load[0]}"
            logs = rivals / "loadgen" / name
            logs.mkdir(parents=True, exist_ok=True)
            print(f"{name}, {load[1]} requests/s for {SECONDS} s, p99 within {LATENCY_MS} ms", flush=True)
            valid &= run(mlperf_loadgen, server, module, load, logs)
    finally:
        server.stop()
    return 0 if valid else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) == 3 else __doc__)
