#!/usr/bin/env python3
"""Tests versions of models, and rollouts of new versions, under requests from Triton's clients.

Usage: rollouts.py SHADOWSLICE_BINARY [unittest arguments]
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import unittest

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from server import Server, unix_http, wait_until

# A version multiplies its input by `FACTOR`, which takes `SECONDS`. `FAULT` describes what is wrong with it.
VERSION = """
import os, time
import numpy as np
from shadowslice import Tensor

FACTOR, SECONDS, FAULT = {factor}, {seconds}, {fault!r}

class Version:
    inputs = {{"x": Tensor("FP32", [-1, 4])}}
    outputs = {{"y": Tensor("FP32", [-1, 5 if FAULT == "shape" else 4])}}

    def infer(self, batch):
        x = batch["x"]
        time.sleep(SECONDS)
        # The proof's inputs are smaller.
        if FAULT == "crash" and x.max() > 10:
            os._exit(3)
        if FAULT == "raise" and x.max() > 10:
            raise ValueError("too large")
        y = x * FACTOR
        if FAULT == "permuted":
            y = y[:, ::-1]
        return {{"y": np.pad(y, ((0, 0), (0, 1))) if FAULT == "shape" else np.ascontiguousarray(y)}}
"""

PROFILE = """
source: {kind: illustrative}
memory: {context: 100Mi, weights: 100Mi, activations: 10Mi}
start: {process: 20ms, load: 20ms, warm: 10ms}
execution_ms:
  sms: [66]
  1: [1.0]
"""

SECONDS = 0.003
CLIENTS = 4


def write(folder, name, factor=2.0, seconds=SECONDS, fault=""):
    """Writes a version to a folder. The folder appears when it is complete."""
    new = folder / f".{name.replace('/', '-')}"
    new.mkdir()
    (new / "model.py").write_text(VERSION.format(factor=factor, seconds=seconds, fault=fault))
    (folder / name).parent.mkdir(exist_ok=True)
    new.rename(folder / name)
    return folder / name


class Load:
    """Clients that send requests without a pause. Each answer must come from one of the `factors`."""

    def __init__(self, server, factors=(2.0,), headers=None):
        self.server, self.factors, self.headers = server, factors, headers
        self.stopping, self.failures, self.versions = threading.Event(), [], {}
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self.send, args=(each,)) for each in range(CLIENTS)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        for thread in self.threads:
            thread.join()

    def send(self, seed):
        client = grpcclient.InferenceServerClient(f"127.0.0.1:{self.server.grpc_port}")
        random = np.random.default_rng(seed)
        while not self.stopping.is_set():
            # Some elements are above those of the proof.
            x = random.uniform(0, 100, (1, 4)).astype(np.float32)
            try:
                version, y = infer(client, x)
                right = any(np.allclose(y, x * factor) for factor in self.factors)
                with self.lock:
                    self.versions[version] = self.versions.get(version, 0) + 1
                    if not right:
                        self.failures.append(f"{x} -> {y} of version {version}")
            except InferenceServerException as error:
                with self.lock:
                    self.failures.append(str(error))
        client.close()


def infer(client, x, version="", headers=None):
    tensor = grpcclient.InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    answer = client.infer("m", [tensor], model_version=version, headers=headers)
    return answer.get_response().model_version, answer.as_numpy("y")


class Case(unittest.TestCase):
    """A test with a server of its own, whose model `m` has the versions that `setUp` of the subclass writes."""

    keys, more, slo, gpu = "", "", "200ms", ""

    def start(self, path):
        def make(folder):
            self.folder = folder
            self.prepare(folder)
            return {}

        def configuration(server, models):
            text = Server.configuration(server, models).replace("sms: 132}", f"sms: 132{self.gpu}}}")
            python = f"python: {{executable: {sys.executable}}}"
            return f"{text}  - {{name: m, path: {path}, engine: python, {python}, slo: {self.slo}, batch: {{max: 8}}, {self.keys}}}\n"

        kind = type("RolloutServer", (Server,), {"configuration": configuration})
        more = "workers: {environment: [PYTHONPATH]}\n" + self.more
        self.server = kind(sys.argv[0], make, more, metrics='["unix:metrics.sock"]')
        self.addCleanup(self.server.stop)
        self.client = grpcclient.InferenceServerClient(f"127.0.0.1:{self.server.grpc_port}")
        self.addCleanup(self.client.close)

    def prepare(self, folder):
        write(folder, "first")

    def restart(self):
        """Stops the server, and starts it again with the same files."""
        self.client.close()
        self.server.process.terminate()
        self.assertEqual(self.server.process.wait(60), 0)
        self.server.process = subprocess.Popen([self.server.binary, "serve", str(self.folder / "config.yaml")],
                                               stderr=self.server.log, env=self.environment())
        self.server.wait_ready()
        self.client = grpcclient.InferenceServerClient(f"127.0.0.1:{self.server.grpc_port}")

    def environment(self):
        return os.environ | {"RUNTIME_DIRECTORY": str(self.server.run_dir)}

    def rows(self):
        return json.loads(self.server.command("status", "--json"))["models"]

    def released(self):
        return next(row for row in self.rows() if row["name"] == "m")

    def phase(self):
        rollout = self.released()["rollout"]
        return rollout and rollout["phase"]

    def roll_out(self, path, *options, code=0, stream="stdout"):
        """Rolls a version out, and waits for the end. Returns the output."""
        command = [self.server.binary, "rollout", "m", str(path), "--run-dir", str(self.server.run_dir), "--wait", *options]
        done = subprocess.run(command, text=True, capture_output=True, timeout=120, check=False)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return getattr(done, stream)


class Rollouts(Case):
    more = "model_control: explicit"

    def setUp(self):
        self.start("first")

    def test_a_good_version_takes_over_and_goes_back_without_a_lost_request(self):
        good = write(self.folder, "good")
        with Load(self.server) as load:
            for turn in range(3):
                out = self.roll_out(good, "--mirror", "30%", "--canary", "20%,50%", "--for", "300ms", "--keep", "1m")
                for phase in ("mirror", "timing", "canary 20%", "canary 50%", "released"):
                    self.assertIn(phase, out)
                released, former = self.released(), next(row for row in self.rows() if row["role"] == "former")
                self.assertEqual((released["version"], former["version"]), (2 + turn, 1))
                self.assertGreaterEqual(released["rollout"]["copies"]["compared"], 20)
                self.assertEqual(released["rollout"]["copies"]["differences"], 0)
                back = self.server.command("rollback", "m")
                self.assertLess(float(back.split("after ")[1].split(" ms")[0]), 1000)
                self.assertEqual(self.released()["version"], 1)
                wait_until(lambda: len(self.rows()) == 1)
        self.assertEqual(load.failures, [])
        self.assertGreater(load.versions["1"], 0)
        self.assertGreater(load.versions["4"], 0)

    def test_a_faulty_version_is_rolled_back_before_a_client_gets_its_answer(self):
        faults = {
            "permuted": ("answers differ", {"fault": "permuted"}),
            "factor": ("answers differ", {"factor": 2.1}),
            "slow": ("times as long", {"seconds": 5 * SECONDS}),
            "crash": ("requests failed|workers died", {"fault": "crash"}),
            "raise": ("requests failed", {"fault": "raise"}),
            "shape": (re.escape("its outputs are y FP32 [-1, 5] instead of y FP32 [-1, 4]"), {"fault": "shape"}),
            "broken": ("invalid syntax", {"factor": "("}),
        }
        with Load(self.server) as load:
            for name, (why, keys) in faults.items():
                with self.subTest(name):
                    out = self.roll_out(write(self.folder, name, **keys), "--mirror", "50%", "--canary", "10%",
                                        "--for", "500ms", code=1)
                    self.assertIn("was rolled back to version 1", out)
                    self.assertRegex(out, why)
                    self.assertNotIn("canary", out)
        self.assertEqual(load.failures, [])
        self.assertEqual(list(load.versions), ["1"])
        log = (self.folder / "log").read_text()
        self.assertRegex(log, 'audit action="rollout" on="m:2" .*outcome="failed" why=".*answers differ"')

    def test_the_first_difference_is_reported_with_the_digest_of_its_inputs(self):
        self.server.command("rollout", "m", str(write(self.folder, "wrong", factor=3.0)), "--mirror", "100%")
        wait_until(lambda: self.phase() == "mirror")
        x = np.array([[1, 2, 3, 4]], np.float32)

        def differs():
            infer(self.client, x)
            return self.phase() == "rolled_back"

        wait_until(differs)
        rollout = self.released()["rollout"]
        difference = rollout["copies"]["first_difference"]
        self.assertEqual(difference["inputs_sha256"], hashlib.sha256(x.tobytes()).hexdigest())
        self.assertIn("`y`", difference["why"])
        self.assertIn(difference["inputs_sha256"], self.server.command("status"))


    def test_an_operator_promotes_each_step_and_rolls_back_at_any_time(self):
        good = write(self.folder, "good")
        manual = ["--mirror", "0%", "--canary", "10%,50%", "--for", "manual"]
        with Load(self.server) as load:
            self.server.command("rollout", "m", str(good), *manual)
            wait_until(lambda: self.phase() == "canary")
            self.assertEqual(self.released()["rollout"]["canary"], 0.1)
            self.assertIn("canary", self.server.command("promote", "m"))
            self.assertEqual(self.released()["rollout"]["canary"], 0.5)
            wait_until(lambda: load.versions.get("2", 0) > 20)
            self.server.command("rollback", "m")
            wait_until(lambda: self.phase() == "rolled_back" and len(self.rows()) == 1)
            self.server.command("rollout", "m", str(good), *manual)
            for phase in ("canary", "canary", "released"):
                wait_until(lambda expected=phase: self.phase() == expected)
                self.server.command("promote", "m")
            # The last promotion has unloaded the former version.
            wait_until(lambda: self.phase() == "completed" and len(self.rows()) == 1)
            with self.assertRaises(subprocess.CalledProcessError):
                self.server.command("rollback", "m")
        self.assertEqual(load.failures, [])
        self.assertEqual(self.released()["version"], 3)

    def test_the_parts_of_a_canary_are_right_and_a_header_can_keep_clients_at_one_version(self):
        good = write(self.folder, "good", factor=3.0)
        options = ["--mirror", "0%", "--canary", "25%", "--for", "manual", "--sticky", "X-User"]
        self.server.command("rollout", "m", str(good), *options)
        wait_until(lambda: self.phase() == "canary")
        x = np.ones((1, 4), np.float32)
        versions = [infer(self.client, x)[0] for _ in range(200)]
        self.assertEqual(versions.count("2"), 50)
        users = {f"user-{user}": {infer(self.client, x, headers={"x-user": f"user-{user}"})[0] for _ in range(3)}
                 for user in range(60)}
        self.assertTrue(all(len(seen) == 1 for seen in users.values()), users)
        self.assertTrue(5 <= sum(seen == {"2"} for seen in users.values()) <= 30, users)
        # A request can name either version.
        self.assertEqual([infer(self.client, x, version)[0] for version in ("1", "2")], ["1", "2"])

    def test_settings_change_and_other_commands_work_during_a_rollout(self):
        self.server.command("rollout", "m", str(write(self.folder, "good")), "--mirror", "50%", "--for", "manual")
        config = self.folder / "config.yaml"
        with Load(self.server) as load:
            wait_until(lambda: self.phase() == "mirror")
            config.write_text(config.read_text().replace("slo: 200ms", "slo: 150ms"))
            self.server.command("reload")
            self.assertEqual({row["slo"]["latency_ms"] for row in self.rows()}, {150.0})
            self.assertEqual(self.phase(), "mirror")
            self.server.command("resize", "m", "50%")
            with self.assertRaises(subprocess.CalledProcessError):
                self.server.command("rollout", "m", str(self.folder / "good"))
            with self.assertRaises(subprocess.CalledProcessError):
                self.server.command("upgrade")
            self.server.command("promote", "m")
            wait_until(lambda: self.phase() == "released")
            self.assertEqual({row["slo"]["latency_ms"] for row in self.rows()}, {150.0})
        self.assertEqual(load.failures, [])

    def test_clients_cannot_unload_a_model_during_its_rollout(self):
        self.server.command("rollout", "m", str(write(self.folder, "good")), "--mirror", "0%", "--for", "1s", "--keep", "0s")
        wait_until(lambda: self.phase() == "completed")
        self.client.unload_model("m")
        self.assertFalse(self.client.is_model_ready("m"))
        self.client.load_model("m")
        x = np.ones((1, 4), np.float32)
        self.assertEqual(infer(self.client, x)[0], "2")
        self.server.command("rollout", "m", str(write(self.folder, "next")), "--for", "manual")
        for command in (self.client.unload_model, self.client.load_model):
            with self.assertRaisesRegex(InferenceServerException, "a rollout is in progress"):
                command("m")
        self.assertEqual(infer(self.client, x)[0], "2")

    def test_a_released_version_stays_released_in_an_upgrade(self):
        with Load(self.server) as load:
            self.roll_out(write(self.folder, "good"), "--mirror", "0%", "--for", "1s", "--keep", "10m")
            before = self.server.process.pid
            self.server.command("upgrade")
            wait_until(lambda: self.server.process.poll() is not None)
            wait_until(lambda: [row["role"] for row in self.rows()] == ["released"])
            self.assertEqual(self.released()["version"], 2)
            supervisor = json.loads(self.server.command("status", "--json"))["supervisor"]["pid"]
            self.assertNotEqual(supervisor, before)
            answered = load.versions["2"]
            wait_until(lambda: load.versions["2"] > answered + 10)
        self.assertEqual(load.failures, [])
        # The server's process has ended with the upgrade, so this one is stopped here.
        os.kill(supervisor, signal.SIGTERM)
        wait_until(lambda: not any(path.is_socket() for path in self.server.run_dir.rglob("*")))

    def test_the_former_version_can_sleep_when_the_new_one_is_released(self):
        with Load(self.server) as load:
            good = write(self.folder, "good")
            self.roll_out(good, "--mirror", "0%", "--for", "1s", "--replace")

            def former():
                return next(row for row in self.rows() if row["role"] == "former")

            wait_until(lambda: former()["sleep"]["phase"] == "asleep")
            self.server.command("rollback", "m")
            wait_until(lambda: load.versions["1"] > 0 and len(self.rows()) == 1)
        self.assertEqual(load.failures, [])
        self.assertEqual(self.released()["version"], 1)

    def test_metrics_and_statistics_show_both_versions(self):
        self.server.command("rollout", "m", str(write(self.folder, "good")), "--mirror", "100%", "--for", "manual")
        wait_until(lambda: self.phase() == "mirror")
        x = np.ones((1, 4), np.float32)
        for _ in range(10):
            infer(self.client, x)
        wait_until(lambda: self.released()["rollout"]["copies"]["compared"] > 0)
        text = unix_http(str(self.server.run_dir / "metrics.sock"), "GET", "/metrics")[1].decode()
        for line in ('shadowslice_model_released{model="m",gpu="0"} 1', 'shadowslice_model_released{model="m",gpu="0",version="2"} 0',
                     'shadowslice_mirror_differences_total{model="m",gpu="0",version="2"} 0',
                     'nv_inference_request_success{model="m",version="1"} 10'):
            self.assertIn(line, text)
        self.assertNotIn('shadowslice_mirror_copies_total{model="m",gpu="0"}', text)
        statistics = self.client.get_inference_statistics("m", "2").model_stats
        self.assertEqual([(each.name, each.version) for each in statistics], [("m", "2")])
        self.assertGreater(statistics[0].inference_count, 0)
        index = self.client.get_model_repository_index().models
        self.assertEqual([(each.name, each.version, each.state) for each in index],
                         [("m", "1", "READY"), ("m", "2", "READY")])


class Configured(Case):
    """Rollouts that the configuration file starts."""

    keys = "rollout: {mirror: 30%, canary: [50%], for: 300ms, keep: 1m}"

    def setUp(self):
        self.start("first")

    def test_a_changed_path_is_rolled_out_and_survives_a_restart(self):
        write(self.folder, "second", factor=3.0)
        write(self.folder, "third")
        config = self.folder / "config.yaml"
        first = config.read_text()
        with Load(self.server, factors=(2.0, 3.0)) as load:
            # The second version differs, and is rolled back.
            config.write_text(first.replace("path: first", "path: second"))
            self.assertIn("rolling_out", self.server.command("reload"))
            wait_until(lambda: self.phase() == "rolled_back")
            self.assertEqual(list(load.versions), ["1"])
            self.server.command("reload")
            self.assertEqual(self.phase(), "rolled_back", "a reload does not try it again")
            config.write_text(first)
            self.server.command("reload")
            config.write_text(first.replace("path: first", "path: second"))
            self.assertIn("rolling_out", self.server.command("reload"), "the file named another version meanwhile")
            wait_until(lambda: self.phase() == "rolled_back")
        self.restart()
        self.assertTrue(self.released()["loaded"]["path"].endswith("first"), "a restart does not try it either")
        with Load(self.server, factors=(2.0, 3.0)) as load:
            config.write_text(first.replace("path: first", "path: third"))
            self.server.command("reload")
            wait_until(lambda: self.phase() == "released")
        self.assertEqual(load.failures, [])
        released = self.released()["version"]
        self.restart()
        self.assertEqual(self.released()["version"], released)
        self.assertEqual(len(self.rows()), 1)
        self.assertTrue(self.released()["loaded"]["path"].endswith("third"))


class Memory(Case):
    """A GPU without memory for two versions."""

    # A worker takes 210 MiB, so two do not fit into 300 MiB. Requests wait while a worker starts.
    gpu, slo, keys = ", memory: 300Mi", "20s", "profile: profile.yaml"

    def prepare(self, folder):
        (folder / "profile.yaml").write_text(PROFILE)
        super().prepare(folder)

    def test_a_rollout_says_that_both_do_not_fit_or_replaces_the_former_version(self):
        self.start("first")
        good = write(self.folder, "good")
        out = self.roll_out(good, code=1, stream="stderr")
        self.assertIn("version 2 needs about 210 MiB on GPU 0, where 90 MiB are free", out)
        self.assertEqual(len(self.rows()), 1)
        with Load(self.server) as load:
            self.roll_out(good, "--replace", "--keep", "1m")
            self.assertEqual(self.released()["version"], 2)
            wait_until(lambda: load.versions.get("2", 0) > 10)
        self.assertEqual(load.failures, [])
        self.server.command("promote", "m")
        with Load(self.server) as load:
            # Requests that wait for a version that does not load are refused.
            out = self.roll_out(write(self.folder, "broken", factor="("), "--replace", code=1)
            self.assertIn("was rolled back to version 2", out)
            before = load.versions.get("2", 0)
            wait_until(lambda: load.versions.get("2", 0) > before + 10)
        self.assertTrue(all("StatusCode.UNAVAILABLE" in failure for failure in load.failures), load.failures)


class Versions(Case):
    """A model with a folder of versions."""

    def prepare(self, folder):
        for number in (1, 3):
            write(folder, f"versions/{number}", factor=float(number))

    def factor(self, version=""):
        return infer(self.client, np.ones((1, 4), np.float32), version)[1][0, 0]

    def test_the_newest_version_answers_and_a_newer_one_is_picked_up(self):
        self.start("versions")
        self.assertEqual(self.released()["version"], 3)
        self.assertEqual((self.factor(), self.factor("3")), (3, 3))
        with self.assertRaisesRegex(InferenceServerException, "version 1 is not found; its version is 3"):
            self.factor("1")
        with Load(self.server, factors=(3.0, 4.0)) as load:
            write(self.folder, "versions/4", factor=4.0)
            wait_until(lambda: self.released()["version"] == 4 and len(self.rows()) == 1)
        self.assertEqual(load.failures, [])
        # A version that does not load changes nothing.
        write(self.folder, "versions/5", factor="(")
        wait_until(lambda: self.phase() == "rolled_back")
        self.assertEqual(self.factor(), 4)
        self.restart()
        self.assertEqual((self.released()["version"], self.factor()), (4, 4))

    def test_all_versions_answer(self):
        self.keys = "versions: all"
        self.start("versions")
        self.check_versions()
        write(self.folder, "versions/7", factor=7.0)
        wait_until(lambda: self.factor() == 7)
        self.assertEqual(self.client.get_model_metadata("m").versions, ["1", "3", "7"])
        self.assertEqual([self.factor(number) for number in ("1", "3", "7")], [1, 3, 7])
        # An operator can go back to a loaded version.
        self.roll_out(self.folder / "versions/3", "--mirror", "0%", "--for", "1s", "--keep", "0s")
        wait_until(lambda: self.phase() == "completed")
        self.assertEqual((self.factor(), len(self.rows())), (3, 3))

    def check_versions(self):
        self.assertEqual([self.factor(number) for number in ("", "1", "3")], [3, 1, 3])
        self.assertEqual(self.client.get_model_metadata("m").versions, ["1", "3"])
        self.assertTrue(self.client.is_model_ready("m", "1"))
        self.assertFalse(self.client.is_model_ready("m", "2"))
        x = httpclient.InferInput("x", [1, 4], "FP32")
        x.set_data_from_numpy(np.ones((1, 4), np.float32))
        with httpclient.InferenceServerClient(f"127.0.0.1:{self.server.http_port}") as client:
            answer = client.infer("m", [x], model_version="1")
            self.assertEqual((answer.get_response()["model_version"], answer.as_numpy("y")[0, 0]), ("1", 1))
        status, body = unix_http(str(self.server.run_dir / "http.sock"), "GET", "/v2/models/m/versions/1")
        self.assertEqual((status, json.loads(body)["versions"]), (200, ["1", "3"]))

    def test_the_list_of_versions_can_change(self):
        write_more = lambda: write(self.folder, "versions/2", factor=2.0)
        self.keys = "versions: [1, 3]"
        self.start("versions")
        self.check_versions()
        write_more()
        config = self.folder / "config.yaml"
        first = next(row["workers"][0]["pid"] for row in self.rows() if row["version"] == 1)
        with Load(self.server, factors=(3.0, 2.0, 1.0)) as load:
            config.write_text(config.read_text().replace("versions: [1, 3]", "versions: [1, 2]"))
            self.server.command("reload")
            wait_until(lambda: self.factor() == 2 and len(self.rows()) == 2)
            self.assertEqual(self.client.get_model_metadata("m").versions, ["1", "2"])
            config.write_text(config.read_text().replace("versions: [1, 2]", "versions: [1]"))
            self.server.command("reload")
            wait_until(lambda: self.factor() == 1 and len(self.rows()) == 1)
        self.assertEqual(load.failures, [])
        self.assertEqual(self.rows()[0]["workers"][0]["pid"], first, "a loaded version keeps its worker")

    def test_an_upgrade_keeps_all_versions(self):
        self.keys = "versions: all"
        self.start("versions")
        with Load(self.server, factors=(3.0,)) as load:
            self.server.command("upgrade")
            wait_until(lambda: self.server.process.poll() is not None)
            self.assertEqual([self.factor(number) for number in ("", "1", "3")], [3, 1, 3])
        self.assertEqual(load.failures, [])
        os.kill(json.loads(self.server.command("status", "--json"))["supervisor"]["pid"], signal.SIGTERM)
        wait_until(lambda: not any(path.is_socket() for path in self.server.run_dir.rglob("*")))

    def test_a_corrected_version_is_tried_again(self):
        self.start("versions")
        broken = write(self.folder, "versions/4", factor="(")
        wait_until(lambda: self.phase() == "rolled_back")
        (broken / "model.py").write_text(VERSION.format(factor=4.0, seconds=0, fault=""))
        wait_until(lambda: self.released()["version"] == 4)
        text = unix_http(str(self.server.run_dir / "metrics.sock"), "GET", "/metrics")[1].decode()
        self.assertIn('shadowslice_model_released{model="m",gpu="0",version="4"} 1', text)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.argv.pop(0)
    unittest.main(argv=sys.argv)
