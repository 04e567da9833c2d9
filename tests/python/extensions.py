#!/usr/bin/env python3
"""Tests Triton's extensions of the protocol with Triton's clients and with other clients.

Usage: extensions.py SHADOWSLICE_BINARY [unittest arguments]

The tests cover health, compression, priorities, timeouts, cancelled requests, load metrics and shared memory.
"""

import gzip
import http.client
import json
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
import unittest
import zlib

import grpc
import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shared_memory
from tritonclient.utils import InferenceServerException

from server import Server, unix_http

REQUEST_BYTES = 8 << 20  # limits.request_bytes
SLOW = 0.3  # seconds for which a batch of `slow` executes
TIMEOUT = 30  # seconds, which is longer than any step of these tests

BINARY = None
SERVER = None


class Emulated(Server):
    """A server with the models `quick` and `slow`. A batch of `slow` has only one request."""

    def __init__(self, binary, wait=True):
        super().__init__(binary, self.profiles, wait=wait)

    def profiles(self, folder):
        for name, ms in (("quick", 0.1), ("slow", SLOW * 1000)):
            (folder / f"{name}.yaml").write_text(
                "source: {kind: illustrative}\n"
                "memory: {context: 1Mi, weights: 1Mi, activations: 1Mi}\n"
                "start: {process: 0ms, load: 0ms, warm: 0ms}\nbandwidth: 0\n"
                f"execution_ms:\n  sms: [132]\n  1: [{ms}]\n")
        return {}

    def configuration(self, _):
        tensors = "tensors: [{input: x, output: y, datatype: FP32, shape: [-1]}]"
        return "\n".join([
            "listen:",
            f'  http: ["unix:http.sock", "127.0.0.1:{self.http_port}"]',
            f'  grpc: ["unix:grpc.sock", "127.0.0.1:{self.grpc_port}"]',
            "  metrics: []",
            f"limits: {{request_bytes: {REQUEST_BYTES}, shared_memory: true}}",
            "gpus: [{device: emulated, sms: 132}]",
            # Other policies refuse requests that cannot meet their timeout.
            "controller: {policy: static}",
            "models:",
            f"  - {{name: quick, engine: emulated, profile: quick.yaml, slo: 1s, {tensors}, batch: {{max: 4}}}}",
            f"  - {{name: slow, engine: emulated, profile: slow.yaml, slo: 10s, {tensors}, batch: {{max: 1}}}}",
        ]) + "\n"


def setUpModule():
    global SERVER
    SERVER = Emulated(BINARY)


def tearDownModule():
    SERVER.stop()


def tensor(module, array):
    given = module.InferInput("x", list(array.shape), "FP32")
    given.set_data_from_numpy(array)
    return [given]


def numbers(count):
    return np.arange(count, dtype=np.float32).reshape(1, count)


def http_socket():
    return f"{SERVER.run_dir}/http.sock"


def infer_json(count):
    data = numbers(count).tolist()
    return json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, count], "data": data}]}).encode()


class Health(unittest.TestCase):
    """Tests the service grpc.health.v1 with manually encoded messages."""

    SERVING, NOT_SERVING, SERVICE_UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"

    @staticmethod
    def named(service):
        return b"\x0a" + bytes([len(service)]) + service if service else b""

    def channel(self, server=None):
        channel = grpc.insecure_channel(f"127.0.0.1:{(server or SERVER).grpc_port}")
        self.addCleanup(channel.close)
        return channel

    def test_check(self):
        check = self.channel().unary_unary("/grpc.health.v1.Health/Check")
        for service in (b"", b"inference.GRPCInferenceService"):
            self.assertEqual(check(self.named(service), timeout=TIMEOUT), self.SERVING)
        with self.assertRaises(grpc.RpcError) as raised:
            check(self.named(b"no.such.Service"), timeout=TIMEOUT)
        self.assertEqual(raised.exception.code(), grpc.StatusCode.NOT_FOUND)

    def test_watching_an_unknown_service_reports_that(self):
        watching = self.channel().unary_stream("/grpc.health.v1.Health/Watch")(self.named(b"x"), timeout=TIMEOUT)
        self.assertEqual(next(watching), self.SERVICE_UNKNOWN)
        watching.cancel()

    def test_watch_sees_the_start_and_the_end(self):
        server = Emulated(BINARY, wait=False)
        try:
            watch = self.channel(server).unary_stream("/grpc.health.v1.Health/Watch")
            watching = watch(self.named(b""), timeout=TIMEOUT, wait_for_ready=True)
            seen = next(watching)
            if seen == self.NOT_SERVING:  # The watcher sees this state only if it connects before the server is ready.
                seen = next(watching)
            self.assertEqual(seen, self.SERVING)
        finally:
            # A watcher must not keep the server from stopping.
            stopping = threading.Thread(target=server.stop)
            stopping.start()
        self.assertEqual(next(watching), self.NOT_SERVING)
        with self.assertRaises(StopIteration):
            next(watching)
        stopping.join(TIMEOUT)

    def test_watchers_are_bounded_and_make_room_when_they_leave(self):
        watch = self.channel().unary_stream("/grpc.health.v1.Health/Watch")
        watching = [watch(b"", timeout=TIMEOUT) for _ in range(256)]
        for each in watching:
            self.assertEqual(next(each), self.SERVING)
        with self.assertRaises(grpc.RpcError) as raised:
            next(grpc.insecure_channel(f"127.0.0.1:{SERVER.grpc_port}").unary_stream(
                "/grpc.health.v1.Health/Watch")(b"", timeout=TIMEOUT))
        self.assertEqual(raised.exception.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
        for each in watching:
            each.cancel()
        until = time.monotonic() + TIMEOUT
        while True:
            try:
                self.assertEqual(next(watch(b"", timeout=TIMEOUT)), self.SERVING)
                break
            except grpc.RpcError as full:
                self.assertEqual(full.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
                self.assertLess(time.monotonic(), until, "the server still accepts no watcher")


class Compression(unittest.TestCase):
    def test_tritons_grpc_client(self):
        client = grpcclient.InferenceServerClient(f"127.0.0.1:{SERVER.grpc_port}")
        self.addCleanup(client.close)
        array = numbers(100_000)
        for algorithm in ("gzip", "deflate", None):
            answer = client.infer("quick", tensor(grpcclient, array), compression_algorithm=algorithm)
            np.testing.assert_array_equal(answer.as_numpy("y"), array)
            with self.assertRaises(InferenceServerException) as raised:
                client.infer("absent", tensor(grpcclient, array), compression_algorithm=algorithm)
            self.assertEqual(raised.exception.status(), "StatusCode.NOT_FOUND")

    def test_a_bomb_over_grpc(self):
        """Checks that the server refuses a message of some kilobytes that expands to ten times the allowed size."""
        client = grpcclient.InferenceServerClient(f"127.0.0.1:{SERVER.grpc_port}")
        self.addCleanup(client.close)
        for algorithm in ("gzip", "deflate"):
            bomb = tensor(grpcclient, np.zeros((1, REQUEST_BYTES // 4 * 10), dtype=np.float32))
            with self.assertRaises(InferenceServerException) as raised:
                client.infer("quick", bomb, compression_algorithm=algorithm)
            self.assertEqual(raised.exception.status(), "StatusCode.OUT_OF_RANGE")
            self.assertIn("limits.request_bytes", raised.exception.message())
            answer = client.infer("quick", tensor(grpcclient, numbers(3)), compression_algorithm=algorithm)
            np.testing.assert_array_equal(answer.as_numpy("y"), numbers(3))

    def test_tritons_http_client(self):
        client = httpclient.InferenceServerClient(f"127.0.0.1:{SERVER.http_port}")
        self.addCleanup(client.close)
        array = numbers(100_000)
        for there in ("gzip", "deflate", None):
            for back in ("gzip", "deflate", None):
                answer = client.infer("quick", tensor(httpclient, array), request_compression_algorithm=there,
                                      response_compression_algorithm=back)
                np.testing.assert_array_equal(answer.as_numpy("y"), array)

    def test_answers_are_compressed_as_asked_and_only_then(self):
        import http.client
        for asked, expected in (("gzip", "gzip"), ("deflate, gzip;q=0.5", "deflate"), ("br", None), (None, None),
                                ("gzip;q=0", None), ("identity, gzip;q=0.1", None)):
            connection = http.client.HTTPConnection("127.0.0.1", SERVER.http_port, timeout=TIMEOUT)
            connection.request("POST", "/v2/models/quick/infer", infer_json(1000),
                               {"Accept-Encoding": asked} if asked else {})
            response = connection.getresponse()
            body = response.read()
            connection.close()
            self.assertEqual(response.headers["Content-Encoding"], expected, asked)
            plain = {"gzip": gzip.decompress, "deflate": zlib.decompress, None: bytes}[expected](body)
            self.assertEqual(json.loads(plain)["outputs"][0]["data"], numbers(1000)[0].tolist())

    def post(self, body, encoding):
        return unix_http(http_socket(), "POST", "/v2/models/quick/infer", body, {"Content-Encoding": encoding})

    def test_a_bomb_over_http(self):
        for encoding, compress in (("gzip", gzip.compress), ("deflate", zlib.compress)):
            status, answer = self.post(compress(bytes(REQUEST_BYTES * 20)), encoding)
            self.assertEqual(status, 413, answer)
            self.assertIn("limits.request_bytes", json.loads(answer)["error"])
            # The size of these bytes equals the limit, so the server reads them. They are not a valid request.
            self.assertEqual(self.post(compress(bytes(REQUEST_BYTES)), encoding)[0], 400)
            self.assertEqual(self.post(compress(bytes(REQUEST_BYTES + 1)), encoding)[0], 413)
            self.assertEqual(self.post(compress(infer_json(3)), encoding)[0], 200)

    def test_what_is_not_what_it_says(self):
        whole = gzip.compress(infer_json(3))
        for body, encoding in ((infer_json(3), "gzip"), (whole[:-4], "gzip"), (whole + b"x", "gzip"), (b"", "gzip"),
                               (whole, "deflate"), (whole, "br"), (whole, "gzip, gzip")):
            status, answer = self.post(body, encoding)
            self.assertEqual(status, 400, encoding)
            self.assertTrue(json.loads(answer)["error"])
        self.assertEqual(self.post(whole, "GZip")[0], 200)


class Terms(unittest.TestCase):
    """Tests priorities, timeouts and cancellation on a model that executes one request at a time."""

    def setUp(self):
        self.client = grpcclient.InferenceServerClient(f"127.0.0.1:{SERVER.grpc_port}")
        self.addCleanup(self.client.close)
        self.done = queue.SimpleQueue()
        self.until("it is idle", lambda model: model["in_flight"] + model["queue"] == 0)

    def status(self):
        models = json.loads(SERVER.command("status", "--json"))["models"]
        return next(model for model in models if model["name"] == "slow")

    def until(self, what, holds):
        until = time.monotonic() + TIMEOUT
        while not holds(self.status()):
            self.assertLess(time.monotonic(), until, f"{what}: {self.status()}")

    def ask(self, name, **terms):
        def callback(result, error):
            self.done.put((name, result, error))
        return self.client.async_infer("slow", tensor(grpcclient, numbers(2)), callback=callback, **terms)

    def occupy(self, requests):
        for number in range(requests):
            self.ask(f"before {number}", priority=1)
        self.until("all have come", lambda model: model["in_flight"] + model["queue"] == requests)

    def finished(self, requests):
        return [self.done.get(timeout=TIMEOUT) for _ in range(requests)]

    def refused(self, parameters):
        body = json.loads(infer_json(2)) | {"parameters": parameters}
        return unix_http(http_socket(), "POST", "/v2/models/slow/infer", json.dumps(body).encode())

    def test_lower_priorities_go_first(self):
        self.occupy(6)
        for place, (name, priority) in enumerate((("background", 200), ("plain", 0), ("urgent", 1))):
            self.ask(name, priority=priority)
            self.until("it has come", lambda model: model["in_flight"] + model["queue"] >= 7 + place
                       or not self.done.empty())
        finished = self.finished(9)
        self.assertFalse([error for _, _, error in finished if error])
        self.assertEqual([name for name, _, _ in finished][6:], ["urgent", "plain", "background"])

    def test_a_timeout_acts_though_the_request_runs_or_waits(self):
        before = self.status()["requests"]
        for name in ("runs", "behind", "waits"):
            self.ask(name, timeout=20_000)
        for name, _, error in self.finished(3):
            self.assertEqual(error.status(), "StatusCode.DEADLINE_EXCEEDED", name)
            self.assertIn("20000 us", error.message())
        status, answer = self.refused({"timeout": 1000})
        self.assertEqual(status, 504, answer)
        self.assertIn("1000 us", json.loads(answer)["error"])
        # The next request gets the slot when the batch ends.
        answer = self.client.infer("slow", tensor(grpcclient, numbers(2)), timeout=60_000_000)
        np.testing.assert_array_equal(answer.as_numpy("y"), numbers(2))
        # The counter increases shortly after the client has received the response.
        self.until("the answer counts", lambda model: model["requests"]["succeeded"] > before["succeeded"])
        after = self.status()["requests"]
        # The server refuses the requests that wait, because their predicted time exceeds their timeout.
        self.assertEqual({name: after[name] - before[name] for name in ("accepted", "succeeded", "failed", "rejected")},
                         {"accepted": 2, "succeeded": 1, "failed": 1, "rejected": 3})

    def executions(self):
        return self.client.get_inference_statistics("slow").model_stats[0].execution_count

    def test_deadlines_in_headers_are_kept_and_late_work_is_not_executed(self):
        executed = self.executions()
        self.occupy(3)
        began = time.monotonic()
        with self.assertRaises(InferenceServerException) as raised:
            self.client.infer("slow", tensor(grpcclient, numbers(2)), client_timeout=0.005)
        self.assertEqual(raised.exception.status(), "StatusCode.DEADLINE_EXCEEDED")
        for name, value in (("x-envoy-expected-rq-timeout-ms", "5"), ("x-request-timeout-ms", "5")):
            with self.assertRaises(InferenceServerException) as raised:
                self.client.infer("slow", tensor(grpcclient, numbers(2)), headers={name: value})
            self.assertEqual(raised.exception.status(), "StatusCode.DEADLINE_EXCEEDED", name)
            self.assertIn("5000 us", raised.exception.message())
            status, answer = unix_http(http_socket(), "POST", "/v2/models/slow/infer", infer_json(2), {name: value})
            self.assertEqual(status, 504, answer)
            self.assertIn("5000 us", json.loads(answer)["error"])
        self.assertLess(time.monotonic() - began, 3 * SLOW, "the deadlines did not wait for the batches before them")
        self.assertFalse([error for _, _, error in self.finished(3) if error])
        self.until("it is idle", lambda model: model["in_flight"] + model["queue"] == 0)
        self.assertEqual(self.executions() - executed, 3)

    def test_long_and_malformed_deadlines_in_headers(self):
        answer = self.client.infer("slow", tensor(grpcclient, numbers(2)), client_timeout=99_999)
        np.testing.assert_array_equal(answer.as_numpy("y"), numbers(2))
        for value, expected in (("99999999", 200), ("0", 200), ("soon", 400), ("-1", 400), ("1e3", 400)):
            status, answer = unix_http(http_socket(), "POST", "/v2/models/slow/infer", infer_json(2),
                                       {"x-request-timeout-ms": value})
            self.assertEqual(status, expected, answer)
        with self.assertRaises(InferenceServerException) as raised:
            self.client.infer("slow", tensor(grpcclient, numbers(2)), headers={"x-request-timeout-ms": "soon"})
        self.assertEqual(raised.exception.status(), "StatusCode.INVALID_ARGUMENT")

    def test_bad_values(self):
        for parameters in ({"timeout": -1}, {"timeout": "soon"}, {"priority": 1.5}, {"priority": 2**64}):
            status, answer = self.refused(parameters)
            self.assertEqual(status, 400, answer)
            self.assertIn("whole number", json.loads(answer)["error"])
        with self.assertRaises(InferenceServerException) as raised:
            self.client.infer("slow", tensor(grpcclient, numbers(2)), timeout=-5)
        self.assertEqual(raised.exception.status(), "StatusCode.INVALID_ARGUMENT")
        self.assertIn("timeout", raised.exception.message())

    def gone(self, count, leave):
        """Checks that requests that are cancelled in the queue count as cancelled and are never executed."""
        requests = self.status()["requests"]
        batches = self.client.get_inference_statistics("slow").model_stats[0].execution_count
        self.occupy(4)
        leave()
        self.until("they are gone", lambda model: model["requests"]["cancelled"] == requests["cancelled"] + count)
        self.assertFalse([error for name, _, error in self.finished(4) if error])
        self.client.infer("slow", tensor(grpcclient, numbers(2)))
        after = self.client.get_inference_statistics("slow").model_stats[0].execution_count
        self.assertEqual(after - batches, 5)

    def test_a_grpc_client_that_cancels(self):
        def leave():
            calls = [grpcclient.InferenceServerClient(f"127.0.0.1:{SERVER.grpc_port}").async_infer(
                "slow", tensor(grpcclient, numbers(2)), callback=lambda result, error: None) for _ in range(3)]
            self.until("they wait", lambda model: model["in_flight"] + model["queue"] >= 7)
            for call in calls:
                call.cancel()
        self.gone(3, leave)

    def test_http_clients_that_hang_up(self):
        body = infer_json(2)
        head = f"POST /v2/models/slow/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()

        def leave():
            sockets = []
            for address in (http_socket(), ("127.0.0.1", SERVER.http_port), ("127.0.0.1", SERVER.http_port)):
                sockets.append(socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET))
                sockets[-1].connect(address)
                sockets[-1].sendall(head + body)
            self.until("they wait", lambda model: model["in_flight"] + model["queue"] >= 7)
            # One connection ends with a TCP reset, and the other connections end with a FIN.
            sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            for each in sockets:
                each.close()
        self.gone(3, leave)

    def test_a_grpc_client_whose_connection_breaks(self):
        client = ("import sys, numpy, tritonclient.grpc as g\n"
                  "c = g.InferenceServerClient(sys.argv[1]); x = g.InferInput('x', [1, 2], 'FP32')\n"
                  "x.set_data_from_numpy(numpy.zeros((1, 2), numpy.float32)); c.infer('slow', [x])\n")

        self.occupy(8)  # The batches run until the client has started.
        requests = self.status()["requests"]["cancelled"]
        waiting = self.status()
        process = subprocess.Popen([sys.executable, "-c", client, f"unix://{SERVER.run_dir}/grpc.sock"])
        accepted = waiting["requests"]["accepted"]
        self.until("it has come", lambda model: model["requests"]["accepted"] > accepted)
        process.kill()
        process.wait()
        self.until("it is gone", lambda model: model["requests"]["cancelled"] == requests + 1)
        self.assertFalse([error for name, _, error in self.finished(8) if error])


class Connections(unittest.TestCase):
    def test_large_messages(self):
        """Sends messages of up to limits.request_bytes, which exceeds gRPC's default limit, and larger messages."""
        client = grpcclient.InferenceServerClient(f"unix://{SERVER.run_dir}/grpc.sock")
        self.addCleanup(client.close)
        array = numbers(REQUEST_BYTES // 4)
        np.testing.assert_array_equal(client.infer("quick", tensor(grpcclient, array)).as_numpy("y"), array)
        with self.assertRaises(InferenceServerException) as raised:
            client.infer("quick", tensor(grpcclient, numbers(REQUEST_BYTES // 4 + (64 << 10))))
        self.assertEqual(raised.exception.status(), "StatusCode.OUT_OF_RANGE")
        np.testing.assert_array_equal(client.infer("quick", tensor(grpcclient, array)).as_numpy("y"), array)

    def test_a_client_that_pings_all_the_time(self):
        options = grpcclient.KeepAliveOptions(keepalive_time_ms=10, keepalive_timeout_ms=20_000,
                                              keepalive_permit_without_calls=True, http2_max_pings_without_data=0)
        client = grpcclient.InferenceServerClient(f"127.0.0.1:{SERVER.grpc_port}", keepalive_options=options)
        self.addCleanup(client.close)
        for _ in range(3):
            self.assertIsNotNone(client.infer("slow", tensor(grpcclient, numbers(2))).as_numpy("y"))


class LoadMetrics(unittest.TestCase):
    """Tests the load reports, which load balancers can request as a part of responses."""

    def reports(self, form):
        """Returns the load reports of an HTTP response and a gRPC response."""
        headers = {} if form is None else {"endpoint-load-metrics-format": form}
        connection = http.client.HTTPConnection("127.0.0.1", SERVER.http_port, timeout=TIMEOUT)
        self.addCleanup(connection.close)
        inputs = [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0, 0, 0, 0]}]
        connection.request("POST", "/v2/models/quick/infer", json.dumps({"inputs": inputs}), headers)
        over_http = connection.getresponse()
        self.assertEqual(over_http.status, 200)
        channel = grpc.insecure_channel(f"127.0.0.1:{SERVER.grpc_port}")
        self.addCleanup(channel.close)
        request = grpcclient.service_pb2.ModelInferRequest(model_name="quick", raw_input_contents=[bytes(16)])
        request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        stub = grpcclient.service_pb2_grpc.GRPCInferenceServiceStub(channel)
        _, call = stub.ModelInfer.with_call(request, metadata=list(headers.items()))
        over_grpc = dict(call.initial_metadata())
        return over_http.getheader("endpoint-load-metrics"), over_grpc.get("endpoint-load-metrics")

    def test_only_as_asked(self):
        for form in (None, "xml", ""):
            self.assertEqual(self.reports(form), (None, None), form)
        for text in self.reports("json"):
            report = json.loads(text.removeprefix("JSON "))
            self.assertEqual(set(report), {"application_utilization", "rps_fractional", "eps", "named_metrics"})

    def test_the_load_of_the_last_second(self):
        ends = time.monotonic() + TIMEOUT
        while time.monotonic() < ends:
            loads = []
            for text in self.reports("text"):
                pairs = dict(pair.split("=") for pair in text.removeprefix("TEXT ").split(", "))
                loads.append((float(pairs["application_utilization"]), float(pairs["rps_fractional"])))
            # The loop sends at least two requests per second, and each request takes less than a second.
            if all(0 < used < 1 and rate > 1 for used, rate in loads):
                return
        self.fail(f"the reports have no load: {loads}")


class Absent(unittest.TestCase):
    """Tests that the server refuses extensions that it does not support, like a Triton server without them."""

    def test_tracing_and_logging(self):
        for module, port in ((grpcclient, SERVER.grpc_port), (httpclient, SERVER.http_port)):
            client = module.InferenceServerClient(f"127.0.0.1:{port}")
            self.addCleanup(client.close)
            for ask in (client.get_trace_settings, client.get_log_settings,
                        lambda: client.get_trace_settings("quick"), lambda: client.update_log_settings({"log_info": True}),
                        lambda: client.update_trace_settings(settings={"trace_level": ["OFF"]})):
                with self.assertRaises(InferenceServerException) as raised:
                    ask()
                self.assertIn(str(raised.exception.status()), ("503", "StatusCode.UNAVAILABLE"))
                self.assertIn("does not support", raised.exception.message())
            metadata = client.get_server_metadata()
            served = metadata["extensions"] if module is httpclient else metadata.extensions
            self.assertFalse({"trace", "logging", "cuda_shared_memory", "classification", "sequence"} & set(served))

    def test_unknown_calls(self):
        channel = grpc.insecure_channel(f"127.0.0.1:{SERVER.grpc_port}")
        self.addCleanup(channel.close)
        for call in ("/inference.GRPCInferenceService/NoSuchCall", "/no.such.Service/Call"):
            with self.assertRaises(grpc.RpcError) as raised:
                channel.unary_unary(call)(b"", timeout=TIMEOUT)
            self.assertEqual(raised.exception.code(), grpc.StatusCode.UNIMPLEMENTED)
            self.assertIn(call, raised.exception.details())


class SharedMemory(unittest.TestCase):
    """Tests tensors in shared memory over both protocols."""

    CLIENTS = ((grpcclient, "grpc_port"), (httpclient, "http_port"))

    def setUp(self):
        self.keys = []
        self.connections = []
        for module, port in self.CLIENTS:
            connection = module.InferenceServerClient(f"127.0.0.1:{getattr(SERVER, port)}")
            self.addCleanup(connection.close)
            self.connections.append((module, connection))
        self.addCleanup(self.connections[0][1].unregister_system_shared_memory)

    def region(self, key, size):
        handle = shared_memory.create_shared_memory_region(key, "/" + key, size)
        self.addCleanup(shared_memory.destroy_shared_memory_region, handle)
        return handle

    def raises(self, codes, ask):
        with self.assertRaises(InferenceServerException) as raised:
            ask()
        self.assertIn(str(raised.exception.status()), codes, raised.exception.message())
        self.assertTrue(raised.exception.message())

    def placed(self, module, name, size, offset=0):
        given = module.InferInput("x", [1, size // 4], "FP32")
        given.set_shared_memory(name, size, offset)
        return [given]

    def wanted(self, module, name, size, offset=0):
        output = module.InferRequestedOutput("y")
        output.set_shared_memory(name, size, offset)
        return [output]

    def test_inputs_and_outputs(self):
        for module, connection in self.connections:
            name = f"ss-{os.getpid()}-both"
            handle = self.region(name, 8192)
            connection.register_system_shared_memory(name, "/" + name, 8192)
            array = numbers(100)
            shared_memory.set_shared_memory_region(handle, [array])
            answer = connection.infer("quick", self.placed(module, name, 400),
                                      outputs=self.wanted(module, name, 1000, 4096))
            output = answer.get_output("y")
            self.assertIsNotNone(output)
            np.testing.assert_array_equal(
                shared_memory.get_contents_as_numpy(handle, np.float32, [1, 100], offset=4096), array)
            # The first request has its input in shared memory, and the second request has its output there.
            answer = connection.infer("quick", self.placed(module, name, 40, 4))
            np.testing.assert_array_equal(answer.as_numpy("y"), array[:, 1:11])
            connection.infer("quick", tensor(module, array * 2), outputs=self.wanted(module, name, 400))
            np.testing.assert_array_equal(
                shared_memory.get_contents_as_numpy(handle, np.float32, [1, 100]), array * 2)
            status = connection.get_system_shared_memory_status()
            names = list(status.regions) if module is grpcclient else [region["name"] for region in status]
            self.assertEqual(names, [name])
            connection.unregister_system_shared_memory(name)
            self.raises(("404", "StatusCode.NOT_FOUND"), lambda: connection.get_system_shared_memory_status(name))
            self.raises(("404", "StatusCode.NOT_FOUND"),
                        lambda: connection.infer("quick", self.placed(module, name, 400)))

    def test_there_is_no_cuda_shared_memory(self):
        for _, connection in self.connections:
            connection.unregister_cuda_shared_memory()
            connection.unregister_cuda_shared_memory("r")
            status = connection.get_cuda_shared_memory_status()
            self.assertEqual(len(getattr(status, "regions", status)), 0)
            self.raises(("404", "StatusCode.NOT_FOUND"), lambda: connection.get_cuda_shared_memory_status("r"))
            self.raises(("400", "StatusCode.INVALID_ARGUMENT"),
                        lambda: connection.register_cuda_shared_memory("r", b"AAAA", 0, 8))

    def test_what_is_no_region_or_not_within_it(self):
        invalid = ("400", "StatusCode.INVALID_ARGUMENT")
        for module, connection in self.connections:
            name = f"ss-{os.getpid()}-bounds"
            self.region(name, 4096)
            for key, size, offset in (("/" + name, 4097, 0), ("/" + name, 1, 4096), ("/" + name, 0, 0),
                                      ("/" + name, 8, 2**64 - 4), ("/../../etc/passwd", 8, 0), ("/no-such-key", 8, 0),
                                      ("", 8, 0), ("/", 8, 0), ("/etc/passwd", 8, 0)):
                self.raises(invalid, lambda: connection.register_system_shared_memory("r", key, size, offset))
            connection.register_system_shared_memory(name, name, 4096)
            self.raises(("400", "StatusCode.ALREADY_EXISTS"),
                        lambda: connection.register_system_shared_memory(name, name, 4096))
            for size, offset in ((4100, 0), (4, 4096), (8, 2**63 - 4)):
                self.raises(invalid, lambda: connection.infer("quick", self.placed(module, name, size, offset)))
                self.raises(invalid, lambda: connection.infer("quick", tensor(module, numbers(1)),
                                                              outputs=self.wanted(module, name, size, offset)))
            # The output has eight bytes, but only four bytes are reserved.
            self.raises(invalid, lambda: connection.infer("quick", tensor(module, numbers(2)),
                                                          outputs=self.wanted(module, name, 4)))
            # The region has 40 bytes, but the shape needs 44 bytes.
            given = self.placed(module, name, 40)
            given[0].set_shape([1, 11])
            self.raises(invalid, lambda: connection.infer("quick", given))
            connection.unregister_system_shared_memory(name)

    def test_memory_that_shrinks_and_grows_all_the_time(self):
        """Shrinks the file while the server reads it. If the server mapped the file, SIGBUS would kill the server."""
        name = f"ss-{os.getpid()}-shrinks"
        self.region(name, 1 << 20)
        path = f"/dev/shm/{name}"
        over = threading.Event()

        def wobble():
            while not over.is_set():
                for size in (0, 4096, 500_000, 1 << 20):
                    os.truncate(path, size)

        _, connection = self.connections[0]
        connection.register_system_shared_memory(name, name, 1 << 20)
        os.truncate(path, 4096)
        self.raises(("StatusCode.INVALID_ARGUMENT",),
                    lambda: connection.infer("quick", self.placed(grpcclient, name, 1 << 20)))
        self.raises(("StatusCode.INVALID_ARGUMENT",),
                    lambda: connection.infer("quick", tensor(grpcclient, numbers(2)),
                                             outputs=self.wanted(grpcclient, name, 8, 1 << 19)))
        self.assertEqual(os.stat(path).st_size, 4096, "it is not ours to grow")
        shrinking = threading.Thread(target=wobble)
        shrinking.start()
        try:
            for _ in range(200):
                try:
                    connection.infer("quick", self.placed(grpcclient, name, 1 << 20),
                                     outputs=self.wanted(grpcclient, name, 1 << 20))
                except InferenceServerException as refused:
                    self.assertEqual(refused.status(), "StatusCode.INVALID_ARGUMENT")
        finally:
            over.set()
            shrinking.join()
        answer = connection.infer("quick", tensor(grpcclient, numbers(3)))
        np.testing.assert_array_equal(answer.as_numpy("y"), numbers(3))

    def test_a_short_request_cannot_have_a_region_read_over_and_over(self):
        name = f"ss-{os.getpid()}-often"
        self.region(name, REQUEST_BYTES)
        _, connection = self.connections[1]
        connection.register_system_shared_memory(name, name, REQUEST_BYTES)
        place = {"shared_memory_region": name, "shared_memory_byte_size": REQUEST_BYTES}
        one = {"name": "x", "datatype": "FP32", "shape": [1, REQUEST_BYTES // 4], "parameters": place}
        status, answer = unix_http(http_socket(), "POST", "/v2/models/quick/infer",
                                   json.dumps({"inputs": [one] * 5000}).encode())
        self.assertEqual(status, 413, answer)
        out = [{"name": "y", "parameters": place}]
        status, answer = unix_http(http_socket(), "POST", "/v2/models/quick/infer",
                                   json.dumps({"inputs": [one], "outputs": out}).encode())
        self.assertEqual(status, 200, answer)
        self.assertEqual(set(json.loads(answer)["outputs"][0]), {"name", "datatype", "shape"})

    def test_paths_of_http(self):
        for method, path, body, expected in (
                ("GET", "/v2/systemsharedmemory/status", None, 200),
                ("GET", "/v2/systemsharedmemory/region/x/status", None, 404),
                ("POST", "/v2/systemsharedmemory/region/x/unregister", None, 200),
                ("POST", "/v2/systemsharedmemory/unregister", None, 200),
                ("POST", "/v2/systemsharedmemory/region/x/register", b"{}", 400),
                ("POST", "/v2/systemsharedmemory/region/x/register", b'{"key":"k","byte_size":-1}', 400),
                ("POST", "/v2/systemsharedmemory/register", b"{}", 404),
                ("GET", "/v2/systemsharedmemory/region/x/register", None, 405),
                ("POST", "/v2/systemsharedmemory/status", b"", 405)):
            self.assertEqual(unix_http(http_socket(), method, path, body)[0], expected, path)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    BINARY = sys.argv.pop(1)
    unittest.main()
