"""A replacement for systemd. Its units start, restart after their death, and stop."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

MARK = "SHADOWSLICE_TEST_UNIT"  # the variable that identifies a unit's processes
RESTART_AFTER = 0.5  # seconds
STOPPED_WITHIN = 40.0
LOOKED_EVERY = 0.05


@dataclass
class Unit:
    name: str  # unique
    command: list[str]
    environment: dict[str, str]
    log: Path
    mixed: bool = False  # as KillMode=mixed: SIGTERM goes to the main process only
    process: subprocess.Popen[bytes] | None = None
    wanted: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        self.wanted = True
        self._spawn()
        threading.Thread(target=self._watch, args=(self.process,), daemon=True).start()

    def stop(self) -> None:
        """Sends SIGTERM, waits for the main process, and kills the remaining processes."""
        with self.lock:
            self.wanted = False
            process = self.process
        if process and process.poll() is None:
            for pid in [process.pid] if self.mixed else self.members():
                kill(pid, signal.SIGTERM)
            try:
                process.wait(STOPPED_WITHIN)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.kill_all()

    def restart(self) -> None:
        self.stop()
        self.start()

    def kill_all(self) -> None:
        """Kills all processes of the unit. The unit then restarts if `wanted` is true."""
        for pid in self.members():
            kill(pid)

    def members(self) -> list[int]:
        wanted = f"{MARK}={self.name}".encode()
        return [pid for pid in pids() if wanted in environment_of(pid).split(b"\0")]

    def pid_of(self, part: str) -> int | None:
        """Returns a process of the unit whose command line contains this text."""
        return next((pid for pid in self.members() if part in command_of(pid)), None)

    def _spawn(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=os.environ | self.environment | {MARK: self.name},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _watch(self, process: subprocess.Popen[bytes] | None) -> None:
        while process:
            process.wait()
            with self.lock:
                if not self.wanted or self.process is not process:
                    return
            self.kill_all()
            time.sleep(RESTART_AFTER)
            with self.lock:
                if not self.wanted or self.process is not process:
                    return
                self._spawn()
                process = self.process


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def command_of(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def wait_until(happened: Callable[[], bool], within: float, what: str) -> float:
    """Waits for a condition. Returns the seconds waited. Raises TimeoutError after `within`."""
    began = time.monotonic()
    while not happened():
        if time.monotonic() - began > within:
            raise TimeoutError(f"{what} did not happen within {within:g} s")
        time.sleep(LOOKED_EVERY)
    return time.monotonic() - began
