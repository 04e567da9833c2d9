"""Reads the settings of a host (`host.yaml`) and of the gateway (`gateway.yaml`)."""

import ipaddress
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from shadowslice_fleet import values

# Actors inherit the environment of the node that runs them.
FOLDER_VARIABLE = "SHADOWSLICE_FLEET_SETTINGS"  # the folder of host.yaml and gateway.yaml
HOST_VARIABLE = "SHADOWSLICE_FLEET_HOST"  # the path of host.yaml; overrides the folder
GATEWAY_VARIABLE = "SHADOWSLICE_FLEET_GATEWAY"
FOLDER = "/etc/shadowslice"
HOST_FILE, GATEWAY_FILE = "host.yaml", "gateway.yaml"
PATHS = {"run_dir", "base", "config", "files", "state"}  # relative to the settings file

Settings = TypeVar("Settings")
READERS: dict[Any, Callable[[object], Any]] = {
    int: lambda value: values.integer(value, 1, 65535),
    float: values.duration_s,
    str: values.text,
}


class SettingsFault(Exception):
    """A file of settings is invalid, or cannot be read."""


@dataclass(frozen=True)
class HostSettings:
    """The settings of a host."""

    name: str = socket.gethostname()
    # The address at which the gateway reaches the supervisor. If it is empty, the gateway uses the
    # node's address in Ray.
    address: str = ""
    http_port: int = 8000
    grpc_port: int = 8001
    binary: str = "shadowslice"
    run_dir: str = "/run/shadowslice"
    base: str = "base.yaml"  # the supervisor's configuration without models
    config: str = "shadowslice.yaml"  # the supervisor's configuration, which the Host actor writes
    files: str = "/var/lib/shadowslice/files"
    emulated_memory: str = "80Gi"  # the memory that placement assumes for each emulated GPU


@dataclass(frozen=True)
class GatewaySettings:
    """The settings of the gateway and the Fleet actor."""

    address: str = "0.0.0.0"
    http_port: int = 8000
    grpc_port: int = 8001
    binary: str = "shadowslice"  # the program that runs `place`
    run_dir: str = "/run/shadowslice-fleet"  # the folder of Envoy's files and admin socket
    state: str = "/var/lib/shadowslice-fleet"  # the folder of the spec, placement and drained hosts
    # The minimum time between two changes of a model's number of copies, in seconds. A copy is
    # removed only after the same time without an SLO violation.
    settle: float = 120.0


def host() -> HostSettings:
    """Reads the host's settings. Raises SettingsFault."""
    return _read(HostSettings, _file(HOST_VARIABLE, HOST_FILE))


def gateway() -> GatewaySettings:
    """Reads the gateway's settings. Raises SettingsFault."""
    return _read(GatewaySettings, _file(GATEWAY_VARIABLE, GATEWAY_FILE))


def _file(variable: str, name: str) -> Path:
    folder = Path(os.environ.get(FOLDER_VARIABLE) or FOLDER)
    return Path(os.environ.get(variable) or folder / name).absolute()


def _ip_address(value: object) -> str:
    """Parses an IP address. Envoy rejects a model's endpoints if one of them is a host name."""
    try:
        return str(ipaddress.ip_address(values.text(value)))
    except ValueError as error:
        raise values.ValueFault(f"{value!r} is not an IP address") from error


def _read(kind: type[Settings], path: Path) -> Settings:
    """Reads settings. If the file is missing, returns the defaults. Raises SettingsFault."""
    try:
        given = yaml.safe_load(path.read_text()) or {}
    except FileNotFoundError:
        given = {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsFault(f"cannot read {path} as YAML: {error}") from error
    if not isinstance(given, dict):
        raise SettingsFault(f"{path}: expected a map, as `key: value`")
    known = {each.name: each.type for each in fields(kind)}  # type: ignore[arg-type]
    faults = [f"{path}: {key}: unknown key" for key in given.keys() - known.keys()]
    taken: dict[str, Any] = {}
    for key in given.keys() & known.keys():
        try:
            read = _ip_address if key == "address" else READERS[known[key]]
            taken[key] = read(given[key])
        except values.ValueFault as fault:
            faults.append(f"{path}: {key}: {fault}")
    if faults:
        raise SettingsFault("\n".join(sorted(faults)))
    settings = kind(**taken)
    paths = {key: str(path.parent / getattr(settings, key)) for key in PATHS & known.keys()}
    return replace(settings, **paths)  # type: ignore[type-var]
