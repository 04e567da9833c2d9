#!/usr/bin/env python3
"""Builds the Debian package from the given binaries. Installs, runs, upgrades and purges the package with dpkg.

Usage: deb.py SHADOWSLICE_BINARY ONNXRUNTIME_FOLDER

The test installs the package in an overlay file system over this host's root, which disappears when the test ends. The
test is skipped without root privileges or Debian's dpkg. A script replaces systemd, and reports that the unit is active.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from server import unix_http, wait_until

SOURCE = Path(__file__).resolve().parents[2]
CONFIG = Path("/etc/shadowslice/shadowslice.yaml")
RUN_DIR = Path("/run/shadowslice")
INSIDE = "SHADOWSLICE_THROWAWAY"


def run(*command, **more):
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)
    if done.returncode != 0:
        raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def pack(folder):
    quick = os.environ | {"DPKG_DEB_COMPRESSOR_LEVEL": "0"}
    return Path(run(SOURCE / "packaging/deb", sys.argv[1], sys.argv[2], folder, env=quick).split()[-1])


def throwaway():
    """Restarts this script in an overlay of the host's root. All processes there end when this process ends."""
    if INSIDE in os.environ:
        return
    missing = [program for program in ("dpkg-deb", "dpkg-shlibdeps", "unshare") if not shutil.which(program)]
    if missing or os.geteuid() != 0:
        sys.exit(print(f"skipped: installing a package needs {', '.join(missing) or 'root'}"))
    script = """
        mount -t tmpfs tmpfs "$0" && mkdir "$0"/upper "$0"/work "$0"/merged || exit 77
        mount -t overlay overlay -o lowerdir=/,upperdir="$0"/upper,workdir="$0"/work "$0"/merged || exit 77
        mount -t tmpfs tmpfs "$0"/merged/run && mount -t proc proc "$0"/merged/proc || exit 77
        mount --rbind /dev "$0"/merged/dev || exit 77
        exec chroot "$0"/merged "$@"
    """
    with tempfile.TemporaryDirectory(prefix="ss-", dir="/var/tmp") as root:
        space = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", script, root]
        ended = subprocess.run([*space, sys.executable, __file__, *map(os.path.abspath, sys.argv[1:3]), *sys.argv[3:]],
                               env=os.environ | {INSIDE: "1"}).returncode
    sys.exit(print("skipped: cannot mount an overlay here") if ended == 77 else ended)


class Package(unittest.TestCase):
    def test_its_life(self):
        folder = Path(tempfile.mkdtemp())
        package = pack(folder)
        if shutil.which("lintian"):
            self.assertEqual(run("lintian", "--allow-root", "--fail-on", "error,warning", package), "")
        before = left()
        run("dpkg", "--install", package)
        self.assertFalse(list(Path("/etc/systemd/system").rglob("shadowslice.service")), "it must not be enabled")
        self.assertIn("/usr/share/man/man1/shadowslice-serve.1.gz", run("man", "--where", "shadowslice-serve"))
        run("shadowslice", "check", CONFIG)
        if shutil.which("systemd-analyze"):
            said = run("systemd-analyze", "verify", "/usr/lib/systemd/system/shadowslice.service")
            self.assertNotIn("shadowslice", said)

        server = Service()
        self.assertEqual(server.infer(), [1.0] * 16)
        CONFIG.write_text(CONFIG.read_text().replace("slo: 80ms", "slo: 70ms"))
        played_systemd(folder / "told")
        run("dpkg", "--install", package)
        self.assertEqual(server.process.wait(60), 0)
        self.assertEqual(server.infer(), [1.0] * 16)
        self.assertIn("slo: 70ms", CONFIG.read_text(), "the operator's configuration must stay")
        self.assertNotIn("restart", (folder / "told").read_text())

        whole, serving = CONFIG.read_text(), server.pid()
        CONFIG.write_text(whole + "nonsense: 1\n")
        run("dpkg", "--install", package)
        self.assertEqual((server.pid(), server.infer()), (serving, [1.0] * 16), "nothing else can serve")
        self.assertNotIn("restart", (folder / "told").read_text())
        CONFIG.write_text(whole)

        run("kill", str(server.pid()))
        wait_until(lambda: not (RUN_DIR / "http.sock").exists())
        run("dpkg", "--install", package)
        self.assertIn("restart shadowslice.service", (folder / "told").read_text(), "no supervisor hands over")
        CONFIG.with_name("tokens").write_text("the operator's\n")
        run("dpkg", "--remove", "shadowslice")
        self.assertTrue(CONFIG.exists())
        self.assertFalse(shutil.which("shadowslice"))
        run("dpkg", "--purge", "shadowslice")
        self.assertEqual(left() - before, {Path("/etc/shadowslice"), CONFIG.with_name("tokens")})


class Service:
    """A service that runs as its own user in a folder that systemd would create."""

    def __init__(self):
        RUN_DIR.mkdir(exist_ok=True)
        shutil.chown(RUN_DIR, "shadowslice", "shadowslice")
        self.process = subprocess.Popen(
            ["runuser", "--user", "shadowslice", "--", "/usr/bin/shadowslice", "serve", CONFIG],
            env={"PATH": os.environ["PATH"], "RUNTIME_DIRECTORY": str(RUN_DIR)})
        wait_until(lambda: self.process.poll() is not None or self.ready())
        if self.process.poll() is not None:
            raise AssertionError(f"the service ended with {self.process.returncode}")

    def ready(self):
        try:
            return unix_http(f"{RUN_DIR}/http.sock", "GET", "/v2/health/ready")[0] == 200
        except OSError:
            return False

    def infer(self):
        tensor = {"name": "x", "shape": [1, 16], "datatype": "FP32", "data": [1.0] * 16}
        said = unix_http(f"{RUN_DIR}/http.sock", "POST", "/v2/models/example/infer", json.dumps({"inputs": [tensor]}))
        return json.loads(said[1])["outputs"][0]["data"]

    def pid(self):
        return int(run("pgrep", "--full", "--oldest", "^/usr/bin/shadowslice serve"))


def played_systemd(told):
    Path("/run/systemd/system").mkdir(parents=True, exist_ok=True)
    told.touch()
    for name in ("systemctl", "deb-systemd-invoke"):
        script = Path("/usr/bin", name)
        script.unlink(missing_ok=True)
        script.write_text(f'#!/bin/sh\necho "$@" >> {told}\n')
        script.chmod(0o755)


def left():
    """Returns the package's files that are left in the system's folders, except for the cache of `man`."""
    places = [place for place in ("/etc", "/usr", "/var", "/run") if Path(place).exists()]
    found = run("find", *places, "-xdev", "-path", "*shadowslice*", "-not", "-path", "/var/tmp/*",
                "-not", "-path", "/var/cache/man/*")
    return {Path(line) for line in found.splitlines()}


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    throwaway()
    sys.argv[1] = os.path.dirname(sys.argv[1])
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
