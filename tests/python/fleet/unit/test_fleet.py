"""Tests the commands of the Fleet actor without Ray and without its control loop."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from dataclasses import replace
from pathlib import Path
from unittest import mock

from shadowslice_fleet import settings
from shadowslice_fleet.moves import CommandRefused
from shadowslice_fleet.observed import LOST_AFTER, LOST_AFTER_SERVING, HostRecord, Slot
from shadowslice_fleet.placement import PlaceFailed
from shadowslice_fleet.spec import SpecFaults
from world import host, spec

stub = mock.MagicMock()
stub.exceptions.RayError = type("RayError", (Exception,), {})
for module in ("ray", "ray.util", "ray.util.scheduling_strategies"):
    sys.modules[module] = stub
from shadowslice_fleet import node  # noqa: E402
from shadowslice_fleet.fleet import Fleet  # noqa: E402
from shadowslice_fleet.hosts import FORGET_AFTER, Hosts, Node  # noqa: E402

A, B, C0 = Slot("a", 0), Slot("b", 0), Slot("c", 0)
# A program that replaces `shadowslice place`. Each model gets the first hosts. The program fails
# if a model is too large.
PROGRAM = f"""#!{sys.executable}
import json, sys
request = json.load(sys.stdin)
gpus = [dict(host=gpu["host"], gpu=gpu["gpu"]) for gpu in request["gpus"]]
if any(model["memory_mib"] > 1 << 40 for model in request["models"]):
    sys.exit("too large")
print(json.dumps(dict(models=[
    dict(name=model["name"], on=gpus[:model["copies"]], missing=0)
    for model in request["models"]])))
"""


class Commands(unittest.TestCase):
    def setUp(self) -> None:
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        (folder / "place").write_text(PROGRAM)
        (folder / "place").chmod(0o755)
        written = f"{{binary: {folder}/place, run_dir: {folder}/run, state: {folder}/state}}"
        (folder / "gateway.yaml").write_text(written)
        variables = {settings.GATEWAY_VARIABLE: str(folder / "gateway.yaml")}
        self.enterContext(mock.patch.dict(os.environ, variables))
        self.enterContext(mock.patch.object(Fleet, "_run"))
        self.fleet = Fleet()
        self.addCleanup(self.fleet.lock_file.close)
        records = {name: HostRecord(host(name), time.monotonic()) for name in "abc"}
        self.fleet.hosts.records = records
        self.fleet.apply_spec(spec("m").document)
        self.fleet._place()

    @property
    def places(self) -> tuple[Slot, ...]:
        return self.fleet.memory.placement["m"]

    def test_a_spec_that_cannot_be_placed_is_refused(self) -> None:
        large = {"name": "n", "need": {"sms": 8, "memory": "999999999999999Gi"}}
        document = {"models": [*spec("m").document["models"], large]}
        self.assertRaises((PlaceFailed, SpecFaults), self.fleet.apply_spec, document)
        self.assertEqual(self.fleet.spec.models.keys(), {"m"})
        Path(self.fleet.settings.binary).unlink()
        self.fleet.apply_spec({"models": []})
        self.assertEqual(self.fleet.spec.models, {})

    def test_a_failed_drain_can_be_commanded_again(self) -> None:
        self.assertEqual(self.places, (A, B))
        self.fleet.drain("a", True)
        self.fleet._place()
        self.assertEqual(self.places, (B, C0))
        # The copy on c did not start, so the old copy on a has its slot again.
        self.fleet.memory = replace(self.fleet.memory, placement={"m": (A, B)})
        self.fleet._place()
        self.assertEqual(self.places, (A, B))
        self.fleet.drain("a", True)
        self.fleet._place()
        self.assertEqual(self.places, (B, C0))

    def test_a_host_that_is_away_can_be_undrained(self) -> None:
        self.fleet.drain("a", True)
        del self.fleet.hosts.records["a"]
        self.fleet.drain("a", False)
        self.assertEqual(self.fleet.state.drained, frozenset())
        self.assertRaises(CommandRefused, self.fleet.drain, "a", False)

    def test_copies_of_a_silent_host_move_unless_they_serve(self) -> None:
        serves = {"m": {"a": True, "b": True}}
        for seconds, taken, places in (
            (LOST_AFTER - 1, None, (A, B)),
            (LOST_AFTER + 1, serves, (A, B)),
            (LOST_AFTER_SERVING + 1, serves, (B, C0)),
            (LOST_AFTER + 1, {"m": {"a": False, "b": True}}, (B, C0)),
            (LOST_AFTER + 1, None, (B, C0)),
        ):
            with self.subTest(seconds=seconds, taken=taken):
                self.fleet.memory = replace(self.fleet.memory, placement={"m": (A, B)})
                self.fleet.hosts.records["a"] = HostRecord(host("a"), time.monotonic() - seconds)
                self.fleet.envoy_health = taken
                self.fleet._place_again()
                self.fleet._place()
                self.assertEqual(self.places, places)

    def test_nothing_moves_to_a_drained_host(self) -> None:
        self.fleet.drain("c", True)
        self.assertRaisesRegex(CommandRefused, "drained", self.fleet.move, "m", "c", None, "a")


class KnownHosts(unittest.TestCase):
    def test_hosts_that_are_away_for_good_are_forgotten(self) -> None:
        hosts, now = Hosts(), time.monotonic()
        for name, age in (("recent", 60.0), ("old", FORGET_AFTER + 60), ("lives", float("inf"))):
            hosts.records[name], hosts.node_of[name] = HostRecord(host("a"), now - age), Node(None)
        hosts.nodes["id"] = hosts.node_of["lives"]
        hosts._forget()
        self.assertEqual(hosts.records.keys(), {"recent", "lives"})
        self.assertEqual(hosts.node_of.keys(), {"recent", "lives"})


def taken(*_: object) -> None:
    """Stands in for Ray's signal handler."""
    raise RuntimeError("an abort")


class Head(unittest.TestCase):
    def test_a_head_that_did_not_start_fails_at_once(self) -> None:
        with socket.socket() as gc:
            gc.bind(("127.0.0.1", 0))  # The socket does not listen, so a connection is refused.
            address = f"127.0.0.1:{gc.getsockname()[1]}"
            ended = mock.Mock(**{"poll.return_value": 1})
            self.assertRaises(node.HeadFailed, node._connect, address, ended)

    def test_when_its_unit_ends_it_leaves_ray_before_it_ends_ray(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self.addCleanup(signal.signal, number, signal.getsignal(number))
        running, left = subprocess.Popen(["sleep", "60"]), []
        with (
            mock.patch.object(node, "_start", return_value=[]),
            mock.patch.object(node.subprocess, "Popen", return_value=running),
            mock.patch.object(node, "_connect", lambda *_: signal.signal(signal.SIGTERM, taken)),
            mock.patch.object(node, "_ensure_fleet", lambda: os.kill(os.getpid(), signal.SIGTERM)),
            mock.patch.object(stub, "shutdown", lambda: left.append(running.poll())),
            self.assertRaises(SystemExit) as ended,
        ):
            node.head(1, None, False, Path("/nonexistent"))
        self.assertEqual((ended.exception.code, left), (0, [None]))
        self.assertEqual(running.returncode, -signal.SIGTERM)

    def test_a_head_that_answers_is_connected_to(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
            node._connect(address, None)
        stub.init.assert_called_once_with(
            address=address, namespace="shadowslice", log_to_driver=False
        )


if __name__ == "__main__":
    unittest.main()
