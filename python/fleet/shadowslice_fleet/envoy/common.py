"""What all parts of Envoy's configuration share."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = dict[str, Any]

# The filter that waits for a gRPC message keeps what has come of it: the largest request of a host,
# by default 64 MiB, and a margin. Over HTTP/2 a window is the bound.
BUFFER_BYTES = 65 << 20
ANY_HOST = "@any"  # no model has such a name
TYPE = "type.googleapis.com/envoy."


@dataclass(frozen=True, order=True)
class Endpoint:
    """Where a host serves a model."""

    host: str
    address: str
    http_port: int
    grpc_port: int


@dataclass(frozen=True)
class Listen:
    address: str
    http_port: int
    grpc_port: int


def bootstrap(admin: Path, files: Path) -> Config:
    return {
        "node": {"id": "gateway", "cluster": "shadowslice"},
        "admin": {"address": {"pipe": {"path": str(admin)}}},
        "dynamic_resources": {
            "lds_config": file_source(files, "lds"),
            "cds_config": file_source(files, "cds"),
        },
    }


def file_source(folder: Path, name: str) -> Config:
    return {
        "path_config_source": {"path": str(folder / f"{name}.json")},
        "resource_api_version": "V3",
    }


def resource_file(kind: str, resources_: list[Config]) -> str:
    typed = [{"@type": f"{TYPE}config.{kind}", **each} for each in resources_]
    return json.dumps({"resources": typed}, indent=1)
