#!/usr/bin/env python3
"""Tests a running server with Triton's unmodified clients.

Usage: outside_clients.py SHADOWSLICE_BINARY [unittest arguments]

The script makes the models, and compares the responses with direct calls of ONNX Runtime. It also
sends invalid requests over both protocols. The server must refuse each invalid request with the
protocol's code, and must still answer a valid request on the same connection.
"""

import json
import os
import signal
import sys
import time
import unittest

import ml_dtypes
import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

import models
from server import Server, raw_exchange, unix_http

SERVER = None


def setUpModule():
    global SERVER
    SERVER = Server(sys.argv[0], models.make)


def tearDownModule():
    SERVER.stop()


def inputs(module, arrays, binary=None):
    """Returns the tensors of a request, in the form that one of the two client modules needs."""
    tensors = []
    for name, (datatype, array) in arrays.items():
        tensor = module.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array, **({} if binary is None else {"binary_data": binary}))
        tensors.append(tensor)
    return tensors


class Protocol:
    """Tests for both protocols. Each subclass connects to the server over one protocol."""

    def client(self):
        raise NotImplementedError

    def setUp(self):
        self.connection = self.client()
        self.addCleanup(self.connection.close)

    def good_request(self):
        """Checks that a valid request succeeds after the previous, invalid requests."""
        self.check("dynamic", models.dynamic_input(3, 5))

    def check(self, model, arrays, **options):
        answer = self.connection.infer(model, inputs(self.module, arrays, **options), request_id="an-id")
        response = answer.get_response()
        self.assertEqual(response["id"] if isinstance(response, dict) else response.id, "an-id")
        for name, expected in models.direct_answer(SERVER.folder, model, arrays).items():
            with self.subTest(model=model, output=name):
                got = answer.as_numpy(name)
                self.assertIsNotNone(got, "the output is missing")
                self.assertEqual(got.shape, expected.shape)
                if expected.dtype == np.object_:
                    self.assertEqual(got.tolist(), expected.tolist())
                else:
                    self.assertEqual(got.dtype, expected.dtype)
                    np.testing.assert_allclose(got, expected, rtol=1e-6)
        return answer

    def refused(self, codes, model, arrays):
        with self.assertRaises(InferenceServerException) as raised:
            self.connection.infer(model, inputs(self.module, arrays))
        self.assertIn(str(raised.exception.status()), codes, raised.exception.message())
        self.assertTrue(raised.exception.message(), "a refusal says why")
        self.good_request()

    def test_server_and_models_are_described(self):
        self.assertTrue(self.connection.is_server_live())
        self.assertTrue(self.connection.is_server_ready())
        self.assertTrue(self.connection.is_model_ready("types"))
        server = self.described(self.connection.get_server_metadata())
        self.assertIn("binary_tensor_data", server["extensions"])
        types = self.described(self.connection.get_model_metadata("types"))
        described = {tensor["name"]: tensor["datatype"] for tensor in types["inputs"]}
        self.assertEqual(described, {f"in_{t}": t for t in models.PLAIN})
        self.assertEqual([int(size) for size in types["inputs"][0]["shape"]], [-1, 3])
        config = self.described(self.connection.get_model_config("dynamic"))
        config = config.get("config", config)
        self.assertEqual(int(config["max_batch_size"]), 8)
        self.assertEqual([int(size) for size in config["input"][0]["dims"]], [-1])

    def statistics(self, model, version=""):
        """Returns a model's statistics. Converts numbers from text."""
        answer = self.described(self.connection.get_inference_statistics(model, version))
        [statistics] = answer["model_stats"]

        def number(value):
            if isinstance(value, dict):
                return {key: number(value) for key, value in value.items()}
            if isinstance(value, list):
                return [number(value) for value in value]
            return int(value) if isinstance(value, str) and value.isdigit() else value

        return number(statistics) | {"version": statistics["version"]}

    def test_statistics(self):
        """Compares the statistics before and after some requests, as perf_analyzer does."""
        extensions = self.described(self.connection.get_server_metadata())["extensions"]
        self.assertIn("statistics", extensions)
        before = self.statistics("dynamic")
        began = time.time()
        for rows in (1, 1, 4):
            self.check("dynamic", models.dynamic_input(rows, 3))
        self.refused(self.invalid, "dynamic", models.dynamic_input(9, 2))  # This also sends a valid request of three rows.
        after = self.statistics("dynamic", "1")
        self.assertEqual((after["name"], after["version"]), ("dynamic", "1"))
        self.assertEqual(after["inference_count"] - before["inference_count"], 9)
        self.assertEqual(after["execution_count"] - before["execution_count"], 4)
        self.assertGreaterEqual(after["last_inference"], int(began * 1000))

        def grown(step, field):
            return after["inference_stats"][step][field] - before["inference_stats"][step][field]

        steps = ("queue", "compute_input", "compute_infer", "compute_output")
        for step in ("success",) + steps:
            self.assertEqual(grown(step, "count"), 4, step)
        self.assertEqual(grown("fail", "count"), 0)
        self.assertGreater(grown("compute_infer", "ns"), 0)
        # The sum of the steps' durations is exactly the duration of the request.
        self.assertEqual(sum(grown(step, "ns") for step in steps), grown("success", "ns"))
        sizes = {batch["batch_size"]: batch for batch in after["batch_stats"]}
        was = {batch["batch_size"]: batch for batch in before["batch_stats"]}
        for rows, batches in ((1, 2), (3, 1), (4, 1)):
            old = was.get(rows, {}).get("compute_infer", {}).get("count", 0)
            self.assertEqual(sizes[rows]["compute_infer"]["count"] - old, batches)
        everything = self.described(self.connection.get_inference_statistics())["model_stats"]
        self.assertEqual([model["name"] for model in everything], sorted(model["name"] for model in everything))
        self.assertLess({"dynamic", "types"}, {model["name"] for model in everything})

    def test_shared_memory_is_off_unless_it_is_allowed(self):
        self.assertNotIn("system_shared_memory", self.described(self.connection.get_server_metadata())["extensions"])
        given = self.module.InferInput("x", [1, 1], "FP32")
        given.set_shared_memory("r", 4)
        for ask in (lambda: self.connection.register_system_shared_memory("r", "/r", 4),
                    self.connection.get_system_shared_memory_status,
                    self.connection.unregister_system_shared_memory,
                    lambda: self.connection.infer("dynamic", [given])):
            with self.assertRaises(InferenceServerException) as raised:
                ask()
            self.assertIn(str(raised.exception.status()), ("501", "StatusCode.UNIMPLEMENTED"))
            self.assertIn("limits.shared_memory", raised.exception.message())
        self.good_request()

    def test_versions(self):
        """Checks that requests may name the only version, and that other versions are not found."""
        self.assertEqual(self.described(self.connection.get_model_metadata("dynamic"))["versions"], ["1"])
        self.assertTrue(self.connection.is_model_ready("dynamic", "1"))
        tensors = inputs(self.module, models.dynamic_input(1, 2))
        self.assertIsNotNone(self.connection.infer("dynamic", tensors, model_version="1").as_numpy("total"))
        asks = (lambda: self.connection.infer("dynamic", tensors, model_version="2"),
                lambda: self.connection.get_model_metadata("dynamic", "2"),
                lambda: self.connection.get_model_config("dynamic", "2"),
                lambda: self.connection.get_inference_statistics("dynamic", "2"))
        for ask in asks:
            with self.assertRaises(InferenceServerException) as raised:
                ask()
            self.assertIn(str(raised.exception.status()), self.not_found)
        self.good_request()

    def test_every_plain_datatype(self):
        for rows in (1, 4):
            self.check("types", models.plain_input(rows))

    def test_text(self):
        texts = [["", "a", "\u00e9\u00e8"], ["x" * 3000, "\x00\x01", "end"]]
        array = np.array([[text.encode() for text in row] for row in texts], dtype=np.object_)
        self.check("text", {"words": ("BYTES", array)})

    def test_bf16(self):
        array = np.array([[1.0, -2.5, 0.15625]], dtype=ml_dtypes.bfloat16)
        answer = self.connection.infer("brain", inputs(self.module, {"x": ("BF16", array)}))
        self.assertEqual(answer.as_numpy("y").tolist(), array.tolist())

    def test_dynamic_axes(self):
        for rows, columns in ((1, 1), (2, 7), (8, 3), (1, 2000)):
            self.check("dynamic", models.dynamic_input(rows, columns))

    def test_a_model_without_a_batch_axis(self):
        self.check("unbatched", models.unbatched_input())

    def test_one_output_of_several(self):
        wanted = [self.module.InferRequestedOutput("total")]
        arrays = models.dynamic_input(2, 3)
        answer = self.connection.infer("dynamic", inputs(self.module, arrays), outputs=wanted)
        np.testing.assert_allclose(answer.as_numpy("total"), arrays["x"][1].sum(axis=1), rtol=1e-6)
        self.assertIsNone(answer.as_numpy("doubled"))

    def test_an_unknown_model(self):
        self.refused(self.not_found, "no-such-model", models.dynamic_input(1, 1))

    def test_a_wrong_shape(self):
        wrong = {name: (datatype, np.ascontiguousarray(array[:, :2]))
                 for name, (datatype, array) in models.plain_input(2).items()}
        self.refused(self.invalid, "types", wrong)
        _, flat = models.dynamic_input(2, 3)["x"]
        self.refused(self.invalid, "dynamic", {"x": ("FP32", flat.reshape(-1))})

    def test_a_batch_beyond_the_limit(self):
        self.refused(self.invalid, "dynamic", models.dynamic_input(9, 2))

    def test_a_wrong_datatype(self):
        self.refused(self.invalid, "dynamic", {"x": ("INT32", np.ones((1, 2), dtype=np.int32))})

    def test_a_missing_and_an_unknown_input(self):
        arrays = models.plain_input(1)
        arrays.pop("in_FP32")
        self.refused(self.invalid, "types", arrays)
        arrays = models.dynamic_input(1, 1)
        self.refused(self.invalid, "dynamic", arrays | {"z": arrays["x"]})

    def test_an_unknown_output(self):
        wanted = [self.module.InferRequestedOutput("no-such-output")]
        with self.assertRaises(InferenceServerException) as raised:
            self.connection.infer("dynamic", inputs(self.module, models.dynamic_input(1, 1)), outputs=wanted)
        self.assertIn(str(raised.exception.status()), self.invalid)
        self.good_request()


class Grpc(Protocol):
    module = grpcclient
    invalid = ("StatusCode.INVALID_ARGUMENT",)
    not_found = ("StatusCode.NOT_FOUND",)

    def described(self, message):
        from google.protobuf.json_format import MessageToDict
        return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)

    def test_sizes_and_shapes_that_lie(self):
        for shape in ([1, 4], [-1, 3], [2**40, 2**40], [2**62, 4], [0, 3]):
            with self.subTest(shape=shape):
                tensor = inputs(grpcclient, models.dynamic_input(1, 3))[0]
                tensor.set_shape(shape)
                with self.assertRaises(InferenceServerException) as raised:
                    self.connection.infer("dynamic", [tensor])
                self.assertEqual(raised.exception.status(), "StatusCode.INVALID_ARGUMENT")
                self.good_request()

    def test_many_at_once(self):
        import queue
        answers = queue.SimpleQueue()
        for n in range(64):
            tensor = inputs(grpcclient, {"x": ("FP32", np.full((1, 1 + n % 3), n, dtype=np.float32))})
            self.connection.async_infer("dynamic", tensor, request_id=str(n),
                                        callback=lambda result, error: answers.put((result, error)))
        for _ in range(64):
            result, error = answers.get(timeout=30)
            self.assertIsNone(error)
            n = int(result.get_response().id)
            self.assertEqual(result.as_numpy("total").tolist(), [n * (1 + n % 3)])


class GrpcOnAUnixSocket(Grpc, unittest.TestCase):
    def client(self):
        return grpcclient.InferenceServerClient(f"unix://{SERVER.run_dir}/grpc.sock")


class GrpcOnAUnixSocketWithOneSlash(Grpc, unittest.TestCase):
    def client(self):
        return grpcclient.InferenceServerClient(f"unix:{SERVER.run_dir}/grpc.sock")


class GrpcOnTcp(Grpc, unittest.TestCase):
    def client(self):
        return grpcclient.InferenceServerClient(f"127.0.0.1:{SERVER.grpc_port}")

    def test_garbage(self):
        for garbage in (b"\x00" * 64, b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096):
            raw_exchange(("127.0.0.1", SERVER.grpc_port), garbage)
            raw_exchange(f"{SERVER.run_dir}/grpc.sock", garbage)
            self.good_request()


class Changes(unittest.TestCase):
    """Tests state that must not change when a model's worker is replaced."""

    def test_statistics_go_on_after_a_hand_over_and_a_death(self):
        client = grpcclient.InferenceServerClient(f"unix://{SERVER.run_dir}/grpc.sock")
        self.addCleanup(client.close)

        def ask():
            client.infer("text", inputs(grpcclient, {"words": ("BYTES", np.full((2, 3), b"x", dtype=np.object_))}))
            stats = client.get_inference_statistics("text").model_stats[0]
            return np.array([stats.inference_count, stats.execution_count, stats.inference_stats.success.count])

        first = ask()
        was = SERVER.worker("text")
        SERVER.command("resize", "text", "50%")
        now = SERVER.worker("text")
        self.assertNotEqual(now, was)
        np.testing.assert_array_equal(ask() - first, [2, 1, 1])
        os.kill(now, signal.SIGKILL)
        np.testing.assert_array_equal(ask() - first, [4, 2, 2])
        self.assertEqual(client.get_inference_statistics("text").model_stats[0].inference_stats.fail.count, 0)


class HttpOnTcp(Protocol, unittest.TestCase):
    module = httpclient
    invalid = ("400",)
    not_found = ("404",)

    def client(self):
        return httpclient.InferenceServerClient(f"127.0.0.1:{SERVER.http_port}", concurrency=4)

    def described(self, answer):
        return answer

    def test_json_tensors(self):
        with_json_form = {name: pair for name, pair in models.plain_input(2).items() if pair[0] != "FP16"}
        self.assertEqual(len(with_json_form), len(models.PLAIN) - 1)
        # FP16 has no JSON form, so the tensor of this type is binary.
        tensors = inputs(httpclient, with_json_form, binary=False)
        tensors += inputs(httpclient, {"in_FP16": models.plain_input(2)["in_FP16"]}, binary=True)
        wanted = [httpclient.InferRequestedOutput(f"out_{t}", binary_data=t == "FP16") for t in models.PLAIN]
        answer = self.connection.infer("types", tensors, outputs=wanted)
        for name, (_, array) in models.plain_input(2).items():
            np.testing.assert_array_equal(answer.as_numpy(name.replace("in_", "out_")), array)

    def test_on_the_unix_socket(self):
        socket = f"{SERVER.run_dir}/http.sock"
        self.assertEqual(unix_http(socket, "GET", "/v2/health/ready")[0], 200)
        body = {"id": "7", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [[1, 2.5]]}]}
        status, answer = unix_http(socket, "POST", "/v2/models/dynamic/infer", json.dumps(body).encode())
        self.assertEqual(status, 200, answer)
        outputs = {output["name"]: output["data"] for output in json.loads(answer)["outputs"]}
        self.assertEqual((json.loads(answer)["id"], outputs), ("7", {"total": [3.5], "doubled": [2.0, 5.0]}))

    def test_bodies_that_are_no_request(self):
        def tensor(**change):
            plain = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
            return json.dumps({"inputs": [plain | change]}).encode()

        binary = {"data": None, "parameters": {"binary_data_size": 8}}
        cases = {
            "nothing": (b"", {}),
            "no JSON": (b"{", {}),
            "another JSON": (b"[1, 2]", {}),
            "deep nesting": (b'{"inputs":' + b"[" * 100_000, {}),
            "a negative dimension": (tensor(shape=[-1, 2]), {}),
            "a huge dimension": (tensor(shape=[2**62, 4]), {}),
            "fewer elements": (tensor(data=[1]), {}),
            "more elements": (tensor(data=[1, 2, 3]), {}),
            "text for numbers": (tensor(data=["a", "b"]), {}),
            "no such datatype": (tensor(datatype="FP31"), {}),
            "a header beyond the body": (tensor(), {"Inference-Header-Content-Length": "9999"}),
            "a negative header": (tensor(), {"Inference-Header-Content-Length": "-1"}),
            "no binary data": (tensor(**binary), {"Inference-Header-Content-Length": str(len(tensor(**binary)))}),
            "other binary data": (tensor(**binary) + b"\0" * 7,
                                  {"Inference-Header-Content-Length": str(len(tensor(**binary)))}),
        }
        for what, (body, headers) in cases.items():
            with self.subTest(what):
                status, answer = unix_http(f"{SERVER.run_dir}/http.sock", "POST", "/v2/models/dynamic/infer",
                                           body, headers)
                self.assertEqual(status, 400, answer)
                self.assertTrue(json.loads(answer)["error"])
                self.good_request()

    def test_a_body_larger_than_the_limit_is_refused_before_it_is_sent(self):
        head = (b"POST /v2/models/dynamic/infer HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Length: 999999999999\r\n\r\n{")
        answer = raw_exchange(f"{SERVER.run_dir}/http.sock", head)
        self.assertRegex(answer.split(b"\r\n")[0], rb"HTTP/1.1 4\d\d")
        self.good_request()

    def test_garbage(self):
        for garbage in (b"\x00" * 64, b"nonsense\r\n\r\n", b"GET /" + b"a" * 100_000, b"POST / HTTP/1.1\r\n"):
            raw_exchange(("127.0.0.1", SERVER.http_port), garbage)
            raw_exchange(f"{SERVER.run_dir}/http.sock", garbage)
            self.good_request()

    def test_unknown_paths_and_methods(self):
        socket = f"{SERVER.run_dir}/http.sock"
        self.assertEqual(unix_http(socket, "GET", "/no/such/path")[0], 404)
        self.assertIn(unix_http(socket, "DELETE", "/v2")[0], (404, 405))
        self.assertEqual(unix_http(socket, "GET", "/v2/models/no-such-model")[0], 404)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.argv.pop(0)
    unittest.main(argv=sys.argv)
