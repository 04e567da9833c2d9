#!/usr/bin/env python3
"""Tests `shadowslice check --run` with valid and invalid models. The command must leave nothing behind.

Usage: check_run.py SHADOWSLICE_BINARY [unittest arguments]
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

from onnx import TensorProto, helper

from models import write
from server import wait_until

BINARY = None
FLOAT = TensorProto.FLOAT

FINE = """
from shadowslice import Tensor

class Fine:
    inputs = {"x": Tensor("FP32", [-1, 4])}
    outputs = {"y": Tensor("FP32", [-1, 4])}

    def infer(self, batch):
        return {"y": batch["x"]}
"""


def onnx(folder, name, operator):
    write(folder, name, [helper.make_node(operator, ["x"], ["y"])], [("x", FLOAT, ["rows", 4])],
          [("y", FLOAT, ["rows", 4])], [])


def python(folder, name, text):
    (folder / f"{name}.py").write_text(text)


class CheckRun(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="ss-", dir="/tmp")
        self.addCleanup(folder.cleanup)
        self.folder, self.temporary = Path(folder.name), Path(folder.name) / "tmp"
        self.temporary.mkdir()

    def started(self, models, more=""):
        lines = [f"  - {{path: {path}, slo: 1s, batch: {{max: 4}}}}" for path in models]
        file = self.folder / "config.yaml"
        head = f"gpus: [{{device: emulated, sms: 132}}]\nworkers: {{environment: [PYTHONPATH]}}\n{more}\nmodels:"
        file.write_text("\n".join([head, *lines]) + "\n")
        return subprocess.Popen([BINARY, "check", "--run", str(file)], text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, start_new_session=True,
                                env=os.environ | {"TMPDIR": str(self.temporary), "XDG_RUNTIME_DIR": str(self.folder)})

    def check(self, models, more=""):
        process = self.started(models, more)
        out, err = process.communicate(timeout=180)
        self.assert_nothing_stays(process.pid)
        return process.returncode, out, err

    def processes(self, session):
        """Returns the processes of a session, without zombies."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(stat.parent.name))
        return found

    def assert_nothing_stays(self, session):
        self.assertEqual(self.processes(session), [])
        self.assertEqual(list(self.temporary.iterdir()), [])

    def test_models_that_can_be_served_say_what_they_have(self):
        onnx(self.folder, "relu", "Relu")
        python(self.folder, "echo", FINE)
        code, out, err = self.check(["relu.onnx", "echo.py"])
        self.assertEqual((code, err), (0, ""), out)
        for name in ["relu", "echo"]:
            self.assertRegex(out, rf"(?m)^{name}: ready after .*, on GPU 0 with 50% \(64 SMs\)$")
        self.assertEqual(out.count("inputs: x FP32 [-1, 4]; outputs: y FP32 [-1, 4]"), 2, out)
        rows = re.findall(r"batches of at most 4 rows; rows and times in warm-up: 1 in .*, 2 in .*, 4 in ", out)
        self.assertEqual(len(rows), 2, out)
        self.assertIn("2 of 2 models can be served\n", out)

    def test_a_model_that_cannot_be_served_is_named_and_the_others_are_tried(self):
        python(self.folder, "raises", "import nothing_of_this_name\n" + FINE)
        onnx(self.folder, "unknown", "NoSuchOperator")
        onnx(self.folder, "relu", "Relu")
        code, out, err = self.check(["raises.py", "unknown.onnx", "relu.onnx"])
        self.assertEqual(code, 1, out + err)
        self.assertRegex(err, r"(?m)^raises: cannot be served: .*nothing_of_this_name")
        self.assertRegex(err, r"(?m)^unknown: cannot be served: .*NoSuchOperator")
        self.assertRegex(out, r"(?m)^relu: ready after")
        self.assertIn("1 of 3 models can be served\n", out)

    def test_a_start_that_takes_too_long_is_given_up(self):
        python(self.folder, "sleeps", "import time\ntime.sleep(3600)\n" + FINE)
        begun = time.monotonic()
        code, out, err = self.check(["sleeps.py"], "timeouts: {spawn: 1s, warm: 1s, stop: 1s}")
        self.assertEqual(code, 1, out + err)
        self.assertRegex(err, r"(?m)^sleeps: cannot be served: ")
        self.assertLess(time.monotonic() - begun, 60)

    def test_a_signal_ends_it_with_its_workers(self):
        python(self.folder, "sleeps", "import time\ntime.sleep(3600)\n" + FINE)
        process = self.started(["sleeps.py"])
        self.addCleanup(process.kill)
        wait_until(lambda: len(self.processes(process.pid)) > 1)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 1, out + err)
        self.assertIn("a signal stopped the check before all models were started", err)
        self.assert_nothing_stays(process.pid)

    def test_faults_of_the_configuration_come_first(self):
        process = self.started(["absent.onnx"])
        out, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 78, out + err)
        self.assertNotIn("can be served", out)


if __name__ == "__main__":
    BINARY = os.path.abspath(sys.argv.pop(1))
    unittest.main()
