"""Renders Envoy's listeners: one for HTTP and one for gRPC. Both accept either protocol."""

import base64
from importlib import resources
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2

from shadowslice_fleet.envoy.common import (
    BUFFER_BYTES,
    TYPE,
    Config,
    Listen,
    file_source,
    resource_file,
)

METHODS = (
    "ModelInfer",
    "ModelStreamInfer",
    "ModelReady",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
)


def listeners(listen: Listen, folder: Path) -> str:
    """Renders both listeners."""
    ports = {"http": listen.http_port, "grpc": listen.grpc_port}
    return resource_file(
        "listener.v3.Listener",
        [_listener(name, listen.address, port, folder) for name, port in ports.items()],
    )


def _listener(name: str, address: str, port: int, folder: Path) -> Config:
    manager = {
        "@type": TYPE
        + "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "codec_type": "AUTO",
        "normalize_path": True,
        "http2_protocol_options": {
            "initial_stream_window_size": BUFFER_BYTES,
            "initial_connection_window_size": BUFFER_BYTES,
        },
        "stream_idle_timeout": "0s",  # The hosts limit how long a stream is idle.
        "rds": {"route_config_name": "models", "config_source": file_source(folder, "rds")},
        "http_filters": [
            _filter("grpc_field_extraction.v3.GrpcFieldExtractionConfig", **_extraction()),
            _filter("lua.v3.Lua", default_source_code={"inline_string": _script()}),
            _filter("router.v3.Router", suppress_envoy_headers=True),
        ],
    }
    return {
        "name": name,
        "address": {"socket_address": {"address": address, "port_value": port}},
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "filter_chains": [
            {"filters": [{"name": "envoy.http_connection_manager", "typed_config": manager}]}
        ],
    }


def _filter(kind: str, **config: Any) -> Config:
    name = kind.partition(".")[0]
    typed = {"@type": f"{TYPE}extensions.filters.http.{kind}", **config}
    return {"name": f"envoy.filters.http.{name}", "typed_config": typed}


def _script() -> str:
    return resources.files("shadowslice_fleet.envoy").joinpath("model_header.lua").read_text()


def _extraction() -> Config:
    """Returns the filter that extracts the model's name: field 1 of a gRPC call's first message."""
    file = descriptor_pb2.FileDescriptorProto(
        name="names.proto", package="inference", syntax="proto3"
    )
    named = file.message_type.add(name="Named")
    named.field.add(name="name", number=1, label=1, type=9, json_name="name")
    service = file.service.add(name="GRPCInferenceService")
    for method in METHODS:
        streams = method == "ModelStreamInfer"
        service.method.add(
            name=method,
            input_type=".inference.Named",
            output_type=".inference.Named",
            client_streaming=streams,
            server_streaming=streams,
        )
    described = descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()
    return {
        "descriptor_set": {"inline_bytes": base64.b64encode(described).decode()},
        "extractions_by_method": {
            f"inference.GRPCInferenceService.{method}": {"request_field_extractions": {"name": {}}}
            for method in METHODS
        },
    }
