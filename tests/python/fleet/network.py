"""The network of the gateway and the hosts.

The network consists of network namespaces on one bridge. If the tests may not create namespaces,
the hosts are addresses of the loopback interface. In that case, links cannot be cut.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from units import kill

HOSTS = {"gw": 1, "a": 2, "b": 3, "c": 4}
SHELL = 'mkdir -p "$0" /tmp/ray && mount --bind "$0" /tmp/ray && exec "$@"'


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, text=True, stdout=subprocess.PIPE).stdout


@dataclass(frozen=True)
class Namespaces:
    tag: str
    links = True

    def possible(self) -> bool:
        try:
            ip("netns", "add", f"{self.tag}-gw")
            ip("netns", "del", f"{self.tag}-gw")
        except (OSError, subprocess.CalledProcessError):
            return False
        return True

    def start(self) -> None:
        ip("link", "add", self.tag, "type", "bridge")
        ip("addr", "add", f"{self._subnet}.254/24", "dev", self.tag)
        ip("link", "set", self.tag, "up")
        for name in HOSTS:
            space, outer = f"{self.tag}-{name}", f"{self.tag}{name}"
            ip("netns", "add", space)
            ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", outer, "master", self.tag, "up")
            ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def stop(self) -> None:
        for name in HOSTS:
            space = f"{self.tag}-{name}"
            if space in ip("netns", "list"):
                for pid in ip("netns", "pids", space).split():
                    kill(int(pid))
                ip("netns", "del", space)
        subprocess.run(["ip", "link", "del", self.tag], check=False, stderr=subprocess.DEVNULL)

    def address(self, name: str) -> str:
        return f"{self._subnet}.{HOSTS[name]}"

    @staticmethod
    def ray(_own: Path) -> Path:
        """Returns the path of Ray's folder, at which each namespace has its own mount."""
        return Path("/tmp/ray")

    def inside(self, name: str, ray: Path, command: list[str]) -> list[str]:
        """Returns the command line that runs a command on a host. Mounts `ray` as Ray's folder."""
        return ["ip", "netns", "exec", f"{self.tag}-{name}", "sh", "-c", SHELL, str(ray), *command]

    def link(self, name: str, up: bool) -> None:
        ip("link", "set", f"{self.tag}{name}", "up" if up else "down")

    def left_behind(self) -> list[str]:
        found = [line for line in ip("netns", "list").splitlines() if line.startswith(self.tag)]
        return found + [line for line in ip("-o", "link").splitlines() if f": {self.tag}" in line]

    @property
    def _subnet(self) -> str:
        return f"10.91.{os.getpid() % 250}"


@dataclass(frozen=True)
class Loopback:
    links = False

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def address(self, name: str) -> str:
        return f"127.91.{os.getpid() % 250}.{HOSTS[name]}"

    @staticmethod
    def ray(own: Path) -> Path:
        return own

    def inside(self, name: str, ray: Path, command: list[str]) -> list[str]:
        return command

    def link(self, name: str, up: bool) -> None:
        raise RuntimeError("a link of the loopback interface cannot be cut")

    def left_behind(self) -> list[str]:
        return []
