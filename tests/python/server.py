"""A server for outside clients, which runs the real binary in a temporary folder."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

READY_TIMEOUT = 60  # seconds
STOP_TIMEOUT = 30  # seconds


class Server:
    """A server that runs until `stop`.

    `make` writes the models to a folder, and returns each model's keys in the configuration. `more` contains further
    lines of the configuration.
    """

    def __init__(self, binary, make, more="", wait=True, metrics="[]"):
        self.more, self.listen_metrics = more, metrics
        self.binary = os.path.abspath(binary)
        self.folder = Path(tempfile.mkdtemp(prefix="ss-", dir="/tmp"))
        self.run_dir = self.folder / "run"
        self.http_port, self.grpc_port = free_port(), free_port()
        config = self.folder / "config.yaml"
        config.write_text(self.configuration(make(self.folder)))
        self.log = open(self.folder / "log", "w+")
        self.process = subprocess.Popen([self.binary, "serve", str(config)], stderr=self.log,
                                        env=os.environ | {"RUNTIME_DIRECTORY": str(self.run_dir)})
        try:
            if wait:
                self.wait_ready()
        except BaseException:
            self.process.kill()
            raise

    def configuration(self, models):
        lines = ["listen:",
                 f'  http: ["unix:http.sock", "127.0.0.1:{self.http_port}"]',
                 f'  grpc: ["unix:grpc.sock", "127.0.0.1:{self.grpc_port}"]',
                 f"  metrics: {self.listen_metrics}",
                 "gpus: [{device: emulated, sms: 132}]",
                 self.more,
                 "models:"]
        lines += [f"  - {{path: {name}.onnx, slo: 100ms, {rest}}}" for name, rest in models.items()]
        return "\n".join(lines) + "\n"

    def wait_ready(self):
        client = grpcclient.InferenceServerClient(f"127.0.0.1:{self.grpc_port}")
        deadline = time.monotonic() + READY_TIMEOUT
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.log_tail()}")
            try:
                if client.is_server_ready():
                    client.close()
                    return
            except InferenceServerException:
                pass
            time.sleep(0.1)
        raise RuntimeError(f"the server was not ready within {READY_TIMEOUT} s:\n{self.log_tail()}")

    def command(self, *arguments):
        """Runs a `shadowslice` command for this server. Returns the output of the command."""
        return subprocess.run([self.binary, *arguments, "--run-dir", str(self.run_dir)], check=True, text=True,
                              stdout=subprocess.PIPE, timeout=60).stdout

    def worker(self, model):
        """Returns the PID of the worker that serves the model."""
        models = json.loads(self.command("status", "--json"))["models"]
        workers = next(each["workers"] for each in models if each["name"] == model)
        return next((worker["pid"] for worker in workers if worker["phase"] == "serving"), None)

    def log_tail(self):
        self.log.seek(0)
        return self.log.read()[-5000:]

    def stop(self):
        """Stops the server, which must exit with 0 and leave no sockets behind."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(STOP_TIMEOUT)
        left = [path.name for path in self.run_dir.rglob("*") if path.is_socket()]
        if status != 0 or left:
            raise RuntimeError(f"the server ended with {status}, sockets left: {left}:\n{self.log_tail()}")
        self.log.close()
        shutil.rmtree(self.folder)


def wait_until(happened):
    deadline = time.monotonic() + READY_TIMEOUT
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the condition was not met within {READY_TIMEOUT} s")
        time.sleep(0.02)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def raw_exchange(address, sent):
    """Sends bytes and closes the sending side. Returns all bytes received until the end or until 2 s without data."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    received = b""
    with socket.socket(family) as connection:
        connection.settimeout(2)
        connection.connect(address)
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(65536):
                received += chunk
        except (TimeoutError, ConnectionError, OSError):
            pass
    return received


def unix_http(path, method, target, body=None, headers=None):
    """Sends an HTTP request over a Unix socket. Returns the status and body of the response."""
    connection = http.client.HTTPConnection("localhost", timeout=30)
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.connect(path)
        connection.request(method, target, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
