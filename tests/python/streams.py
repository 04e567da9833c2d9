#!/usr/bin/env python3
"""Tests models that stream, with both interfaces of tritonclient and with plain gRPC calls.

Usage: streams.py SHADOWSLICE_BINARY [unittest arguments]
"""

import asyncio
import os
import queue
import re
import shutil
import signal
import sys
import threading
import time
import unittest
import urllib.request
from pathlib import Path

import grpc
import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aiogrpc
import tritonclient.http as httpclient
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.grpc._utils import _get_inference_request
from tritonclient.utils import InferenceServerException

from server import Server, free_port, wait_until

TIMEOUT = 30  # seconds
EXAMPLE = Path(__file__).parents[2] / "configs" / "python" / "tokens"

# This model counts up to `count`. Each negative value of `count` selects a fault.
COUNTER = """
import os, time
import numpy as np
from shadowslice import InvalidInput, Tensor

class Counter:
    inputs = {"count": Tensor("INT32", [1]), "pause": Tensor("FP32", [1]), "bytes": Tensor("INT32", [1])}
    outputs = {"n": Tensor("INT32", [1]), "ballast": Tensor("UINT8", [-1])}
    streams = 4

    def load(self, context):
        self.open = 0

    def generate(self, request):
        count, pause, size = (request[name][0] for name in ("count", "pause", "bytes"))
        if count == -1: raise InvalidInput("it is unlucky")
        self.open += 1
        assert self.open <= self.streams, "too many at a time"
        try:
            for n in range(abs(count)):
                if n == 2 and count == -7: raise RuntimeError("a broken model")
                if n == 2 and count == -8: os.abort()
                if n == 2 and count == -9: yield {"n": np.zeros(3, np.int32)}
                time.sleep(max(0.0, float(pause)))
                yield {"n": np.array([n], np.int32), "ballast": np.zeros(size, np.uint8)}
            print("counted to the end", flush=True)
        except GeneratorExit:
            print("given up at", n, flush=True)
            raise
        finally:
            self.open -= 1
"""

PLAIN = """
import time
import numpy as np
from shadowslice import Tensor

class Plain:
    inputs = outputs = {"count": Tensor("INT32", [1])}

    def infer(self, batch):
        time.sleep(0.001 * (batch["count"][0] % 7))
        return batch
"""

TWENTY = {"count": 20, "pause": 0.001, "bytes": 4}
"""Inputs that make `counter` send twenty responses."""

SERVER = None


class Models(Server):
    def __init__(self, binary, more=""):
        self.metrics_port = free_port()
        super().__init__(binary, self.write, more)

    def write(self, folder):
        shutil.copytree(EXAMPLE, folder / "tokens")
        (folder / "counter.py").write_text(COUNTER)
        (folder / "plain.py").write_text(PLAIN)
        return {}

    def configuration(self, _):
        return "\n".join([
            "listen:",
            f'  http: ["127.0.0.1:{self.http_port}"]',
            f'  grpc: ["unix:grpc.sock", "127.0.0.1:{self.grpc_port}"]',
            f'  metrics: ["127.0.0.1:{self.metrics_port}"]',
            "gpus: [{device: emulated, sms: 132}]",
            "controller: {policy: static}",
            "workers: {environment: [PYTHONPATH]}",
            self.more or "timeouts: {spawn: 60s}",
            "models:",
            *self.models("python: {executable: " + sys.executable + "}, share: {initial: 20%}"),
        ]) + "\n"

    def models(self, python):
        """Returns the lines of the models. `python` has the keys that all of them have."""
        return [f"  - {{name: tokens, path: tokens/model.py, slo: 1s, {python}}}",
                f"  - {{path: counter.py, slo: 1s, {python}, handover: shadow}}",
                f"  - {{path: plain.py, slo: 1s, {python}}}"]

    def metric(self, sample):
        text = urllib.request.urlopen(f"http://localhost:{self.metrics_port}/metrics").read().decode()
        found = re.search(rf'{sample} (\d+)', text)
        return int(found[1]) if found else 0

    def steps(self, model):
        """Returns the number of responses so far, except for the first response of each stream."""
        return self.metric(f'shadowslice_stream_answer_seconds_count{{model="{model}".*}}')


def setUpModule():
    global SERVER
    SERVER = Models(sys.argv[0])


def tearDownModule():
    SERVER.stop()


def tensor(name, values, datatype):
    values = np.array(values)
    made = grpcclient.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values)
    return made


def counting(count, pause=0.0, size=0):
    return [tensor("count", np.int32([count]), "INT32"), tensor("pause", np.float32([pause]), "FP32"),
            tensor("bytes", np.int32([size]), "INT32")]


def request(model, inputs):
    """Returns a request message."""
    return _get_inference_request(model_name=model, inputs=inputs, model_version="", request_id="", outputs=None,
                                  sequence_id=0, sequence_start=False, sequence_end=False, priority=0, timeout=None,
                                  parameters=None)


def counted(result):
    return int(result.as_numpy("n")[0])


def is_final(result):
    return result.get_response().parameters["triton_final_response"].bool_param


class Stream:
    """A stream that uses the gRPC client of tritonclient."""

    def __init__(self, server=None):
        self.client = grpcclient.InferenceServerClient(f"localhost:{(server or SERVER).grpc_port}")
        self.came = queue.Queue()
        self.client.start_stream(lambda result, error: self.came.put((result, error)))

    def ask(self, model, inputs, **how):
        self.client.async_stream_infer(model, inputs, **how)

    def answer(self):
        result, error = self.came.get(timeout=TIMEOUT)
        if error is not None:
            raise error
        return result

    def until_the_end(self, model, inputs):
        """Sends a request, and returns all of its responses."""
        self.ask(model, inputs, enable_empty_final_response=True)
        return self.rest()

    def rest(self):
        """Returns all further responses to a request with a final response."""
        answers = []
        while not is_final(answer := self.answer()):
            answers.append(answer)
        return answers

    def close(self):
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


class Streams(unittest.TestCase):
    def setUp(self):
        self.stream = Stream()
        self.addCleanup(self.stream.close)

    def test_each_answer_comes_by_itself_and_then_the_end(self):
        for _ in range(2):
            answers = self.stream.until_the_end("counter", counting(50))
            self.assertEqual([counted(answer) for answer in answers], list(range(50)))
        self.assertEqual(self.stream.until_the_end("counter", counting(0)), [])

    def test_the_id_of_an_open_stream_is_counted_as_memory(self):
        self.stream.ask("counter", counting(10**9, 0.01), request_id="i" * (4 << 20))
        self.stream.answer()
        self.assertGreater(SERVER.metric("shadowslice_request_memory_bytes"), 4 << 20)

    def test_who_does_not_ask_for_the_end_gets_answers_alone(self):
        self.stream.ask("counter", counting(3), request_id="a")
        self.stream.ask("plain", [tensor("count", np.int32([9]), "INT32")], request_id="b")
        answers = [self.stream.answer() for _ in range(4)]
        by_id = {"a": [], "b": []}
        for answer in answers:
            by_id[answer.get_response().id].append(answer)
        self.assertEqual([counted(answer) for answer in by_id["a"]], [0, 1, 2])
        self.assertEqual(by_id["b"][0].as_numpy("count")[0], 9)
        self.assertTrue(self.stream.came.empty())

    def test_the_example_continues_a_text(self):
        words = (EXAMPLE / "text.txt").read_text().split()
        inputs = [tensor("prompt", np.array([b"so much for GPU"], dtype=object), "BYTES"),
                  tensor("count", np.int32([5]), "INT32")]
        answers = self.stream.until_the_end("tokens", inputs)
        at = words.index("GPU")
        self.assertEqual([answer.as_numpy("word")[0].decode() for answer in answers], words[at + 1:at + 6])

    def test_streams_take_turns(self):
        self.stream.ask("counter", counting(200, 0.002), request_id="long")
        self.assertEqual(counted(self.stream.answer()), 0)
        self.stream.ask("counter", counting(3), request_id="short")
        came = [self.stream.answer().get_response().id for _ in range(202)]
        self.assertLess(came.index("short"), 20)
        self.assertEqual((came.count("short"), came[-1]), (3, "long"))

    def test_more_requests_than_streams_wait_their_turn(self):
        for number in range(20):
            self.stream.ask("counter", counting(10), request_id=str(number))
        came = {}
        for _ in range(200):
            answer = self.stream.answer()
            came.setdefault(answer.get_response().id, []).append(counted(answer))
        self.assertEqual(came, {str(number): list(range(10)) for number in range(20)})

    def test_asyncio_s_client(self):
        async def ask():
            async def requests():
                for _ in range(2):
                    yield {"model_name": "counter", "inputs": counting(20)}

            async with aiogrpc.InferenceServerClient(f"localhost:{SERVER.grpc_port}") as client:
                came = []
                async for result, error in client.stream_infer(requests()):
                    self.assertIsNone(error)
                    came.append(counted(result))
                return sorted(came)

        self.assertEqual(asyncio.run(asyncio.wait_for(ask(), TIMEOUT)), sorted([*range(20)] * 2))

    def test_models_with_one_response_send_them_in_order(self):
        for number in range(100):
            self.stream.ask("plain", [tensor("count", np.int32([number]), "INT32")])
        came = [int(self.stream.answer().as_numpy("count")[0]) for _ in range(100)]
        self.assertEqual(came, list(range(100)))

    def test_a_failure_ends_its_request_alone(self):
        faults = [("counter", counting(-1), 0, "it is unlucky"),
                  ("counter", counting(-7), 2, "RuntimeError: a broken model"),
                  ("counter", counting(-9), 2, "generate yielded no output 'ballast'"),
                  ("counter", counting(3, 0, 80 << 20), 0, "raise limits.response_bytes"),
                  ("counter", counting(1)[:2], 0, "expected 3 inputs but got 2"),
                  ("plain", counting(1)[1:2], 0, "unexpected inference input"),
                  ("absent", counting(1), 0, "unknown model: 'absent'")]
        before = SERVER.worker("counter")
        for model, inputs, good, why in faults:
            with self.subTest(why):
                self.stream.ask(model, inputs, request_id="x")
                self.assertEqual([counted(self.stream.answer()) for _ in range(good)], list(range(good)))
                with self.assertRaises(InferenceServerException) as caught:
                    self.stream.answer()
                self.assertIn(why, str(caught.exception))
                self.assertEqual(len(self.stream.until_the_end("counter", counting(2))), 2)
        self.assertEqual(SERVER.worker("counter"), before)

    def test_a_broken_message_is_reported_after_the_responses_before_it(self):
        channel = grpc.insecure_channel(f"localhost:{SERVER.grpc_port}")
        self.addCleanup(channel.close)
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer",
                                     response_deserializer=service_pb2.ModelStreamInferResponse.FromString)
        answers = call(iter([request("plain", [tensor("count", np.int32([5]), "INT32")]).SerializeToString(), b"\xff"]))
        self.assertEqual(next(answers).infer_response.raw_output_contents[0], np.int32(5).tobytes())
        with self.assertRaises(grpc.RpcError) as caught:
            next(answers)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)

    def test_other_calls_say_what_to_use(self):
        http = httpclient.InferenceServerClient(f"localhost:{SERVER.http_port}")
        self.addCleanup(http.close)
        by_http = []
        for made in counting(1):
            by_http.append(httpclient.InferInput(made.name(), [1], made.datatype()))
            by_http[-1].set_data_from_numpy(np.zeros(1, {"INT32": np.int32, "FP32": np.float32}[made.datatype()]))
        for ask in (lambda: self.stream.client.infer("counter", counting(1)), lambda: http.infer("counter", by_http)):
            with self.assertRaises(InferenceServerException) as caught:
                ask()
            self.assertIn("ModelStreamInfer", str(caught.exception))
        self.assertTrue(self.stream.client.get_model_config("counter").config.model_transaction_policy.decoupled)
        self.assertEqual(http.get_model_config("counter")["model_transaction_policy"], {"decoupled": True})
        self.assertNotIn("model_transaction_policy", http.get_model_config("plain"))

    def test_a_client_that_leaves_ends_its_generator(self):
        given_up = len(re.findall("given up at", SERVER.log_tail()))
        self.stream.ask("counter", counting(100_000, 0.001))
        self.assertEqual([counted(self.stream.answer()) for _ in range(5)], [0, 1, 2, 3, 4])
        self.stream.client.stop_stream(cancel_requests=True)
        wait_until(lambda: len(re.findall("given up at", SERVER.log_tail())) > given_up)

    def test_a_client_that_does_not_read_holds_its_generator_back(self):
        channel = grpc.insecure_channel(f"localhost:{SERVER.grpc_port}")
        self.addCleanup(channel.close)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([request("counter", counting(1000, 0, 1 << 20))]))
        next(call)
        before = SERVER.steps("counter")
        self.stream.until_the_end("counter", counting(1000))
        self.assertLess(SERVER.steps("counter") - before, 1000 + 400, "the generator ran ahead of its client")
        call.cancel()

    def test_a_stream_survives_a_change_of_share(self):
        before = SERVER.worker("counter")
        self.stream.ask("counter", counting(200, 0.005), request_id="long")
        came = [counted(self.stream.answer()) for _ in range(20)]
        share = "35" if "20" in SERVER.command("status") else "20"
        resized = threading.Thread(target=lambda: SERVER.command("resize", "counter", share))
        resized.start()
        came += [counted(self.stream.answer()) for _ in range(180)]
        resized.join()
        self.assertEqual(came, list(range(200)))
        wait_until(lambda: SERVER.worker("counter") not in (None, before))
        self.assertEqual(len(self.stream.until_the_end("counter", counting(5))), 5)

    def test_a_dead_worker_ends_its_streams_and_no_other_request(self):
        before = SERVER.worker("counter")
        self.stream.ask("counter", counting(1000, 0.002), request_id="long")
        self.assertEqual(counted(self.stream.answer()), 0)
        os.kill(before, signal.SIGKILL)
        with self.assertRaises(InferenceServerException) as caught:
            while True:
                self.stream.answer()
        self.assertRegex(str(caught.exception), "send the request again|died while computing")
        self.assertEqual(len(self.stream.until_the_end("counter", counting(5))), 5)
        self.assertNotEqual(SERVER.worker("counter"), before)


def through_an_upgrade(server, model, inputs, expected):
    """Upgrades a supervisor while streams end and begin. Returns the distinct outcomes, which must all be True."""
    stop, outcomes = threading.Event(), []

    def load():
        stream = Stream(server)
        while not stop.is_set():
            try:
                answers = stream.until_the_end(model, inputs)
                outcomes.append([counted(answer) for answer in answers] == expected)
            except InferenceServerException as error:
                # When the first supervisor stops, it ends its calls between two requests.
                ended = ("call again", "no longer in valid state")
                outcomes.append(any(why in str(error) for why in ended) or str(error))
                stream.close()
                stream = Stream(server)
        stream.close()

    threads = [threading.Thread(target=load) for _ in range(3)]
    [thread.start() for thread in threads]
    said = server.command("upgrade")
    pid = int(next(word for word in said.split() if word.isdigit()))
    done = len(outcomes)
    wait_until(lambda: len(outcomes) > done + 6)
    stop.set()
    [thread.join() for thread in threads]
    status = server.process.wait(TIMEOUT)
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not any(path.is_socket() for path in server.run_dir.rglob("*")))
    return {*outcomes, status == 0}


class Upgrades(unittest.TestCase):
    def test_streams_under_way_end_and_new_ones_begin_with_the_next_supervisor(self):
        server = Models(sys.argv[0])
        self.addCleanup(shutil.rmtree, server.folder)
        self.assertEqual(through_an_upgrade(server, "counter", counting(100, 0.002), list(range(100))), {True})

    def test_a_stream_without_an_end_breaks_off_after_the_time_to_drain(self):
        server = Models(sys.argv[0], more="timeouts: {drain: 1s}")
        self.addCleanup(shutil.rmtree, server.folder)
        streams = [Stream(server) for _ in range(2)]
        for stream in streams:
            stream.ask("counter", counting(10**9, 0.01))
            stream.answer()
        begun = time.monotonic()
        # The client of the second stream reads no further answer.
        said = server.command("upgrade")
        self.assertLess(time.monotonic() - begun, TIMEOUT)
        with self.assertRaisesRegex(InferenceServerException, "send the request again|call again"):
            while True:
                streams[0].answer()
        self.assertEqual(server.process.wait(TIMEOUT), 0)
        pid = int(next(word for word in said.split() if word.isdigit()))
        [stream.close() for stream in streams]
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not any(path.is_socket() for path in server.run_dir.rglob("*")))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.argv.pop(0)
    unittest.main(argv=sys.argv)
