"""Writes Envoy's configuration files, and queries Envoy's admin socket."""

import http.client
import json
import os
import socket
from pathlib import Path
from typing import Any

from shadowslice_fleet import envoy
from shadowslice_fleet.envoy import ANY_HOST, Endpoint, Listen
from shadowslice_fleet.loop_state import EnvoyHealth, Published
from shadowslice_fleet.spec import Model

ADMIN_TIMEOUT = 2.0  # seconds
PROTOCOLS = ("http", "grpc")


class AdminFailed(Exception):
    """Envoy's admin socket does not reply."""


class Gateway:
    """The Envoy that reads its configuration from a folder."""

    def __init__(self, folder: Path, listen: Listen) -> None:
        self.folder, self.listen = folder, listen
        self.eds = folder / "eds"
        self.eds.mkdir(parents=True, exist_ok=True)

    def publish(self, models: list[Model], published: Published) -> None:
        """Writes the files that have changed. Files that other files refer to are written first."""
        everyone = {each.host: each for them in published.values() for each in them}
        tables = {ANY_HOST: tuple(everyone.values())}
        tables |= {model.name: published.get(model.name, ()) for model in models}
        for name, them in tables.items():
            for kind in PROTOCOLS:
                self._write(self._endpoints(kind, name), envoy.endpoints(kind, name, list(them)))
        self._write(self.folder / "cds.json", envoy.clusters(models, self.folder))
        self._write(self.folder / "rds.json", envoy.routes(models))
        self._write(self.folder / "lds.json", envoy.listeners(self.listen, self.folder))
        kept = {self._endpoints(kind, name) for kind in PROTOCOLS for name in tables}
        for file in set(self.eds.glob("*.json")) - kept:
            file.unlink()

    def published(self) -> Published:
        """Reads the published endpoints from the files, which survive a restart."""
        found: Published = {}
        for file in sorted(self.eds.glob("http-*.json")):
            name = file.name.removeprefix("http-").removesuffix(".json")
            other = self._endpoints("grpc", name)
            if name != ANY_HOST and other.exists():
                found[name] = _endpoints(file, other)
        return found

    def envoy_health(self) -> EnvoyHealth:
        """Returns the endpoints to which Envoy sends HTTP and gRPC requests. Raises AdminFailed."""
        reply = self._ask("/clusters?format=json")
        by_cluster = {
            each["name"]: {
                host["hostname"]: _healthy(host["health_status"])
                for host in each.get("host_statuses", [])
            }
            for each in reply.get("cluster_statuses", [])
        }
        names = {name.partition("|")[2] for name in by_cluster} - {ANY_HOST}
        return {name: _both(by_cluster, name) for name in names}

    def stop_listening(self) -> None:
        """Makes Envoy close its listeners. Raises AdminFailed."""
        self._admin("POST", "/drain_listeners?inboundonly")

    def _ask(self, path: str) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = json.loads(self._admin("GET", path))
        except ValueError as error:
            raise AdminFailed(f"Envoy's reply to {path} is not JSON") from error
        return reply

    def _admin(self, method: str, path: str) -> bytes:
        connection = http.client.HTTPConnection("localhost", timeout=ADMIN_TIMEOUT)
        try:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(ADMIN_TIMEOUT)
            connection.sock.connect(str(admin(self.folder)))
            connection.request(method, path)
            return connection.getresponse().read()
        except (OSError, http.client.HTTPException) as error:
            raise AdminFailed(
                f"cannot reach Envoy at {admin(self.folder)}; start the gateway's unit ({error})"
            ) from error
        finally:
            connection.close()

    def _endpoints(self, kind: str, name: str) -> Path:
        return self.eds / f"{kind}-{name}.json"

    def _write(self, path: Path, text: str) -> None:
        if path.exists() and path.read_text() == text:
            return
        draft = path.with_name(f".{path.name}.draft")
        draft.write_text(text)
        os.replace(draft, path)


def admin(folder: Path) -> Path:
    """Returns the path of Envoy's admin socket."""
    return folder / "admin.sock"


def _both(by_cluster: dict[str, dict[str, bool]], name: str) -> dict[str, bool]:
    kinds = [by_cluster.get(f"{kind}|{name}", {}) for kind in PROTOCOLS]
    hosts = {host for kind in kinds for host in kind}
    return {host: all(kind.get(host, False) for kind in kinds) for host in hosts}


def _healthy(status: dict[str, Any]) -> bool:
    """Checks whether the EDS health is good and no failure flag is set."""
    return status.get("eds_health_status") == "HEALTHY" and not any(
        value is True for value in status.values()
    )


def _endpoints(http: Path, grpc: Path) -> tuple[Endpoint, ...]:
    grpc_ports = {each["hostname"]: _port(each) for each in _listed(grpc)}
    return tuple(
        Endpoint(
            each["hostname"],
            each["address"]["socket_address"]["address"],
            _port(each),
            grpc_ports[each["hostname"]],
        )
        for each in _listed(http)
        if each["hostname"] in grpc_ports
    )


def _listed(file: Path) -> list[dict[str, Any]]:
    resource = json.loads(file.read_text())["resources"][0]
    return [each["endpoint"] for group in resource["endpoints"] for each in group["lb_endpoints"]]


def _port(endpoint: dict[str, Any]) -> int:
    return int(endpoint["address"]["socket_address"]["port_value"])
