#!/usr/bin/env python3
"""Tests Triton's generate extension with plain HTTP, curl and Node.

Usage: generate.py SHADOWSLICE_BINARY [unittest arguments]
"""

import gzip
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import unittest
import urllib.request

from server import Server, free_port, wait_until

TIMEOUT = 30  # seconds

# This model counts up to `count`. Each negative value of `count` selects a fault.
COUNTER = """
import os, time
import numpy as np
from shadowslice import InvalidInput, Tensor

class Counter:
    inputs = {"count": Tensor("INT32", [1]), "pause": Tensor("FP32", [1]), "bytes": Tensor("INT32", [1])}
    outputs = {"n": Tensor("INT32", [1]), "ballast": Tensor("UINT8", [-1])}
    streams = 4

    def generate(self, request):
        count, pause, size = (request[name][0] for name in ("count", "pause", "bytes"))
        if count == -1: raise InvalidInput("it is unlucky")
        try:
            for n in range(abs(count)):
                if n == 2 and count == -7: raise RuntimeError("a broken model")
                if n == 2 and count == -8: os.abort()
                time.sleep(max(0.0, float(pause)))
                yield {"n": np.array([n], np.int32), "ballast": np.zeros(size, np.uint8)}
        except GeneratorExit:
            print("given up at", n, flush=True)
            raise
"""

# This model writes one text for each row.
WRITER = """
import numpy as np
from shadowslice import Tensor

class Writer:
    inputs = {"text": Tensor("BYTES", [-1, -1]), "times": Tensor("INT64", [-1, 1])}
    outputs = {"out": Tensor("BYTES", [-1, 1]), "lengths": Tensor("INT32", [-1, 2])}
    deterministic = False

    def warmup(self):
        return {"text": np.array([[b"a"]], dtype=object), "times": np.ones((1, 1), np.int64)}

    def infer(self, batch):
        texts = [[b"".join(row) * int(times[0])] for row, times in zip(batch["text"], batch["times"])]
        lengths = [[len(row), len(text[0])] for row, text in zip(batch["text"], texts)]
        return {"out": np.array(texts, dtype=object), "lengths": np.array(lengths, np.int32)}
"""

SERVER = None


class Models(Server):
    def __init__(self, binary, more=""):
        self.metrics_port = free_port()
        super().__init__(binary, self.write, more)

    def write(self, folder):
        (folder / "counter.py").write_text(COUNTER)
        (folder / "writer.py").write_text(WRITER)
        return {}

    def configuration(self, _):
        python = "python: {executable: " + sys.executable + "}, slo: 1s, share: {initial: 20%}"
        return "\n".join([
            "listen:",
            f'  http: ["unix:http.sock", "127.0.0.1:{self.http_port}"]',
            f'  grpc: ["127.0.0.1:{self.grpc_port}"]',
            f'  metrics: ["127.0.0.1:{self.metrics_port}"]',
            "gpus: [{device: emulated, sms: 132}]",
            "controller: {policy: static}",
            "workers: {environment: [PYTHONPATH]}",
            f"access_log: {self.folder}/access.jsonl",
            self.more,
            "models:",
            f"  - {{path: counter.py, {python}}}",
            f"  - {{path: writer.py, {python}}}",
        ]) + "\n"

    def access(self, request_id):
        """Waits for the line of a request in the access log, and returns it."""
        log = self.folder / "access.jsonl"

        def lines():
            found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
            return [line for line in found if line["request_id"] == request_id]

        wait_until(lines)
        return lines()[0]

    def metric(self, sample):
        text = urllib.request.urlopen(f"http://localhost:{self.metrics_port}/metrics").read().decode()
        found = re.search(rf'{sample} (\d+)', text)
        return int(found[1]) if found else 0


def setUpModule():
    global SERVER
    SERVER = Models(sys.argv[0])


def tearDownModule():
    SERVER.stop()


def counting(count, pause=0.0, size=0):
    return {"count": count, "pause": pause, "bytes": size}


class Client:
    """A connection over TCP."""

    def __init__(self, server=None):
        self.connection = http.client.HTTPConnection("127.0.0.1", (server or SERVER).http_port, timeout=TIMEOUT)

    def post(self, path, body, **headers):
        """Sends a request, and returns its response after the head."""
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.connection.request("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        return self.connection.getresponse()

    def ask(self, path, body, **headers):
        """Returns the status and the JSON of a response."""
        response = self.post(path, body, **headers)
        return response.status, json.loads(response.read())

    def events(self, model, body):
        """Returns the data of all events of a stream."""
        return list(each(self.post(f"/v2/models/{model}/generate_stream", body)))


def each(response):
    """Yields the data of events as they arrive."""
    assert response.status == 200, response.read()
    while line := response.readline():
        assert line.startswith(b"data: ") and response.readline() == b"\n", line
        yield json.loads(line.removeprefix(b"data: "))


class Generate(unittest.TestCase):
    def setUp(self):
        self.client = Client()
        self.addCleanup(self.client.connection.close)

    def test_one_answer_is_an_object(self):
        body = {"text": ["a", "é\n"], "times": 2, "id": "42", "parameters": {"other": [1, {}]}}
        for version in "", "/versions/1":
            status, answer = self.client.ask(f"/v2/models/writer{version}/generate", body)
            self.assertEqual((status, answer), (200, {"id": "42", "model_name": "writer", "model_version": "1",
                                                      "out": "aé\naé\n", "lengths": [[2, 8]]}))
        rows = {"text": [["a"], ["b"]], "parameters": {"times": [[1], [3]]}}
        status, answer = self.client.ask("/v2/models/writer/generate", rows)
        self.assertEqual((answer["out"], answer["lengths"]), ([["a"], ["bbb"]], [[1, 1], [1, 3]]))
        self.assertNotIn("id", answer)

    def test_a_model_with_one_answer_gives_one_event(self):
        events = self.client.events("writer", {"text": "a", "times": 3})
        self.assertEqual([event["out"] for event in events], ["aaa"])

    def test_each_answer_of_a_stream_is_an_event(self):
        response = self.client.post("/v2/models/counter/versions/1/generate_stream", counting(50) | {"id": "x"},
                                    accept_encoding="gzip, deflate")
        self.assertEqual(response.headers["content-type"], "text/event-stream")
        self.assertEqual(response.headers["cache-control"], "no-cache")
        self.assertNotIn("content-encoding", response.headers)
        events = list(each(response))
        self.assertEqual([event["n"] for event in events], list(range(50)))
        self.assertEqual({event["id"] for event in events}, {"x"})
        # The connection continues.
        self.assertEqual(self.client.events("counter", counting(0)), [])
        self.assertEqual(len(self.client.events("counter", counting(3, size=100_000))), 3)

    def test_events_arrive_one_by_one(self):
        response = self.client.post("/v2/models/counter/generate_stream", counting(10**9, 0.01))
        events = each(response)
        self.assertEqual([next(events)["n"] for _ in range(5)], list(range(5)))
        self.client.connection.close()
        response.close()

    def test_generate_needs_exactly_one_answer(self):
        self.assertEqual(self.client.ask("/v2/models/counter/generate", counting(1))[0], 200)
        for count in 0, 2:
            status, answer = self.client.ask("/v2/models/counter/generate", counting(count))
            self.assertEqual(status, 400)
            self.assertIn("use generate_stream", answer["error"])

    def test_a_failure_before_the_first_answer_is_an_ordinary_error(self):
        for body, status, why in [(counting(-1), 400, "it is unlucky"),
                                  ({"count": 1}, 400, "expected 3 inputs but got 1"),
                                  (counting(1) | {"cuont": 2}, 400, "whose inputs are: count, pause, bytes"),
                                  (counting("a"), 400, "a string is not a valid INT32"),
                                  (b"garbage", 400, "failed to parse"),
                                  (b"[1]", 400, "must be an object"),
                                  (b'{"count": [[1], 2]}', 400, "equal lengths"),
                                  (b'{"count": NaN}', 400, "NaN"),
                                  (b"", 400, "EOF"),
                                  (counting(3, 0, 80 << 20), 500, "limits.response_bytes")]:
            for form in "generate", "generate_stream":
                with self.subTest(why=why, form=form):
                    got, answer = self.client.ask(f"/v2/models/counter/{form}", body)
                    self.assertIn(why, answer["error"])
                    self.assertEqual(got, status)
        self.assertEqual(self.client.ask("/v2/models/absent/generate", {})[0], 404)
        self.assertEqual(self.client.ask("/v2/models/writer/versions/2/generate_stream", {})[0], 404)
        self.client.connection.request("GET", "/v2/models/writer/generate")
        self.assertEqual(self.client.connection.getresponse().status, 405)

    def test_a_failure_in_a_stream_is_the_last_event(self):
        *answers, last = self.client.events("counter", counting(-7))
        self.assertEqual([answer["n"] for answer in answers], [0, 1])
        self.assertIn("RuntimeError: a broken model", last["error"])
        self.assertEqual(len(self.client.events("counter", counting(2))), 2, "the connection continues")

    def test_a_dead_worker_ends_its_streams_with_an_error(self):
        before = SERVER.worker("counter")
        events = each(self.client.post("/v2/models/counter/generate_stream", counting(100_000, 0.002)))
        self.assertEqual(next(events)["n"], 0)
        os.kill(before, signal.SIGKILL)
        *_, last = events
        self.assertRegex(last["error"], "send the request again|died while computing")
        self.assertEqual(len(self.client.events("counter", counting(2))), 2)
        self.assertNotEqual(SERVER.worker("counter"), before)

    def test_a_client_that_leaves_ends_its_generator(self):
        given_up = len(re.findall("given up at", SERVER.log_tail()))
        response = self.client.post("/v2/models/counter/generate_stream", counting(10**9, 0.001))
        events = each(response)
        self.assertEqual([next(events)["n"] for _ in range(3)], [0, 1, 2])
        response.close()
        self.client.connection.close()
        wait_until(lambda: len(re.findall("given up at", SERVER.log_tail())) > given_up)

    def test_a_client_that_does_not_read_holds_its_generator_back(self):
        response = self.client.post("/v2/models/counter/generate_stream", counting(1000, 0, 1 << 20))
        response.readline()
        before = SERVER.metric('shadowslice_stream_answer_seconds_count{model="counter".*}')
        other = Client()
        self.assertEqual(len(other.events("counter", counting(1000))), 1000)
        other.connection.close()
        steps = SERVER.metric('shadowslice_stream_answer_seconds_count{model="counter".*}') - before
        self.assertLess(steps, 1000 + 400, "the generator ran ahead of its client")
        response.close()

    def test_options_and_compressed_requests(self):
        body = gzip.compress(json.dumps({"text": "a" * 1000, "times": 2}).encode())
        response = self.client.post("/v2/models/writer/generate", body, content_encoding="gzip", accept_encoding="gzip")
        self.assertEqual(response.headers["content-encoding"], "gzip")
        self.assertEqual(json.loads(gzip.decompress(response.read()))["out"], "a" * 2000)
        slow = counting(2, 0.5) | {"parameters": {"timeout": 10_000}}
        self.assertEqual(self.client.ask("/v2/models/counter/generate_stream", slow)[0], 504)
        status, answer = self.client.ask("/v2/models/counter/generate", counting(1) | {"parameters": {"priority": -1}})
        self.assertEqual(status, 400)
        self.assertIn("priority", answer["error"])

    def test_the_access_log_has_a_line_for_each_stream(self):
        self.client.events("counter", counting(3) | {"id": "logged"})
        self.client.events("counter", counting(-7) | {"id": "broken"})
        logged, broken = SERVER.access("logged"), SERVER.access("broken")
        self.assertEqual((logged["model"], logged["code"], logged["error"], logged["reason"]),
                         ("counter", 200, None, None))
        self.assertEqual((broken["code"], broken["reason"]), (200, None))
        self.assertIn("RuntimeError: a broken model", broken["error"])
        self.assertGreater(logged["bytes_out"], 3 * len('data: {"n": 0}'))

    def test_a_client_that_leaves_between_two_answers_is_noticed_at_once(self):
        pause = 2.0  # seconds
        response = self.client.post("/v2/models/counter/generate_stream", counting(10**9, pause) | {"id": "left"})
        self.assertEqual(next(each(response))["n"], 0)
        response.close()
        self.client.connection.close()
        left = SERVER.access("left")
        self.assertEqual(left["reason"], "client_left")
        self.assertLess(left["latency_ms"], 1000 * 2 * pause, "the server noticed it with the next answer")

    def test_a_stream_is_one_answered_request(self):
        sample = 'shadowslice_requests_total{model="counter".*outcome="succeeded"}'
        before = SERVER.metric(sample)
        self.client.events("counter", counting(5))
        self.client.ask("/v2/models/counter/generate", counting(1))
        wait_until(lambda: SERVER.metric(sample) == before + 2)


class Upgrades(unittest.TestCase):
    def test_streams_continue_until_the_time_to_drain(self):
        server = Models(sys.argv[0], more="timeouts: {drain: 1s}")
        self.addCleanup(shutil.rmtree, server.folder)
        clients = [Client(server) for _ in range(2)]
        endless, short = [each(client.post("/v2/models/counter/generate_stream", counting(count, 0.01)))
                          for client, count in zip(clients, (10**9, 20))]
        self.assertEqual((next(endless)["n"], next(short)["n"]), (0, 0))
        said = server.command("upgrade")
        successor = int(next(word for word in said.split() if word.isdigit()))
        try:
            self.assertEqual([event["n"] for event in short], list(range(1, 20)))
            *_, last = endless
            self.assertRegex(last["error"], "send the request again")
            # The first supervisor waits for further requests of open connections.
            [client.connection.close() for client in clients]
            self.assertEqual(server.process.wait(TIMEOUT), 0)
            again = Client(server)
            self.assertEqual(len(again.events("counter", counting(3))), 3)
            again.connection.close()
        finally:
            os.kill(successor, signal.SIGTERM)
        wait_until(lambda: not any(path.is_socket() for path in server.run_dir.rglob("*")))
        server.log.close()

    def test_a_server_that_stops_answers_its_streams(self):
        server = Models(sys.argv[0])
        client = Client(server)
        self.addCleanup(client.connection.close)
        events = each(client.post("/v2/models/counter/generate_stream", counting(100, 0.01)))
        self.assertEqual(next(events)["n"], 0)
        server.process.send_signal(signal.SIGTERM)
        self.assertEqual([event["n"] for event in events], list(range(1, 100)))
        self.assertEqual(server.process.wait(TIMEOUT), 0)
        server.log.close()
        shutil.rmtree(server.folder)


@unittest.skipUnless(shutil.which("curl"), "curl is missing")
class Curl(unittest.TestCase):
    def test_events_are_not_buffered(self):
        url = f"http://127.0.0.1:{SERVER.http_port}/v2/models/counter/generate_stream"
        with subprocess.Popen(["curl", "--silent", "--no-buffer", "--compressed", url, "--data",
                               json.dumps(counting(10**9, 0.01))], stdout=subprocess.PIPE) as curl:
            first = curl.stdout.readline()
            self.assertEqual(json.loads(first.removeprefix(b"data: "))["n"], 0)
            curl.terminate()


NODE = """
const response = await fetch(process.argv[1], {method: "POST", body: process.argv[2]});
let text = "";
for await (const chunk of response.body) text += new TextDecoder().decode(chunk);
const events = text.split("\\n\\n").filter(Boolean).map(event => JSON.parse(event.replace("data: ", "")).n);
console.log(JSON.stringify([response.status, response.headers.get("content-type"), events]));
"""


@unittest.skipUnless(shutil.which("node"), "Node is missing")
class Node(unittest.TestCase):
    def test_fetch_reads_a_stream(self):
        url = f"http://127.0.0.1:{SERVER.http_port}/v2/models/counter/generate_stream"
        done = subprocess.run(["node", "--input-type=module", "--eval", NODE, url, json.dumps(counting(4))],
                              check=True, stdout=subprocess.PIPE, timeout=TIMEOUT)
        self.assertEqual(json.loads(done.stdout), [200, "text/event-stream", [0, 1, 2, 3]])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.argv.pop(0)
    unittest.main(argv=sys.argv)
