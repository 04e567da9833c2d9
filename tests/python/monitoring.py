#!/usr/bin/env python3
"""Tests the alert rules and the Grafana dashboard with promtool and the metrics of a supervisor.

Usage: monitoring.py SHADOWSLICE_BINARY PROMTOOL [unittest arguments]
"""

import json
import re
import subprocess
import sys
import tempfile
import unittest
import urllib.request
from pathlib import Path

import numpy as np
import tritonclient.http as httpclient
from onnx import TensorProto

import models
from server import Server, free_port

FOLDER = Path(__file__).parents[2] / "packaging/monitoring"
ALERTS, BOARD = FOLDER / "alerts.yaml", FOLDER / "grafana.json"
# These metrics exist only for a GPU with NVML.
ON_A_GPU = {f"shadowslice_gpu_{what}" for what in ["memory_used_bytes", "memory_total_bytes", "utilization", "xid_errors_total"]}
# These metrics have no value in this test, which has no access log, no TLS and no waiting workers.
ELSEWHERE = {f"shadowslice_{what}" for what in
             ["access_log_lines_dropped_total", "certificate_expiry_timestamp_seconds", "workers_waiting"]}
VARIABLES = {"$__rate_interval": "5m", "$instance": ".*", "$model": ".*"}
BINARY, PROMTOOL = "", ""


def expressions():
    """Yields the expressions of all panels of the dashboard. Replaces Grafana's variables."""
    for panel in json.loads(BOARD.read_text())["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            yield panel["title"], expression


class Monitoring(unittest.TestCase):
    def promtool(self, *arguments, text=None):
        ran = subprocess.run([PROMTOOL, *arguments], cwd=FOLDER, input=text, text=True, timeout=60,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.assertEqual(ran.returncode, 0, ran.stdout)

    def test_the_alerts_fire_when_they_should(self):
        self.promtool("check", "rules", ALERTS.name)
        self.promtool("test", "rules", "alerts.test.yaml")

    def test_costs_are_divided_and_opencost_finds_its_series(self):
        self.promtool("check", "rules", "--lint=none", "costs.yaml")
        self.promtool("test", "rules", "costs.test.yaml")

    def test_every_panel_asks_what_prometheus_understands(self):
        rules = [{"record": "panel", "expr": expression} for _, expression in expressions()]
        self.assertGreater(len(rules), 10)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump({"groups": [{"name": "board", "rules": rules}]}, file)
            file.flush()
            self.promtool("check", "rules", "--lint=none", file.name)

    def test_panels_lie_beside_each_other(self):
        taken = set()
        for panel in json.loads(BOARD.read_text())["panels"]:
            at = panel["gridPos"]
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            self.assertTrue(taken.isdisjoint(cells) and at["x"] + at["w"] <= 24, panel["title"])
            taken |= cells

    def test_every_metric_that_is_asked_for_is_there(self):
        port = free_port()
        server = Server(BINARY, make, metrics=f'["127.0.0.1:{port}"]')
        self.addCleanup(server.stop)
        client = httpclient.InferenceServerClient(f"localhost:{server.http_port}")
        self.addCleanup(client.close)
        tensor = httpclient.InferInput("x", [1, 3], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 3), np.float32))
        client.infer("m", [tensor])
        text = scraped(port)
        there = set(re.findall(r"^([a-z_]+)[{ ]", text, re.M)) | ON_A_GPU
        self.assertEqual(ELSEWHERE - set(re.findall(r"^# TYPE ([a-z_]+)", text, re.M)), set())
        there |= ELSEWHERE
        used = ALERTS.read_text() + " ".join(expression for _, expression in expressions())
        names = set(re.findall(r"\b(?:shadowslice|process)_[a-z_]+[a-z]\b(?=[\s{\[)]|$)", used))
        self.assertGreater(len(names), 15)
        self.assertEqual(names - there, set())

    def test_what_an_operator_did_can_be_seen(self):
        port = free_port()
        server = Server(BINARY, make, metrics=f'["127.0.0.1:{port}"]')
        self.addCleanup(server.stop)
        seen = {"shadowslice_last_reload_success": "1", 'shadowslice_model_drained{model="m",gpu="0"}': "0"}
        for name, value in seen.items():
            self.assertIn(f"\n{name} {value}\n", scraped(port))
        server.command("drain", "m")
        config = server.folder / "config.yaml"
        text = config.read_text()
        config.write_text(text + "nonsense: 1\n")
        with self.assertRaises(subprocess.CalledProcessError):
            server.command("reload")
        for name in seen:
            self.assertNotIn(f"\n{name} {seen[name]}\n", scraped(port))
        config.write_text(text)
        server.command("reload")
        server.command("undrain", "m")
        for name, value in seen.items():
            self.assertIn(f"\n{name} {value}\n", scraped(port))


def scraped(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def make(folder):
    models.identity(folder, "m", [("x", "y", TensorProto.FLOAT)])
    return {"m": "batch: {max: 8}"}


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    BINARY, PROMTOOL = sys.argv[1:3]
    del sys.argv[1:3]
    unittest.main()
