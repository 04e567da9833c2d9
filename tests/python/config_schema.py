#!/usr/bin/env python3
"""Checks the JSON Schema of `shadowslice check --schema` with a validator: files that `check` accepts, and slips.

Usage: config_schema.py SHADOWSLICE_BINARY
"""

import copy
import json
import re
import subprocess
import sys
import unittest
from pathlib import Path

import jsonschema
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python/fleet"))
from shadowslice_fleet import spec  # noqa: E402

# Editors read YAML 1.2, in which `off` is text. These are its scalars.
SCALARS = {
    "bool": r"true|false",
    "null": r"~|null|",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
}

# Typical mistakes, each with the place in everything.yaml and the wrong value.
SLIPS = [
    (["modles"], []),
    (["run_dir"], ["/run"]),
    (["start"], "lenint"),
    (["listen", "htp"], []),
    (["listen", "http"], ["unix:x.sock"] * 65),
    (["listen", "http", 1, "mode"], "0999"),
    (["gpus"], []),
    (["gpus", 0, "sms"], 1),
    (["gpus", 1, "device"], 1024),
    (["gpus", 1, "device"], "cuda0"),
    (["gpus", 1, "partition"], "mig"),
    (["models", 0, "slo"], 20),
    (["models", 0, "slo"], "20 ms"),
    (["models", 0, "slo", "percentile"], 0.99),
    (["models", 0, "slo", "percentile"], 100),
    (["models", 0, "share", "min"], 10),
    (["models", 0, "share", "max"], "101%"),
    (["models", 0, "share", "inital"], "10%"),
    (["models", 0, "threads"], 0),
    (["models", 0, "priority"], 1001),
    (["models", 0, "providers"], ["rocm"]),
    (["models", 0, "batch", "max"], 1025),
    (["models", 0, "batch", "sizes", 0], 0),
    (["models", 0, "queue", "memory"], "256MB"),
    (["models", 0, "cpus"], 2),
    (["models", 0, "standby"], False),
    (["models", 0, "warmup", "mask"], [0]),
    (["models", 1, "tensors", 0, "datatype"], "FP8"),
    (["model_control"], "everyone"),
    (["controller", "act"], "yes"),
    (["controller", "interval"], 100),
    (["controller", "policy"], "adaptiv"),
    (["limits", "in_flight"], 0),
    (["limits", "response_bytes"], 3 << 30),
    (["timeouts", "spawn"], "10"),
    (["tracing", "sample"], "101%"),
    (["workers", "users"], 61000),
]


class Yaml12(yaml.SafeLoader):
    yaml_implicit_resolvers = {}


for kind, pattern in SCALARS.items():
    Yaml12.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(f"^(?:{pattern})$"), None)


def read(path):
    return yaml.load(path.read_text(), Yaml12)


class ConfigSchema(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        printed = subprocess.run([BINARY, "check", "--schema"], check=True, capture_output=True).stdout
        schema = json.loads(printed)
        jsonschema.Draft202012Validator.check_schema(schema)
        cls.schema = schema
        cls.validator = jsonschema.Draft202012Validator(schema)
        cls.everything = ROOT / "supervisor/config/tests/config/everything.yaml"

    def faults(self, document):
        return [fault.message for fault in self.validator.iter_errors(document)]

    def test_accepts_each_file_that_the_supervisor_accepts(self):
        golden = sorted((ROOT / "supervisor/config/tests/config").glob("*.expected"))
        fine = [file.with_suffix(".yaml") for file in golden if file.read_text().splitlines()[-1] == "fine"]
        files = [*sorted((ROOT / "configs").rglob("*.yaml")), *fine]
        self.assertGreater(len(files), 15)
        for file in files:
            # The schema does not have the former suffix, although the supervisor still accepts it.
            if file.stem != "former-suffix":
                self.assertEqual(self.faults(read(file)), [], file)

    def test_accepts_what_check_prints(self):
        printed = subprocess.run([BINARY, "check", "--print", self.everything], capture_output=True).stdout
        self.assertEqual(self.faults(yaml.load(printed, Yaml12)), [])

    def test_refuses_slips(self):
        for (*path, last), slip in SLIPS:
            document = copy.deepcopy(read(self.everything))
            place = document
            for step in path:
                place = place[step]
            place[last] = slip
            self.assertNotEqual(self.faults(document), [], (path, last, slip))

    def test_refuses_missing_keys_and_slips_in_profiles(self):
        profile = read(ROOT / "configs/profiles/resnet50.yaml")
        for change in [{"bandwidth": 1.5}, {"kernels": 0}, {"wieghts": 1}, {"memory": {"context": "400MB"}}]:
            self.assertNotEqual(self.faults(profile | change), [], change)
        for document in [{}, {"models": [{"path": "m.onnx"}]}, {"models": [None]}, "models", None]:
            self.assertNotEqual(self.faults(document), [], document)

    def test_keys_of_a_model_are_those_of_a_fleet(self):
        keys = set(self.schema["$defs"]["model"]["properties"])
        self.assertEqual(keys - spec.FLEET_KEYS, spec.SUPERVISOR_KEYS)


if __name__ == "__main__":
    BINARY = str(Path(sys.argv.pop(1)).resolve())
    unittest.main()
