#!/usr/bin/env python3
"""Checks the manifests for Kubernetes and KServe against published schemas, each other and a running server.

Usage: manifests.py SHADOWSLICE_BINARY
"""

import ast
import copy
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import urllib.request
from pathlib import Path

import jsonschema
import yaml

import models
from server import free_port, wait_until

PACKAGING = Path(__file__).resolve().parents[2] / "packaging"
STOP = 56  # in seconds, as TimeoutStopSec in docs/operations/run.md

# Typical mistakes in a manifest, each with the manifest's kind, the place, and the wrong value.
SLIPS = [
    ("Deployment", ["spec", "replicas"], "2"),
    ("Deployment", ["spec", "template", "spec", "containers", 0, "ports", 0, "containerPort"], "8000"),
    ("Deployment", ["spec", "template", "spec", "containers", 0, "livenesProbe"], {}),
    ("Deployment", ["spec", "template", "spec", "securityContext", "runAsUser"], "10001"),
    ("DaemonSet", ["spec", "template", "spec", "nodeSelector", "nvidia.com/gpu.present"], True),
    ("DaemonSet", ["spec", "updateStrategy", "rollingUpdate", "maxUnavailabel"], 1),
    ("ConfigMap", ["data", "shadowslice.yaml"], {"gpus": []}),
    ("Service", ["spec", "ports", 0, "port"], "8000"),
    ("NetworkPolicy", ["spec", "podSelecter"], {}),
    ("PersistentVolumeClaim", ["spec", "accessModes"], "ReadOnlyMany"),
    ("PodMonitor", ["spec", "podMetricEndpoints"], []),
    ("PodMonitor", ["spec", "podMetricsEndpoints", 0, "interval"], 15),
    ("ClusterServingRuntime", ["spec", "supportedModelFormat"], []),
    ("ClusterServingRuntime", ["spec", "containers", 0, "startupProbe", "httpget"], {}),
    ("RayCluster", ["spec", "headGroupSpec", "rayStartParams", "num-cpus"], 0),
    ("RayCluster", ["spec", "workerGroupSpecs", 0, "replica"], 3),
    ("RayCluster", ["spec", "workerGroupSpecs", 0, "template", "spec", "containers", 1, "livenesProbe"], {}),
    ("ScaledObject", ["spec", "scaleTargetRef", "names"], "shadowslice"),
    ("ScaledObject", ["spec", "triggers", 0, "metadata", "threshold"], 80),
    ("InferenceService", ["spec", "predictor", "model", "modelFormat"], "onnx"),
]


def documents():
    return [document for file in sorted((PACKAGING / "kubernetes").glob("*.yaml"))
            for document in yaml.safe_load_all(file.read_text())]


def of_kind(kind):
    return next(document for document in documents() if document["kind"] == kind)


def faults(document):
    for file in sorted((PACKAGING / "schemas").glob("*.json")):
        schema = json.loads(file.read_text())
        if reference := schema["kinds"].get(document["kind"]):
            return [fault.message for fault in
                    jsonschema.Draft202012Validator(schema | {"$ref": reference}).iter_errors(document)]
    return [f"no schema knows a {document['kind']}"]


class Manifests(unittest.TestCase):
    def test_each_is_as_its_schema_says(self):
        for document in documents():
            self.assertEqual(faults(document), [], document["kind"])

    def test_slips_are_found(self):
        for kind, (*path, last), slip in SLIPS:
            document = copy.deepcopy(of_kind(kind))
            place = document
            for step in path:
                place = place[step]
            place[last] = slip
            self.assertNotEqual(faults(document), [], (kind, path, last))

    def test_pods_of_both_kinds_are_alike(self):
        deployment, daemons = (of_kind(kind)["spec"]["template"]["spec"] for kind in ("Deployment", "DaemonSet"))
        del daemons["nodeSelector"]
        for pod in (deployment, daemons):
            pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != "models"]
        self.assertEqual(deployment, daemons)

    def test_pods_are_found_and_have_time_to_end(self):
        settings = yaml.safe_load(of_kind("ConfigMap")["data"]["shadowslice.yaml"])
        lame_duck = int(settings["timeouts"]["lame_duck"].removesuffix("s"))
        version = re.search('^version = "(.*)"', (PACKAGING.parent / "Cargo.toml").read_text(), re.MULTILINE)[1]
        for kind in ("Deployment", "DaemonSet"):
            spec = of_kind(kind)["spec"]
            labels, pod = spec["template"]["metadata"]["labels"], spec["template"]["spec"]
            container, = pod["containers"]
            for document in documents():
                if document["metadata"]["name"].startswith("shadowslice-fleet"):
                    continue
                selector = document["spec"].get("selector") if "spec" in document else None
                if selector:
                    self.assertEqual(selector.get("matchLabels", selector), labels, document["kind"])
            self.assertGreaterEqual(pod["terminationGracePeriodSeconds"], STOP + lame_duck)
            self.assertEqual(container["image"], f"shadowslice:{version}")
            for port in container["ports"]:
                self.assertEqual(settings["listen"][port["name"]], [f"0.0.0.0:{port['containerPort']}"])
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            self.assertEqual(mounted, {volume["name"] for volume in pod["volumes"]})


class Fleet(unittest.TestCase):
    """Tests that the parts of fleet.yaml are consistent."""

    def setUp(self):
        self.all = [each for each in documents() if each["metadata"]["name"].startswith("shadowslice-fleet")]
        spec = self.of("RayCluster")["spec"]
        self.head, self.worker = spec["headGroupSpec"]["template"], spec["workerGroupSpecs"][0]["template"]

    def of(self, kind):
        return next(each for each in self.all if each["kind"] == kind)

    def test_ray_has_the_settings_that_nodes_have(self):
        source = ast.parse((PACKAGING.parent / "python/fleet/shadowslice_fleet/node.py").read_text())
        assigned = (node for node in source.body if isinstance(node, ast.Assign))
        settings = next(ast.literal_eval(node.value) for node in assigned if node.targets[0].id == "RAY_SETTINGS")
        for template in (self.head, self.worker):
            container = template["spec"]["containers"][0]
            self.assertEqual({each["name"]: each["value"] for each in container["env"]}, settings)

    def test_what_is_mounted_is_there_and_what_is_selected_too(self):
        for template in (self.head, self.worker):
            volumes = {volume["name"] for volume in template["spec"]["volumes"]}
            mounted = {mount["name"] for each in template["spec"]["containers"] for mount in each["volumeMounts"]}
            self.assertEqual(mounted, volumes)
        labels = [template["metadata"]["labels"] for template in (self.head, self.worker)]
        for document in self.all:
            selector = document["spec"].get("selector") if document["kind"] == "Service" else None
            selector = selector or document.get("spec", {}).get("podSelector", {}).get("matchLabels")
            if selector:
                self.assertTrue(any(selector.items() <= each.items() for each in labels), document)

    def test_ports_and_paths_fit(self):
        given = {name: yaml.safe_load(text) for name, text in self.of("ConfigMap")["data"].items()}
        supervisor = self.worker["spec"]["containers"][1]
        for port in supervisor["ports"]:
            self.assertEqual(given["base.yaml"]["listen"][port["name"]], [f"0.0.0.0:{port['containerPort']}"])
        gateway = {port["name"]: port["containerPort"] for port in self.head["spec"]["containers"][2]["ports"]}
        self.assertEqual(given["gateway.yaml"], {"http_port": gateway["http"], "grpc_port": gateway["grpc"]})
        self.assertIn(f"config={given['host.yaml']['config']}\n", supervisor["args"][0])
        lame_duck = int(given["base.yaml"]["timeouts"]["lame_duck"].removesuffix("s"))
        self.assertGreaterEqual(self.worker["spec"]["terminationGracePeriodSeconds"], STOP + lame_duck)
        named = {each["files"].split("/")[1] for each in given["wish.yaml"]["models"]}
        self.assertLessEqual(named, {mount["mountPath"].strip("/") for mount in supervisor["volumeMounts"]})


class Configurations(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="ss-", dir="/tmp"))
        self.addCleanup(shutil.rmtree, self.folder)
        models.make(self.folder)

    def test_shipped_ones_have_no_faults(self):
        mounted = of_kind("ConfigMap")["data"]["shadowslice.yaml"]
        base = next(each for each in documents() if "base.yaml" in each.get("data", {}))["data"]["base.yaml"]
        mounted = mounted.replace("/models/resnet50.onnx", str(self.folder / "dynamic.onnx"))
        image = (PACKAGING / "container.yaml").read_text()
        image = image.replace("/opt/shadowslice/share/shadowslice", str(PACKAGING.parent / "configs"))
        for text in (mounted, base, image):
            config = self.folder / "shadowslice.yaml"
            config.write_text(text)
            checked = subprocess.run([BINARY, "check", config], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                     env=os.environ | {"RUNTIME_DIRECTORY": str(self.folder)})
            self.assertTrue(checked.stdout.endswith(": valid\n"), checked.stdout)

    def test_kserve_serves_a_folder_with_one_model(self):
        (self.folder / "models/deep").mkdir(parents=True)
        (self.folder / "unbatched.onnx").rename(self.folder / "models/deep/model.onnx")
        self.assert_serves("resnet50")

    def test_kserve_serves_what_the_folder_says(self):
        (self.folder / "models").mkdir()
        (self.folder / "unbatched.onnx").rename(self.folder / "models/unbatched.onnx")
        (self.folder / "models/shadowslice.yaml").write_text(
            'listen: {http: ["0.0.0.0:8080"]}\ngpus: [{device: emulated}]\n'
            "models: [{name: mine, path: unbatched.onnx, slo: 1s, batch: {max: 0}}]\n")
        self.assert_serves("mine")

    def test_kserve_serves_the_newest_version_and_says_which(self):
        for name in ("a/2/model.onnx", "a/10/model.onnx", "a/9/model.onnx", "b.onnx"):
            (self.folder / "models" / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / "models" / name).write_bytes(b"")
        self.assert_names("models/a/10/model.onnx")
        # KServe mounts a volume, and makes the folder of the models a link to the volume.
        (self.folder / "models").rename(self.folder / "volume")
        (self.folder / "models").symlink_to(self.folder / "volume")
        self.assert_names("models/a/10/model.onnx")
        shutil.rmtree(self.folder / "volume/a")
        (self.folder / "volume/a.onnx").write_bytes(b"")
        self.assert_names("models/a.onnx")
        for file in ("a.onnx", "b.onnx"):
            (self.folder / "volume" / file).unlink()
        self.assertIn("error: no .onnx file in ", self.run_kserve().stderr)

    def assert_names(self, model):
        done = self.run_kserve()
        self.assertIn(f"serving {self.folder}/{model}\n", done.stderr)
        self.assertIn(f'path: "{self.folder}/{model}"', (self.folder / "serve.yaml").read_text())

    def run_kserve(self):
        """Runs the command of the serving runtime. An empty program replaces shadowslice."""
        container, = of_kind("ClusterServingRuntime")["spec"]["containers"]
        (self.folder / "shadowslice").write_text("#!/bin/sh\n")
        (self.folder / "shadowslice").chmod(0o755)
        given = {each["name"]: each["value"] for each in container["env"]}
        given |= {"MODELS": str(self.folder / "models"), "RUNTIME_DIRECTORY": str(self.folder),
                  "PATH": f"{self.folder}:{os.environ['PATH']}"}
        return subprocess.run([*container["command"], *container["args"]], env=given, text=True, capture_output=True,
                              timeout=30)

    def assert_serves(self, model):
        """Runs the command of the serving runtime with free ports and another folder of models."""
        container, = of_kind("ClusterServingRuntime")["spec"]["containers"]
        given = {each["name"]: each["value"].replace("{{.Name}}", "resnet50") for each in container["env"]}
        given |= {"MODELS": str(self.folder / "models"), "GPUS": "[{device: emulated}]",
                  "RUNTIME_DIRECTORY": str(self.folder), "PATH": f"{BINARY.parent}:{os.environ['PATH']}"}
        ports = {port: str(free_port()) for port in ("8080", "9000", "8002")}

        def moved(text):
            return re.sub("8080|9000|8002", lambda port: ports[port[0]], text)

        own = self.folder / "models/shadowslice.yaml"
        if own.exists():
            own.write_text(moved(own.read_text()))
        script, = container["args"]
        log = open(self.folder / "log", "w+")
        self.addCleanup(log.close)
        server = subprocess.Popen([*container["command"], moved(script)], env=given, stderr=log)
        try:
            def ready():
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{ports['8080']}/v2/models/{model}/ready") as answer:
                        return answer.status == 200
                except OSError:
                    return server.poll() is not None
            wait_until(ready)
            log.seek(0)
            self.assertIsNone(server.poll(), log.read())
        finally:
            server.send_signal(2)
            server.wait(30)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    BINARY = Path(sys.argv[1]).resolve()
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
