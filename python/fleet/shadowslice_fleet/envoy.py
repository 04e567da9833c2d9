"""Renders Envoy's configuration: a listener for HTTP and one for gRPC, which know both, a route and
two clusters a model, and their endpoints. Pure; JSON, which Envoy reads as YAML."""

import base64
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2

from shadowslice_fleet.wish import Model

Config = dict[str, Any]

MODEL_HEADER = "x-shadowslice-model"
HEALTH_INTERVAL = "0.25s"
HEALTH_TIMEOUT = "0.5s"
UNHEALTHY_AFTER = 2  # answers in a row
CONNECT_TIMEOUT = "0.5s"
IDLE_TIMEOUT = "60s"  # a supervisor closes connections that are idle for 75 s
# A cut link is noticed when sent bytes are not acknowledged for this long, or by keepalive.
USER_TIMEOUT_MS = 1000
SOL_TCP, TCP_USER_TIMEOUT = 6, 18
# The filter that waits for a gRPC message keeps what has come of it: the largest request of a host,
# by default 64 MiB, and a margin. Over HTTP/2 a window is the bound.
BUFFER_BYTES = 65 << 20
MOST_RETRIES = 2
RETRY_BUDGET = {"budget_percent": {"value": 20.0}, "min_retry_concurrency": 20}
# What has never run, and so may always be tried again.
NOT_RUN = "connect-failure,refused-stream,reset-before-request"
ANY_HOST = "@any"  # no model has such a name
METHODS = (
    "ModelInfer",
    "ModelStreamInfer",
    "ModelReady",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
)
TYPE = "type.googleapis.com/envoy."


@dataclass(frozen=True, order=True)
class Endpoint:
    """Where a host serves a model."""

    host: str
    address: str
    http_port: int
    grpc_port: int
    weight: int = 1


@dataclass(frozen=True)
class Listen:
    address: str
    http_port: int
    grpc_port: int


def bootstrap(admin: Path, files: Path) -> Config:
    return {
        "node": {"id": "gateway", "cluster": "shadowslice"},
        "admin": {"address": {"pipe": {"path": str(admin)}}},
        "dynamic_resources": {"lds_config": _file(files, "lds"), "cds_config": _file(files, "cds")},
    }


def _file(folder: Path, name: str) -> Config:
    return {
        "path_config_source": {"path": str(folder / f"{name}.json")},
        "resource_api_version": "V3",
    }


def resource_file(kind: str, resources_: list[Config]) -> str:
    typed = [{"@type": f"{TYPE}config.{kind}", **each} for each in resources_]
    return json.dumps({"resources": typed}, indent=1)


# Listeners


def listeners(listen: Listen, folder: Path) -> str:
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
        "stream_idle_timeout": "0s",  # streams may be silent; hosts bound them
        "rds": {"route_config_name": "models", "config_source": _file(folder, "rds")},
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
    return resources.files("shadowslice_fleet").joinpath("model_header.lua").read_text()


def _extraction() -> Config:
    """The model's name is field 1 of the first message of each call that has one."""
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


# Routes


def routes(models: list[Model]) -> str:
    """What is about no model of the fleet goes to any host, which answers in its protocol."""
    grpc = {"prefix": "/inference.GRPCInferenceService/"}
    health = {"prefix": "/grpc.health.v1.Health/"}
    table = [route for model in models for route in _model_routes(model)]
    table += [
        _route(grpc, f"grpc|{ANY_HOST}", None),
        _route(health, f"grpc|{ANY_HOST}", None),
        _route({"prefix": "/v2"}, f"http|{ANY_HOST}", None),
        {"match": {"prefix": "/"}, "direct_response": {"status": 404}},
    ]
    hosts = [{"name": "all", "domains": ["*"], "routes": table}]
    return resource_file(
        "route.v3.RouteConfiguration",
        [{"name": "models", "virtual_hosts": hosts, "validate_clusters": False}],
    )


def _model_routes(model: Model) -> list[Config]:
    by_header = {"name": MODEL_HEADER, "string_match": {"exact": model.name}}
    grpc = {"prefix": "/inference.GRPCInferenceService/", "headers": [by_header]}
    stream = {"path": "/inference.GRPCInferenceService/ModelStreamInfer", "headers": [by_header]}
    http = {"path_separated_prefix": f"/v2/models/{model.name}"}
    endless = _route(stream, f"grpc|{model.name}", model)
    endless["route"]["timeout"] = "0s"
    return [
        endless,
        _route(grpc, f"grpc|{model.name}", model),
        _route(http, f"http|{model.name}", model),
    ]


def _route(match: Config, cluster: str, model: Model | None) -> Config:
    again = NOT_RUN + (",reset" if model and model.retry else "")
    target = {
        "cluster": cluster,
        "timeout": f"{model.timeout_s if model else 60.0:g}s",
        "retry_policy": {
            "retry_on": again,
            "num_retries": MOST_RETRIES,
            "retry_host_predicate": [
                {
                    "name": "envoy.retry_host_predicates.previous_hosts",
                    "typed_config": {
                        "@type": TYPE
                        + "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                    },
                }
            ],
            "host_selection_retry_max_attempts": 5,
            "retry_back_off": {"base_interval": "0.025s", "max_interval": "0.1s"},
        },
    }
    return {"match": match, "route": target}


# Clusters and endpoints


def clusters(models: list[Model], folder: Path) -> str:
    paths = {model.name: f"/v2/models/{model.name}/ready" for model in models}
    paths[ANY_HOST] = "/v2/health/ready"
    return resource_file(
        "cluster.v3.Cluster",
        [
            _cluster(kind, name, path, folder)
            for name, path in paths.items()
            for kind in ("http", "grpc")
        ],
    )


def _cluster(kind: str, name: str, ready: str, folder: Path) -> Config:
    protocol: Config = (
        {"http2_protocol_options": {}} if kind == "grpc" else {"http_protocol_options": {}}
    )
    options = "extensions.upstreams.http.v3.HttpProtocolOptions"
    return {
        "name": f"{kind}|{name}",
        "type": "EDS",
        "eds_cluster_config": {
            "eds_config": _file(folder / "eds", f"{kind}-{name}"),
        },
        "connect_timeout": CONNECT_TIMEOUT,
        "lb_policy": "LEAST_REQUEST",
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "ignore_health_on_host_removal": True,
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "health_checks": [_health_check(ready)],
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": 65536,
                    "max_pending_requests": 65536,
                    "max_requests": 65536,
                    "retry_budget": RETRY_BUDGET,
                }
            ]
        },
        "upstream_connection_options": {
            "tcp_keepalive": {
                "keepalive_probes": 1,
                "keepalive_time": 1,
                "keepalive_interval": 1,
            }
        },
        "upstream_bind_config": {
            "socket_options": [
                {
                    "description": "TCP_USER_TIMEOUT",
                    "level": SOL_TCP,
                    "name": TCP_USER_TIMEOUT,
                    "int_value": USER_TIMEOUT_MS,
                    "state": "STATE_PREBIND",
                }
            ]
        },
        "typed_extension_protocol_options": {
            f"envoy.{options}": {
                "@type": TYPE + options,
                "explicit_http_config": protocol,
                "common_http_protocol_options": {"idle_timeout": IDLE_TIMEOUT},
            }
        },
    }


def _health_check(path: str) -> Config:
    return {
        "timeout": HEALTH_TIMEOUT,
        "interval": HEALTH_INTERVAL,
        "no_traffic_interval": HEALTH_INTERVAL,
        "unhealthy_interval": HEALTH_INTERVAL,
        "initial_jitter": "0.05s",
        "unhealthy_threshold": UNHEALTHY_AFTER,
        "healthy_threshold": 1,
        "http_health_check": {"path": path, "codec_client_type": "HTTP1"},
    }


def endpoints(kind: str, name: str, them: list[Endpoint]) -> str:
    """Both clusters of a model ask for its readiness over HTTP."""
    return resource_file(
        "endpoint.v3.ClusterLoadAssignment",
        [
            {
                "cluster_name": f"{kind}|{name}",
                "endpoints": [{"lb_endpoints": [_endpoint(kind, each) for each in sorted(them)]}],
            }
        ],
    )


def _endpoint(kind: str, endpoint: Endpoint) -> Config:
    port = endpoint.http_port if kind == "http" else endpoint.grpc_port
    return {
        "endpoint": {
            "hostname": endpoint.host,
            "address": {"socket_address": {"address": endpoint.address, "port_value": port}},
            "health_check_config": {"port_value": endpoint.http_port, "hostname": "localhost"},
        },
        "load_balancing_weight": endpoint.weight,
    }
