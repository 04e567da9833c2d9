"""Descriptions of a host (`host.yaml`) and the gateway (`gateway.yaml`); all have defaults."""

import ipaddress
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from shadowslice_fleet import values

HOST_VARIABLE = "SHADOWSLICE_FLEET_HOST"  # the path of host.yaml, for the Host actor
GATEWAY_VARIABLE = "SHADOWSLICE_FLEET_GATEWAY"
HOST_FILE = "/etc/shadowslice/host.yaml"
GATEWAY_FILE = "/etc/shadowslice/gateway.yaml"

Settings = TypeVar("Settings")
READERS: dict[Any, Callable[[object], Any]] = {
    int: lambda value: values.whole(value, 1, 65535),
    float: values.duration_s,
    str: values.text,
}


class SettingsFault(Exception):
    """A file of settings cannot be used."""


@dataclass(frozen=True)
class HostSettings:
    name: str = socket.gethostname()
    address: str = (
        ""  # where the gateway reaches the supervisor; Ray's address of the node if empty
    )
    http_port: int = 8000
    grpc_port: int = 8001
    binary: str = "shadowslice"
    run_dir: str = "/run/shadowslice"
    base: str = "/etc/shadowslice/base.yaml"  # the supervisor's configuration without models
    config: str = "/etc/shadowslice/shadowslice.yaml"  # what the supervisor serves, written here
    files: str = "/var/lib/shadowslice/files"
    emulated_memory: str = "80Gi"  # of each emulated GPU, for placement


@dataclass(frozen=True)
class GatewaySettings:
    address: str = "0.0.0.0"
    http_port: int = 8000
    grpc_port: int = 8001
    binary: str = "shadowslice"  # for `place`
    run_dir: str = "/run/shadowslice-fleet"  # Envoy's files and its admin socket
    state: str = "/var/lib/shadowslice-fleet"  # the wish, where copies are, drained hosts
    settle: float = 120.0  # seconds from one change of a model's copies, or a miss, to the next


def host() -> HostSettings:
    """Raises SettingsFault."""
    path = Path(os.environ.get(HOST_VARIABLE, HOST_FILE))
    read = _read(HostSettings, path)
    try:
        if read.address:
            ipaddress.ip_address(read.address)
    except ValueError as error:  # Envoy refuses all endpoints of a model of which one is no IP
        raise SettingsFault(f"{path}: address: {read.address!r} is no IP address") from error
    return read


def gateway() -> GatewaySettings:
    return _read(GatewaySettings, Path(os.environ.get(GATEWAY_VARIABLE, GATEWAY_FILE)))


def _read(kind: type[Settings], path: Path) -> Settings:
    """Raises SettingsFault. A file that is not there stands for the defaults."""
    try:
        given = yaml.safe_load(path.read_text()) or {}
    except FileNotFoundError:
        given = {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsFault(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(given, dict):
        raise SettingsFault(f"{path}: a map is needed")
    known = {each.name: each.type for each in fields(kind)}  # type: ignore[arg-type]
    faults = [f"{path}: {key}: unknown key" for key in given.keys() - known.keys()]
    taken: dict[str, Any] = {}
    for key in given.keys() & known.keys():
        try:
            taken[key] = READERS[known[key]](given[key])
        except values.ValueFault as fault:
            faults.append(f"{path}: {key}: {fault}")
    if faults:
        raise SettingsFault("\n".join(sorted(faults)))
    return kind(**taken)
