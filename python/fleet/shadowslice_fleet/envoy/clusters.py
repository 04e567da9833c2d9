"""Renders Envoy's clusters (one per model and protocol) and the clusters' endpoints."""

from pathlib import Path

from shadowslice_fleet.envoy.common import (
    ANY_HOST,
    BUFFER_BYTES,
    TYPE,
    Config,
    Endpoint,
    file_source,
    resource_file,
)
from shadowslice_fleet.spec import Model

HEALTH_INTERVAL = "0.25s"
HEALTH_TIMEOUT = "0.5s"
UNHEALTHY_AFTER = 2  # failed checks in a row
# The number of consecutive connection failures (refused, reset or timed out). A single failure
# may only mean that the supervisor closed an idle connection.
EJECT_AFTER = 2
EJECTED_FOR = "0.5s"  # After this time the readiness checks have a result.
CONNECT_TIMEOUT = "0.5s"
# This is below the time after which a supervisor closes idle connections: `limits.keep_alive`, by
# default 75 s.
IDLE_TIMEOUT = "60s"
# The time after which Envoy closes a connection whose bytes are not acknowledged. If no bytes are
# in flight, TCP keepalive detects a broken link.
USER_TIMEOUT_MS = 1000
SOL_TCP, TCP_USER_TIMEOUT = 6, 18
RETRY_BUDGET = {"budget_percent": {"value": 20.0}, "min_retry_concurrency": 20}


def clusters(models: list[Model], folder: Path) -> str:
    """Renders the clusters of all models, and the clusters for requests without a model."""
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
            "eds_config": file_source(folder / "eds", f"{kind}-{name}"),
        },
        "connect_timeout": CONNECT_TIMEOUT,
        "load_balancing_policy": {"policies": [_fewest_under_way()]},
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "ignore_health_on_host_removal": True,
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "health_checks": [_health_check(ready)],
        "outlier_detection": _ejection(),
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


def _fewest_under_way() -> Config:
    """Returns the policy that selects the copy with the fewest requests in flight."""
    kind = "extensions.load_balancing_policies.least_request.v3.LeastRequest"
    policy = {"@type": TYPE + kind, "selection_method": "FULL_SCAN"}
    name = "envoy.load_balancing_policies.least_request"
    return {"typed_extension_config": {"name": name, "typed_config": policy}}


def _ejection() -> Config:
    """Returns the rules that eject an unreachable copy.

    An unreachable copy has the fewest requests in flight. Without ejection, Envoy would repeatedly
    select this copy until two readiness checks have failed. The next successful check ends the
    ejection.
    """
    return {
        "split_external_local_origin_errors": True,
        "consecutive_local_origin_failure": EJECT_AFTER,
        "enforcing_consecutive_local_origin_failure": 100,
        "enforcing_consecutive_5xx": 0,
        "enforcing_success_rate": 0,
        "enforcing_local_origin_success_rate": 0,
        "interval": HEALTH_INTERVAL,
        "base_ejection_time": EJECTED_FOR,
        "max_ejection_percent": 100,
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
    """Renders the endpoints of a cluster. Both clusters of a model check readiness over HTTP."""
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
    }
