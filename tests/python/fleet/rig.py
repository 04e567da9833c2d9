"""A fleet of a gateway and three hosts on this machine."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from network import HOSTS, Loopback, Namespaces
from units import Unit, command_of, environment_of, pids, wait_until

HTTP, GRPC, RAY = 8000, 8001, 6379
GPUS = {"a": 1, "b": 1, "c": 2}
COMMAND_WITHIN = 150.0  # seconds
FLEET = [sys.executable, "-m", "shadowslice_fleet.cli"]
Done = subprocess.CompletedProcess[str]


@dataclass
class Rig:
    binary: str
    tag: str
    network: Namespaces | Loopback
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ssf-", dir="/tmp")))
    supervisors: dict[str, Unit] = field(default_factory=dict)
    nodes: dict[str, Unit] = field(default_factory=dict)
    gateway: Unit | None = None
    commands: "subprocess.Popen[str] | None" = None

    def start(self) -> None:
        self.network.start()
        self._configure()
        assert self.gateway
        self.gateway.start()
        self.nodes["gw"].start()
        for host in GPUS:
            self.supervisors[host].start()
        wait_until(lambda: self.cli("status", check=False).returncode == 0, 60, "the head")
        for host in GPUS:
            self.nodes[host].start()

    def stop(self) -> None:
        """Stops all units, and removes the network and the folder."""
        nodes = [self.nodes[name] for name in (*GPUS, "gw") if name in self.nodes]
        for unit in [*nodes, *self.supervisors.values(), self.gateway]:
            if unit:
                unit.wanted = False
        for unit in [*self.supervisors.values(), self.gateway, *nodes]:
            if unit:
                unit.stop()
        if self.commands:
            self.commands.kill()
            self.commands.wait()
        self.network.stop()
        shutil.rmtree(self.folder)

    def address(self, name: str) -> str:
        return self.network.address(name)

    def kill_host(self, name: str) -> None:
        """Kills a host's supervisor and workers, and all of Ray's processes on the host."""
        self.supervisors[name].kill_all()
        self.nodes[name].kill_all()

    def reload_gateway(self) -> None:
        """Makes the gateway start a new Envoy, which takes over from the running one."""
        assert self.gateway and self.gateway.process
        self.gateway.process.send_signal(signal.SIGHUP)

    def cli(self, *arguments: str, check: bool = True) -> Done:
        return self.cli_at_once([list(arguments)], check)[0]

    def cli_at_once(self, commands: list[list[str]], check: bool = True) -> list[Done]:
        """Runs several commands at the same time, and returns their results."""
        process = self._commands()
        assert process.stdin and process.stdout
        all_given = [[*self._ray(), *arguments] for arguments in commands]
        late = threading.Timer(COMMAND_WITHIN, process.kill)
        late.start()
        try:
            process.stdin.write(json.dumps(all_given) + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        finally:
            late.cancel()
        if not reply:
            raise TimeoutError(f"{commands} did not end within {COMMAND_WITHIN:g} s")
        done = [
            subprocess.CompletedProcess(given, each["code"], each["out"], each["errors"])
            for given, each in zip(all_given, json.loads(reply), strict=True)
        ]
        for each in done:
            if check and each.returncode != 0:
                raise RuntimeError(
                    f"{each.args} ended with {each.returncode}:\n{each.stdout}\n{each.stderr}"
                )
        return done

    def cli_in_background(self, *arguments: str) -> "subprocess.Popen[str]":
        return self._on_gateway([*FLEET, *self._ray(), *arguments])

    def _ray(self) -> list[str]:
        return ["--ray", f"{self.address('gw')}:{RAY}"]

    def _commands(self) -> "subprocess.Popen[str]":
        if self.commands is None or self.commands.poll() is not None:
            script = Path(__file__).with_name("commands.py")
            self.commands = self._on_gateway([sys.executable, str(script)])
        return self.commands

    def _on_gateway(self, command: list[str]) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self.network.inside("gw", self.folder / "gw" / "ray", command),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment("gw"),
        )

    def keep_logs(self, folder: Path) -> None:
        for name in HOSTS:
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

    def write_spec(self, models: list[dict[str, Any]], name: str = "spec.yaml") -> Path:
        path = self.folder / name
        path.write_text(yaml.safe_dump({"models": models}))
        return path

    def supervisor_status(self, host: str) -> dict[str, Any]:
        reply = subprocess.run(
            [self.binary, "status", "--json", "--run-dir", str(self.folder / host / "run")],
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            timeout=10,
        )
        status: dict[str, Any] = json.loads(reply.stdout)
        return status

    def _environment(self, name: str) -> dict[str, str]:
        return os.environ | {
            "SHADOWSLICE_FLEET_HOST": str(self.folder / name / "host.yaml"),
            "SHADOWSLICE_FLEET_GATEWAY": str(self.folder / name / "gateway.yaml"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def _unit(self, kind: str, name: str, command: list[str]) -> Unit:
        return Unit(
            f"{self.tag}-{kind}-{name}",
            self.network.inside(name, self.folder / name / "ray", command),
            self._environment(name),
            self.folder / name / f"{kind}.log",
            mixed=kind != "node",
        )

    def _node(self, name: str) -> list[str]:
        ray = self.network.ray(self.folder / name / "ray")
        return [*FLEET, "node", "--temp-dir", str(ray), "--address", self.address(name)]

    def _configure(self) -> None:
        for name in HOSTS:
            (self.folder / name).mkdir()
        settings = {
            "address": self.address("gw"),
            "binary": self.binary,
            "run_dir": str(self.folder / "gw" / "run"),
            "state": str(self.folder / "gw" / "state"),
            "settle": "10s",
        }
        (self.folder / "gw" / "gateway.yaml").write_text(yaml.safe_dump(settings))
        self.gateway = self._unit("gateway", "gw", [*FLEET, "gateway"])
        head = [*self._node("gw"), "--head", "--port", str(RAY)]
        self.nodes["gw"] = self._unit("node", "gw", head)
        for name, gpus in GPUS.items():
            self._host(name, gpus)
            joined = ["--join", f"{self.address('gw')}:{RAY}"]
            self.nodes[name] = self._unit("node", name, [*self._node(name), *joined])
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
        # The file is JSON, because PyYAML would write aliases for the equal GPUs.
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
    """Returns the processes, files and network devices that remain after the stop."""
    mark = f"SHADOWSLICE_TEST_UNIT={rig.tag}-".encode()
    found = [command_of(pid) for pid in pids() if mark in environment_of(pid)]
    return found + rig.network.left_behind() + ([str(rig.folder)] if rig.folder.exists() else [])
