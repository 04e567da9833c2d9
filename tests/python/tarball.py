#!/usr/bin/env python3
"""Builds the tarball from the given binaries, unpacks it, and tests the server and its documentation.

Usage: tarball.py SHADOWSLICE_BINARY ONNXRUNTIME_FOLDER
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import models
from server import unix_http, wait_until

SOURCE = Path(__file__).resolve().parents[2]
COMMANDS = "serve init check status top resize reload upgrade hold release drain undrain plan doctor profile".split()


def run(*command, **more):
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, **more).stdout


def pack(folder, **more):
    return Path(run(SOURCE / "packaging/tarball", BINARY.parent, ONNXRUNTIME, folder, **more).split()[-1])


class Tarball(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Path(tempfile.mkdtemp(prefix="ss-", dir="/tmp"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.packed = pack(cls.folder / "first")
        run("tar", "--extract", "--file", cls.packed, "--directory", cls.folder)
        cls.top = cls.folder / cls.packed.name.removesuffix(".tar.gz")

    def test_a_commit_gives_the_same_bytes_again(self):
        umask = os.umask(0o077)
        self.addCleanup(os.umask, umask)
        elsewhere = {"TMPDIR": "/var/tmp", "LC_ALL": "C.UTF-8", "TZ": "Asia/Tokyo"}
        again = pack(self.folder / "second", env=os.environ | elsewhere)
        self.assertTrue(self.packed.read_bytes() == again.read_bytes())

    def test_links_in_the_documents_lead_somewhere(self):
        broken = []
        for page in [*self.top.rglob("*.md")]:
            for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
                if "://" not in link and not link.startswith("#") and not (page.parent / link.split("#")[0]).exists():
                    broken.append(f"{page.relative_to(self.top)}: {link}")
        self.assertEqual(broken, [])

    def test_an_example_serves_at_once(self):
        for name in ("vision", "text"):
            self.assertEqual(self.served("configs/two-emulated.yaml", name)["name"], name)

    def test_onnx_runtime_is_found(self):
        models.make(self.folder)
        config = self.folder / "onnx.yaml"
        config.write_text("gpus: [{device: emulated}]\nmodels: [{path: unbatched.onnx, slo: 100ms, batch: {max: 0}}]\n")
        self.assertEqual(self.served(config, "unbatched")["outputs"][0]["shape"], [2, 4])

    def test_what_init_writes_serves_at_once(self):
        first = self.folder / "first-model"
        run(self.top / "bin/shadowslice", "init", first)
        config = first / "shadowslice.yaml"
        # In the tests, PYTHONPATH leads to NumPy, so the workers need this variable.
        config.write_text(config.read_text() + "workers: {environment: [PYTHONPATH]}\n")
        self.assertEqual(self.served(config, "first")["platform"], "python")

    def served(self, config, model):
        """Starts a server as a new user would. Returns the model's metadata."""
        run_dir = self.folder / "run"
        environment = {"RUNTIME_DIRECTORY": str(run_dir), "PATH": os.environ["PATH"],
                       "PYTHONPATH": os.environ["PYTHONPATH"]}
        with open(self.folder / "log", "w+") as log:
            server = subprocess.Popen(["bin/shadowslice", "serve", config], cwd=self.top, env=environment, stderr=log)
            try:
                wait_until(lambda: server.poll() is not None or answer(run_dir, f"models/{model}/ready")[0] == 200)
                log.seek(0)
                self.assertIsNone(server.poll(), log.read())
                return json.loads(answer(run_dir, f"models/{model}")[1])
            finally:
                server.terminate()
                server.wait(30)

    def test_programs_have_no_debug_information(self):
        for program in ("shadowslice", "shadowslice-worker"):
            sections = run("readelf", "--sections", "--wide", self.top / "bin" / program)
            self.assertIn(".text", sections)
            for symbols in (".debug_info", ".debug_line", ".symtab"):
                self.assertNotIn(symbols, sections)

    def test_licences_are_there(self):
        said = [(self.top / "licences" / name).read_text() for name in ("onnxruntime.txt", "rust-crates.txt")]
        self.assertIn("Microsoft", said[0])
        for crate in ("tokio ", "hyper ", "ort ", "tikv-jemalloc-sys "):
            self.assertIn(f"\n{crate}", said[1])
        self.assertIn("jemalloc source distribution", said[1])
        for name in ("LICENSE-MIT", "LICENSE-APACHE", "README.md", "CHANGELOG.md", "lib/systemd/system/shadowslice.service"):
            self.assertTrue((self.top / name).is_file(), name)

    def test_each_command_has_a_page(self):
        pages = self.top / "share/man/man1"
        for command in COMMANDS:
            text = (pages / f"shadowslice-{command}.1").read_text()
            self.assertIn(f"shadowslice {command}", text)
        if not shutil.which("mandoc"):
            self.skipTest("mandoc not found")
        # The test ignores two warnings about clap's man pages: a missing date, and a line break before "Possible values".
        faults = [subprocess.run(["mandoc", "-T", "lint", "-W", "warning", page], text=True, stdout=subprocess.PIPE).stdout
                  for page in sorted(pages.iterdir())]
        faults = [line for text in faults for line in text.splitlines()
                  if not line.endswith("br after sp") and "cannot parse date" not in line]
        self.assertEqual(faults, [])

    def test_shells_complete_each_command(self):
        share = self.top / "share"
        bash = share / "bash-completion/completions/shadowslice"
        offered = run("bash", "-c", f"source {bash}; COMP_WORDS=(shadowslice ''); COMP_CWORD=1; "
                      "_shadowslice shadowslice '' shadowslice; echo ${COMPREPLY[@]}").split()
        for command in COMMANDS:
            self.assertIn(command, offered)
        for file in ("zsh/vendor-completions/_shadowslice", "fish/vendor_completions.d/shadowslice.fish"):
            text = (share / file).read_text()
            self.assertEqual([command for command in COMMANDS if command not in text], [])


def answer(run_dir, target):
    try:
        return unix_http(f"{run_dir}/http.sock", "GET", f"/v2/{target}")
    except OSError:
        return None, b""


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    BINARY, ONNXRUNTIME = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
