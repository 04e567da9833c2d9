"""Tests specs, configurations, Envoy's files, placements and fetched files."""

import hashlib
import json
import os
import re
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from unittest import mock

import fsspec
from shadowslice_fleet import config_file, envoy, files, persisted, placement, settings, values
from shadowslice_fleet import spec as specs
from shadowslice_fleet.demand import View, demands
from shadowslice_fleet.envoy import Endpoint, Listen
from shadowslice_fleet.gateway import Gateway
from shadowslice_fleet.loop_state import Placement, Published
from shadowslice_fleet.observed import Assignments, ObservedHost, Slot
from shadowslice_fleet.persisted import PersistedState
from world import assignment, copy, host, spec

NEED = {"sms": 24, "memory": "4Gi"}


class Specs(unittest.TestCase):
    def faults(self, *models: object) -> list[str]:
        with self.assertRaises(specs.SpecFaults) as raised:
            specs.parse({"models": list(models)}, "F")
        return raised.exception.faults

    def test_all_faults_are_reported_at_once(self) -> None:
        found = self.faults(
            {"name": "a b", "gpu": 0, "need": NEED},
            {"copies": 0, "files": {"url": "x", "sha256": "12"}, "need": {"sms": 1}},
            {"name": "c", "path": "c.onnx", "retry": "yes", "timeout": "20"}
            | {"proirity": 1, "colour": 1},
            7,
            {"name": "d", "need": {"sms": 0, "memory": "4GB"}},
        )
        for part in (
            "F: models[0].name:",
            "F: models[0].gpu:",
            "F: models[1].name: missing",
            "F: models[1].copies: 0 is not an integer",
            "F: models[1].files.sha256:",
            "F: models[1].need:",
            "F: models[2].proirity: unknown key; did you mean `priority`?",
            "F: models[2].colour: unknown key",
            "F: models[4].need.sms:",
            "F: models[4].need.memory:",
            "F: models[2].path: a relative path needs `files`",
            "F: models[2].retry:",
            "F: models[2].timeout: invalid duration '20'",
            "F: models[3]: expected a map",
        ):
            self.assertTrue(any(fault.startswith(part) for fault in found), (part, found))

    def test_faults_outside_the_models_are_reported_too(self) -> None:
        with self.assertRaises(specs.SpecFaults) as raised:
            specs.parse({"model": [], "hosts": 1}, "F")
        expected = ("F: model: unknown key; did you mean `models`?", "F: hosts: unknown key")
        self.assertEqual(raised.exception.faults[:2], list(expected))
        self.assertIn("F: models: expected a list", raised.exception.faults[2])

    def test_a_key_in_the_wrong_case_is_recognised(self) -> None:
        with self.assertRaises(specs.SpecFaults) as raised:
            specs.parse({"MODELS": []}, "F")
        fault = raised.exception.faults[0]
        self.assertEqual(fault, "F: MODELS: unknown key; did you mean `models`?")

    def test_names_of_other_yaml_types_are_faults(self) -> None:
        for name in (None, True, 1.1, 8, ".", "..", "", "a\n", "n" * 129):
            found = self.faults({"name": name, "need": NEED})
            self.assertTrue(found[0].startswith("F: models[0].name:"), (name, found))
        digits = int("1" * 64)
        found = self.faults({"name": "a", "files": {"url": "s3://b/a", "sha256": digits}})
        self.assertIn("sha256", found[0])

    def test_a_path_stays_in_its_files(self) -> None:
        for path in ("../a.onnx", "a/../../b", ".."):
            found = self.faults({"name": "a", "files": "s3://b/a", "path": path, "need": NEED})
            self.assertIn("leads out", found[0])

    def test_a_timeout_is_one_that_envoy_takes(self) -> None:
        for timeout in ("0s", "50us", "25h", "9" * 400 + "s"):
            self.assertIn(".timeout", self.faults({"name": "a", "timeout": timeout})[0])
        for timeout in ("1ms", "24h", "1.5ms", "60s"):
            entry = {"name": "a", "timeout": timeout, "need": NEED}
            models = list(specs.parse({"models": [entry]}, "w").models.values())
            for written in re.findall(r'"timeout": "(.*)"', envoy.routes(models)):
                self.assertRegex(written, r"^\d+(\.\d{1,9})?s$")

    def test_yaml_that_json_cannot_express_is_a_fault(self) -> None:
        path = Path(self.enterContext(tempfile.TemporaryDirectory())) / "w.yaml"
        for text in ("&a [*a]", "{!!binary AQ==: 1}", "[" * 500, "{? [a] : b}", "a: \xff"):
            path.write_bytes(text.encode("latin-1"))
            with self.assertRaisesRegex(specs.SpecFaults, "cannot read"):
                specs.load(path)

    def test_names_are_unique(self) -> None:
        self.assertIn(
            "twice", self.faults({"name": "a", "need": NEED}, {"name": "a", "need": NEED})[0]
        )

    def test_a_profile_s_file_becomes_part_of_the_spec(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "p.yaml").write_text("execution_ms: {sms: [1], 1: [2.0]}")
            (Path(folder) / "w.yaml").write_text("models: [{name: a, profile: p.yaml, slo: 1s}]")
            read = specs.load(Path(folder) / "w.yaml")
            (Path(folder) / "p.yaml").unlink()
            again = specs.parse(read.document, "kept")
            self.assertEqual(again.models["a"].profile, {"execution_ms": {"sms": [1], "1": [2.0]}})
            self.assertEqual(again.digest, read.digest)
            with self.assertRaisesRegex(specs.SpecFaults, r"models\[0\].profile: cannot read"):
                specs.load(Path(folder) / "w.yaml")

    def test_sizes_and_durations(self) -> None:
        self.assertEqual([values.size_mib(each) for each in ("1.5Gi", "1Mi", 1)], [1536, 1, 1])
        self.assertEqual(
            [values.duration_s(each) for each in ("20ms", "1.5s", "2m")], [0.02, 1.5, 120]
        )
        for each in ("4GB", "-1Mi", True, None):
            self.assertRaises(values.ValueFault, values.size_mib, each)


class Settings(unittest.TestCase):
    def read(self, text: str) -> settings.GatewaySettings:
        path = Path(self.enterContext(tempfile.TemporaryDirectory())) / "gateway.yaml"
        path.write_text(text)
        with mock.patch.dict(os.environ, {settings.GATEWAY_VARIABLE: str(path)}):
            return settings.gateway()

    def test_settings_are_parsed_by_type(self) -> None:
        read = self.read("{settle: 1m, http_port: 9, address: 10.0.0.1}")
        self.assertEqual((read.settle, read.http_port, read.address), (60.0, 9, "10.0.0.1"))
        self.assertEqual(self.read("").settle, 120.0)
        with self.assertRaises(settings.SettingsFault) as raised:
            self.read("{settle: 60, http_port: 0, adress: x}")
        for part in ("settle: invalid duration 60", "http_port: 0 is not", "adress: unknown key"):
            self.assertIn(part, str(raised.exception))

    def test_files_lie_where_the_operator_says(self) -> None:
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        (folder / "host.yaml").write_text("{base: /a/base.yaml, files: models}")
        with mock.patch.dict(os.environ, {settings.FOLDER_VARIABLE: str(folder)}):
            read = settings.host()
            self.assertEqual(settings.gateway().state, "/var/lib/shadowslice-fleet")
        found = [read.base, read.config, read.files, read.run_dir]
        there = [f"{folder}/shadowslice.yaml", f"{folder}/models"]
        self.assertEqual(found, ["/a/base.yaml", *there, "/run/shadowslice"])
        with mock.patch.dict(os.environ, {settings.FOLDER_VARIABLE: "/nowhere"}):
            self.assertEqual(settings.host().config, "/nowhere/shadowslice.yaml")
        self.assertEqual(settings.host().base, "/etc/shadowslice/base.yaml")

    def test_a_host_s_address_is_one_that_envoy_takes(self) -> None:
        path = Path(self.enterContext(tempfile.TemporaryDirectory())) / "host.yaml"
        with mock.patch.dict(os.environ, {settings.HOST_VARIABLE: str(path)}):
            path.write_text("{address: gpu-1.example, http_port: 0}")
            with self.assertRaises(settings.SettingsFault) as raised:
                settings.host()
            for part in ("'gpu-1.example' is not an IP address", "http_port: 0 is not an integer"):
                self.assertIn(part, str(raised.exception))
            path.write_text("address: 10.0.0.7")
            self.assertEqual(settings.host().address, "10.0.0.7")


class ConfigFile(unittest.TestCase):
    def test_kept_models_stay_as_they_are(self) -> None:
        folder, old, new = Path("/f"), spec("m", "n"), spec("m", copies=3)
        before = config_file.render(
            {"ready": "any"},
            Assignments((assignment(old, "m"), assignment(old, "n", 1)), ()),
            "",
            folder,
            folder,
        )
        after = config_file.render({}, Assignments((), ("n",)), before, folder, folder)
        self.assertEqual(config_file.assigned(after), {"n": assignment(old, "n", 1).digest})
        self.assertEqual(json.loads(after.partition("\n")[2])["models"][0]["gpu"], 1)
        self.assertEqual(
            assignment(old, "m").digest, assignment(new, "m").digest
        )  # the digest excludes `copies`
        self.assertNotEqual(assignment(old, "m").digest, assignment(old, "m", 1).digest)

    def test_paths_lie_in_the_fetched_files(self) -> None:
        entry = {"name": "a", "path": "x/a.onnx", "files": "s3://b/a", "need": NEED, "slo": "1s"}
        read = specs.parse({"models": [entry]}, "w")
        made = config_file.entry(assignment(read, "a"), Path("/files"), Path("/profiles"))
        self.assertEqual(made["path"], f"/files/{hashlib.sha256(b's3://b/a').hexdigest()}/x/a.onnx")
        self.assertFalse({"need", "files", "copies"} & made.keys())

    def test_faults_are_assigned_to_models(self) -> None:
        found = config_file.faults_by_model(
            [
                "/t/d.yaml:3:4: models[1].path: /x: y cannot be used",
                "/t/d.yaml:1:1: listen.http: bad",
                "/t/d.yaml:1:1: note: models[0].slo: hard",
            ],
            ["a", "b"],
        )
        self.assertEqual(found[0]["b"], "path: /x: y cannot be used")
        self.assertEqual(found[1], ["/t/d.yaml:1:1: listen.http: bad"])


class Placing(unittest.TestCase):
    def test_missing_copies_are_reported(self) -> None:
        on = [{"host": "c", "gpu": 1}]
        answer = {
            "name": "m",
            "on": on,
            "missing": 1,
            "why": "no host is left without a copy of it",
        }
        read = placement.parse_reply({"models": [answer, {"name": "n", "on": on, "missing": 0}]})
        self.assertEqual(read.slots, {"m": (Slot("c", 1),), "n": (Slot("c", 1),)})
        self.assertEqual(read.missing, {"m": "1 missing: no host is left without a copy of it"})

    def test_the_request_to_place(self) -> None:
        hosts = {"a": host("a"), "c": host("c", 2)}
        usable = placement.usable(hosts, frozenset("a"))
        self.assertEqual(usable, {Slot("c", 0), Slot("c", 1)})
        lost = replace(hosts["c"], gpus=(replace(hosts["c"].gpus[0], why="lost"),))
        self.assertEqual(placement.usable({"c": lost}, frozenset()), frozenset())
        view = View(spec("m"), {"m": (Slot("a", 0), Slot("c", 1))}, hosts, usable)
        sent = placement.request(view, demands(view), Path("/p"))
        self.assertEqual([(gpu["host"], gpu["gpu"]) for gpu in sent["gpus"]], [("c", 0), ("c", 1)])
        self.assertEqual(sent["models"][0]["on"], [{"host": "c", "gpu": 1}])

    def test_only_a_model_without_an_awake_copy_needs_less_memory(self) -> None:
        asleep, awake = copy(0), copy(0)
        asleep = replace(asleep, asleep=True)
        hosts = {
            name: replace(host(name), copies={"m": each})
            for name, each in (("a", asleep), ("b", awake))
        }
        both = specs.parse({"models": [{"name": "m", "profile": {}, "slo": "1s"}]}, "w")

        def sent(hosts: dict[str, ObservedHost]) -> dict[str, object]:
            view = View(both, {"m": (Slot("a", 0),)}, hosts, frozenset({Slot("a", 0)}))
            models = placement.request(view, demands(view), Path("/p"))["models"]
            entry: dict[str, object] = models[0]
            return entry

        self.assertNotIn("asleep", sent(hosts))
        self.assertIs(sent({"a": hosts["a"]})["asleep"], True)
        self.assertNotIn("asleep", sent({}))

    def test_a_placement_is_stale_without_a_usable_slot(self) -> None:
        both = frozenset({Slot("a", 0), Slot("b", 0)})
        there: Placement = {"m": (Slot("a", 0), Slot("b", 0))}
        view = View(spec("m"), there, {}, both)
        self.assertFalse(placement.is_stale(view))
        self.assertTrue(placement.is_stale(replace(view, usable=frozenset({Slot("a", 0)}))))
        self.assertTrue(placement.is_stale(replace(view, spec=spec("m", copies=3))))


class Files(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        (self.folder / "m.onnx").write_bytes(b"weights")
        self.digest = hashlib.sha256(b"weights").hexdigest()

    def test_a_file_is_fetched_once_and_verified(self) -> None:
        wanted = specs.Files(f"file://{self.folder}/m.onnx", self.digest)
        there = files.fetch(wanted, self.folder / "files")
        self.assertEqual((there.name, (there / "m.onnx").read_bytes()), (self.digest, b"weights"))
        (self.folder / "m.onnx").unlink()
        self.assertEqual(files.fetch(wanted, self.folder / "files"), there)

    def test_other_content_is_refused_and_leaves_nothing(self) -> None:
        wanted = specs.Files(str(self.folder / "m.onnx"), "0" * 64)
        self.assertRaisesRegex(
            files.FetchFailed, "digest", files.fetch, wanted, self.folder / "files"
        )
        self.assertEqual(list((self.folder / "files").iterdir()), [])

    def test_a_name_that_leads_out_of_the_folder_is_refused(self) -> None:
        store = fsspec.filesystem("memory")
        store.pipe({"/bucket/m/a": b"a", "/bucket/m/b": b"b"})
        self.addCleanup(store.store.clear)
        store.store["/bucket/m/../../out"] = store.store.pop("/bucket/m/b")  # S3 allows such names.
        wanted = specs.Files("memory://bucket/m", None)
        with self.assertRaisesRegex(files.FetchFailed, "leads out of the folder"):
            files.fetch(wanted, self.folder / "files")
        self.assertEqual([path.name for path in self.folder.rglob("out")], [])

    def test_an_empty_folder_is_no_model(self) -> None:
        (self.folder / "empty").mkdir()
        wanted = specs.Files(str(self.folder / "empty"), None)
        with self.assertRaisesRegex(files.FetchFailed, "no files"):
            files.fetch(wanted, self.folder / "files")
        (self.folder / "empty" / "a").write_text("a")
        self.assertTrue((files.fetch(wanted, self.folder / "files") / "a").exists())

    def test_failure_reasons_have_no_password(self) -> None:
        for url in ("nothing://user:secret@host/m", "file:///nothing/m?signature=secret"):
            with self.assertRaises(files.FetchFailed) as raised:
                files.fetch(specs.Files(url, None), self.folder / "files")
            self.assertNotIn("secret", str(raised.exception))
            self.assertIn(url.partition("://")[0], str(raised.exception))

    def test_files_are_on_the_disk_before_they_have_their_name(self) -> None:
        calls = []
        flushed = mock.patch("os.fsync", side_effect=lambda _: calls.append("flush"))
        named = mock.patch("os.replace", side_effect=lambda *_: calls.append("name"))
        with flushed, named:
            files.fetch(specs.Files(str(self.folder / "m.onnx"), None), self.folder / "files")
        self.assertEqual(calls, ["flush", "name"])

    def test_a_folder_is_fetched_with_all_that_is_in_it(self) -> None:
        (self.folder / "model" / "sub").mkdir(parents=True)
        (self.folder / "model" / "a.py").write_text("a")
        (self.folder / "model" / "sub" / "b").write_text("b")
        there = files.fetch(specs.Files(str(self.folder / "model"), None), self.folder / "files")
        self.assertEqual(
            ((there / "a.py").read_text(), (there / "sub" / "b").read_text()), ("a", "b")
        )
        lines = "".join(
            f"{hashlib.sha256(of).hexdigest()}  {name}\n"
            for name, of in (("a.py", b"a"), ("sub/b", b"b"))
        )
        self.assertEqual(files.digest(there), hashlib.sha256(lines.encode()).hexdigest())


class Kept(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def test_state_is_read_as_it_was_written(self) -> None:
        self.assertEqual(persisted.load(self.folder), PersistedState())
        kept = PersistedState(spec("m"), {"m": (Slot("a", 0),)}, frozenset({"b"}), {"m": 1})
        persisted.save(self.folder, kept)
        self.assertEqual(persisted.load(self.folder), kept)
        self.assertEqual((self.folder / "fleet.json").stat().st_mode & 0o777, 0o600)
        (self.folder / "fleet.json").write_text("{}")
        self.assertRaises(persisted.StateFault, persisted.load, self.folder)

    def test_only_one_actor_may_write(self) -> None:
        lock_file = persisted.lock(self.folder)
        self.assertIsNone(persisted.lock(self.folder))
        assert lock_file
        lock_file.close()
        again = persisted.lock(self.folder)
        assert again
        again.close()

    def test_endpoints_are_read_from_envoy_s_files(self) -> None:
        gateway = Gateway(self.folder, Listen("127.0.0.1", 1, 2))
        there: Published = {
            "m.x": (Endpoint("a", "10.0.0.1", 8000, 8001), Endpoint("b", "10.0.0.2", 8000, 9001))
        }
        gateway.publish(list(spec("m.x", "n").models.values()), there)
        self.assertEqual(Gateway(self.folder, gateway.listen).published(), there | {"n": ()})
        gateway.publish(list(spec("n").models.values()), {})
        self.assertEqual(gateway.published(), {"n": ()})

    def test_streams_have_no_timeout(self) -> None:
        models = list(spec("m").models.values())
        table = json.loads(envoy.routes(models))["resources"][0]["virtual_hosts"][0]["routes"]
        endless = [each["match"] for each in table if each.get("route", {}).get("timeout") == "0s"]
        paths = [match.get("path") or match["safe_regex"]["regex"] for match in endless]
        self.assertEqual(
            paths,
            [
                "/inference.GRPCInferenceService/ModelStreamInfer",
                "/v2/models/m/generate_stream",
                "/v2/models/m/versions/[0-9]+/generate_stream",
            ],
        )

    def test_models_without_retry_are_not_retried(self) -> None:
        entries = [{"name": "once", "need": NEED, "retry": False}, {"name": "again", "need": NEED}]
        models = list(specs.parse({"models": entries}, "w").models.values())
        table = json.loads(envoy.routes(models))["resources"][0]["virtual_hosts"][0]["routes"]
        on = {
            each["route"]["cluster"]: each["route"]["retry_policy"]["retry_on"]
            for each in table
            if "route" in each
        }
        self.assertEqual(on["grpc|once"], envoy.NOT_RUN)
        self.assertIn(",reset", on["grpc|again"])


if __name__ == "__main__":
    unittest.main()
