#!/usr/bin/env python3
"""Tests the protocol's model repository with Triton's clients over both protocols.

Usage: model_repository.py SHADOWSLICE_BINARY [unittest arguments]
"""

import json
import sys
import threading
import unittest

import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

import models
from server import Server, wait_until

SERVER = None


def setUpModule():
    global SERVER
    SERVER = Server(sys.argv[0], models.make, "model_control: explicit")


def tearDownModule():
    SERVER.stop()


class Repository:
    """Tests for both protocols. Each subclass connects to the server over one protocol."""

    def setUp(self):
        self.connection = self.client()
        self.addCleanup(self.connection.close)

    def infer(self, connection=None):
        (name, (datatype, array)), = models.dynamic_input(2, 5).items()
        tensor = self.module.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        return (connection or self.connection).infer("dynamic", [tensor])

    def states(self):
        return dict(self.index())

    def test_unloaded_and_loaded_again(self):
        self.assertEqual(self.states()["dynamic"], "READY")
        self.connection.unload_model("dynamic")
        with self.assertRaises(InferenceServerException):
            self.infer()
        self.assertFalse(self.connection.is_model_ready("dynamic"))
        self.assertFalse(self.connection.is_model_ready("absent"))
        wait_until(lambda: self.states()["dynamic"] == "UNAVAILABLE")
        self.assertEqual(self.states()["unbatched"], "READY")
        self.connection.load_model("dynamic")
        self.assertEqual(self.states()["dynamic"], "READY")
        self.assertTrue(self.connection.is_model_ready("dynamic"))
        self.infer()

    def test_loaded_otherwise_while_it_is_asked(self):
        stop, failed = threading.Event(), []

        def ask():
            connection = self.client()
            while not stop.is_set():
                try:
                    self.infer(connection)
                except InferenceServerException as error:
                    failed.append(error)
            connection.close()

        asking = [threading.Thread(target=ask) for _ in range(4)]
        for thread in asking:
            thread.start()
        try:
            for changes in ({"share": "30%"}, {"slo": "90ms"}, {"share": {"initial": "40%"}, "slo": "80ms"}):
                self.connection.load_model("dynamic", config=json.dumps(changes))
            self.connection.load_model("dynamic")
        finally:
            stop.set()
            for thread in asking:
                thread.join()
        self.assertEqual(failed, [])

    def test_what_cannot_be_is_refused(self):
        for model, options in (("absent", {}), ("dynamic", {"config": '{"path": "/etc/passwd"}'}),
                               ("dynamic", {"config": "garbage"}),
                               ("dynamic", {"config": '{"batch": {"max": 4}}'}),
                               ("dynamic", {"config": "{}", "files": {"file:1/model.onnx": b"bytes"}})):
            with self.assertRaises(InferenceServerException, msg=str((model, options))):
                self.connection.load_model(model, **options)
        with self.assertRaises(InferenceServerException):
            self.connection.unload_model("absent")
        self.infer()


class Grpc(Repository, unittest.TestCase):
    module = grpcclient

    def client(self):
        return grpcclient.InferenceServerClient(f"127.0.0.1:{SERVER.grpc_port}")

    def index(self):
        return [(model.name, model.state) for model in self.connection.get_model_repository_index().models]


class Http(Repository, unittest.TestCase):
    module = httpclient

    def client(self):
        return httpclient.InferenceServerClient(f"127.0.0.1:{SERVER.http_port}", connection_timeout=60,
                                                network_timeout=60)

    def index(self):
        return [(model["name"], model["state"]) for model in self.connection.get_model_repository_index()]


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.argv.pop(0)
    unittest.main(argv=sys.argv)
