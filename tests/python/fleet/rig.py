"""A gateway and three hosts, each in a network namespace of its own, on one bridge."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from units import Unit, command_of, environment_of, kill, pids, wait_until

HTTP, GRPC, RAY = 8000, 8001, 6379
GPUS = {"a": 1, "b": 1, "c": 2}
ADDRESSES = {"gw": 1, "a": 2, "b": 3, "c": 4}
SETTLED_WITHIN = 90.0  # seconds
COMMAND_WITHIN = 150.0
SHELL = 'mkdir -p "$0" /tmp/ray && mount --bind "$0" /tmp/ray && exec "$@"'


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, text=True, stdout=subprocess.PIPE).stdout


@dataclass
class Rig:
    binary: str
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ssf-", dir="/tmp")))
    tag: str = f"ssf{os.getpid() % 100000}"
    supervisors: dict[str, Unit] = field(default_factory=dict)
    nodes: dict[str, Unit] = field(default_factory=dict)
    gateway: Unit | None = None

    def start(self, hosts: str = "abc") -> None:
        self._network()
        self._configure()
        assert self.gateway
        self.gateway.start()
        self.nodes["gw"].start()
        for host in hosts:
            self.supervisors[host].start()
        wait_until(lambda: self.cli("status", check=False).returncode == 0, 60, "the head")
        for host in hosts:
            self.nodes[host].start()

    def stop(self) -> None:
        """All units, then what they left; returns nothing and leaves nothing."""
        nodes = [self.nodes[name] for name in (*GPUS, "gw") if name in self.nodes]
        for unit in [*nodes, *self.supervisors.values(), self.gateway]:
            if unit:
                unit.wanted = False
        for unit in [*self.supervisors.values(), self.gateway, *nodes]:
            if unit:
                unit.stop()
        for name in ADDRESSES:
            if f"{self.tag}-{name}" in ip("netns", "list"):
                for pid in self.pids(name):
                    kill(pid)
                ip("netns", "del", f"{self.tag}-{name}")
        subprocess.run(["ip", "link", "del", self.tag], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(self.folder)

    @property
    def subnet(self) -> str:
        return f"10.91.{os.getpid() % 250}"

    def address(self, name: str) -> str:
        return f"{self.subnet}.{ADDRESSES[name]}"

    def pids(self, name: str) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", f"{self.tag}-{name}").split()]

    def kill_host(self, name: str) -> None:
        """kill -9 of the supervisor, its workers and the raylet with all that it started."""
        self.supervisors[name].kill_all()
        self.nodes[name].kill_all()

    def reload_gateway(self) -> None:
        """The next Envoy takes over."""
        assert self.gateway and self.gateway.process
        self.gateway.process.send_signal(signal.SIGHUP)

    def link(self, name: str, up: bool) -> None:
        ip("link", "set", f"{self.tag}{name}", "up" if up else "down")

    def cli(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        process = self.cli_in_background(*arguments)
        try:
            said, errors = process.communicate(timeout=COMMAND_WITHIN)
        finally:
            process.kill()
        done = subprocess.CompletedProcess(arguments, process.returncode, said, errors)
        if check and done.returncode != 0:
            raise RuntimeError(
                f"{arguments} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
            )
        return done

    def cli_in_background(self, *arguments: str) -> "subprocess.Popen[str]":
        command = self._inside("gw", [sys.executable, "-m", "shadowslice_fleet.cli"])
        command += ["--ray", f"{self.address('gw')}:{RAY}", *arguments]
        return subprocess.Popen(
            command,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment("gw"),
        )

    def keep_logs(self, folder: Path) -> None:
        for name in ADDRESSES:
            for log in [
                *(self.folder / name).glob("*.log"),
                *(self.folder / name).glob("ray/session_2*/logs/*"),
            ]:
                if log.is_file():
                    (folder / name / log.parent.parent.name).mkdir(parents=True, exist_ok=True)
                    shutil.copy(log, folder / name / log.parent.parent.name)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.cli("status", "--json").stdout)
        return status

    def wish(self, models: list[dict[str, Any]], name: str = "wish.yaml") -> Path:
        path = self.folder / name
        path.write_text(yaml.safe_dump({"models": models}))
        return path

    def supervisor_status(self, host: str) -> dict[str, Any]:
        said = subprocess.run(
            [self.binary, "status", "--json", "--run-dir", str(self.folder / host / "run")],
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            timeout=10,
        )
        status: dict[str, Any] = json.loads(said.stdout)
        return status

    def _network(self) -> None:
        ip("link", "add", self.tag, "type", "bridge")
        ip("addr", "add", f"{self.subnet}.254/24", "dev", self.tag)
        ip("link", "set", self.tag, "up")
        for name in ADDRESSES:
            space, outer = f"{self.tag}-{name}", f"{self.tag}{name}"
            ip("netns", "add", space)
            ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", outer, "master", self.tag, "up")
            ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def _inside(self, name: str, command: list[str]) -> list[str]:
        """In the namespace, with a folder for Ray of its own."""
        ray = str(self.folder / name / "ray")
        return ["ip", "netns", "exec", f"{self.tag}-{name}", "sh", "-c", SHELL, ray, *command]

    def _environment(self, name: str) -> dict[str, str]:
        return os.environ | {
            "SHADOWSLICE_FLEET_HOST": str(self.folder / name / "host.yaml"),
            "SHADOWSLICE_FLEET_GATEWAY": str(self.folder / name / "gateway.yaml"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def _unit(self, kind: str, name: str, command: list[str]) -> Unit:
        return Unit(
            f"{self.tag}-{kind}-{name}",
            self._inside(name, command),
            self._environment(name),
            self.folder / name / f"{kind}.log",
            mixed=kind != "node",
        )

    def _configure(self) -> None:
        fleet = [sys.executable, "-m", "shadowslice_fleet.cli"]
        for name in ADDRESSES:
            (self.folder / name).mkdir()
        settings = {
            "address": self.address("gw"),
            "binary": self.binary,
            "run_dir": str(self.folder / "gw" / "run"),
            "state": str(self.folder / "gw" / "state"),
            "settle": "10s",
        }
        (self.folder / "gw" / "gateway.yaml").write_text(yaml.safe_dump(settings))
        self.gateway = self._unit("gateway", "gw", [*fleet, "gateway"])
        head = [*fleet, "node", "--head", "--address", self.address("gw"), "--port", str(RAY)]
        self.nodes["gw"] = self._unit("node", "gw", head)
        for name, gpus in GPUS.items():
            self._host(name, gpus)
            join = [
                "node",
                "--join",
                f"{self.address('gw')}:{RAY}",
                "--address",
                self.address(name),
            ]
            self.nodes[name] = self._unit("node", name, [*fleet, *join])
            serve = [self.binary, "serve", str(self.folder / name / "shadowslice.yaml")]
            self.supervisors[name] = self._unit("supervisor", name, serve)

    def _host(self, name: str, gpus: int) -> None:
        folder = self.folder / name
        base = {
            "run_dir": str(folder / "run"),
            "listen": {
                "http": [f"{self.address(name)}:{HTTP}"],
                "grpc": [f"{self.address(name)}:{GRPC}"],
                "metrics": [],
            },
            "gpus": [{"device": "emulated", "sms": 132}] * gpus,
            "timeouts": {"lame_duck": "2s"},
            "models": [],
        }
        # Without aliases for the GPUs that are alike.
        (folder / "base.yaml").write_text(json.dumps(base))
        (folder / "shadowslice.yaml").write_text(json.dumps(base))
        settings = {
            "name": name,
            "address": self.address(name),
            "http_port": HTTP,
            "grpc_port": GRPC,
            "binary": self.binary,
            "run_dir": str(folder / "run"),
            "base": str(folder / "base.yaml"),
            "config": str(folder / "shadowslice.yaml"),
            "files": str(folder / "files"),
        }
        (folder / "host.yaml").write_text(yaml.safe_dump(settings))


def left_behind(rig: Rig) -> list[str]:
    """Processes, namespaces and links of the rig."""
    tag = rig.tag.encode()
    found = [
        command_of(pid) for pid in pids() if b"SHADOWSLICE_TEST_UNIT=" + tag in environment_of(pid)
    ]
    found += [line for line in ip("netns", "list").splitlines() if line.startswith(rig.tag)]
    found += [line for line in ip("-o", "link").splitlines() if f": {rig.tag}" in line]
    return found + ([str(rig.folder)] if rig.folder.exists() else [])
