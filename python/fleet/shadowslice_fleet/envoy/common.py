"""Types and helpers that all parts of Envoy's configuration share."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = dict[str, Any]

# The filter that extracts the model's name buffers the first gRPC message. The limit is the largest
# request that a host accepts (by default 64 MiB), plus a margin. For HTTP/2, the flow-control
# windows have this size.
BUFFER_BYTES = 65 << 20
ANY_HOST = "@any"  # the name for requests without a model; models cannot have this name
TYPE = "type.googleapis.com/envoy."


@dataclass(frozen=True, order=True)
class Endpoint:
    """The address and ports at which a host serves a model."""

    host: str
    address: str
    http_port: int
    grpc_port: int


@dataclass(frozen=True)
class Listen:
    """The address and ports of the gateway."""

    address: str
    http_port: int
    grpc_port: int


def bootstrap(admin: Path, files: Path) -> Config:
    """Returns the configuration with which Envoy starts."""
    return {
        "node": {"id": "gateway", "cluster": "shadowslice"},
        "admin": {"address": {"pipe": {"path": str(admin)}}},
        "dynamic_resources": {
            "lds_config": file_source(files, "lds"),
            "cds_config": file_source(files, "cds"),
        },
    }


def file_source(folder: Path, name: str) -> Config:
    """Returns a reference to a file that Envoy watches."""
    return {
        "path_config_source": {"path": str(folder / f"{name}.json")},
        "resource_api_version": "V3",
    }


def resource_file(kind: str, resources_: list[Config]) -> str:
    """Renders a file of resources of one type."""
    typed = [{"@type": f"{TYPE}config.{kind}", **each} for each in resources_]
    return json.dumps({"resources": typed}, indent=1)
