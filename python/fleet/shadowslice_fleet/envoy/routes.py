"""Renders the routes: by path for HTTP, and by the header with the model's name for gRPC."""

import json
import re

from shadowslice_fleet.envoy.common import ANY_HOST, TYPE, Config, resource_file
from shadowslice_fleet.spec import Model

MODEL_HEADER = "x-shadowslice-model"
MAX_RETRIES = 3  # Before the third retry, Envoy ejects an unreachable copy.
# The failures that occur before a request has run. A retry is then always safe.
NOT_RUN = "connect-failure,refused-stream,reset-before-request"
# The requests that load or unload models. They are refused, because they would change only one
# host.
LOADS: tuple[Config, ...] = (
    {"path_separated_prefix": "/v2/repository/models"},
    {"path": "/inference.GRPCInferenceService/RepositoryModelLoad"},
    {"path": "/inference.GRPCInferenceService/RepositoryModelUnload"},
)


def routes(models: list[Model]) -> str:
    """Renders the routes. Requests for unknown models go to any host, which returns the error."""
    grpc = {"prefix": "/inference.GRPCInferenceService/"}
    health = {"prefix": "/grpc.health.v1.Health/"}
    table = [_refused(match) for match in LOADS]
    table += [route for model in models for route in _model_routes(model)]
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


def _refused(match: Config) -> Config:
    said = {
        "error": "the fleet's spec determines its models; load them with `shadowslice-fleet up`"
    }
    body = {"inline_string": json.dumps(said)}
    return {"match": match, "direct_response": {"status": 403, "body": body}}


def _model_routes(model: Model) -> list[Config]:
    by_header = {"name": MODEL_HEADER, "string_match": {"exact": model.name}}
    grpc = {"prefix": "/inference.GRPCInferenceService/", "headers": [by_header]}
    stream = {"path": "/inference.GRPCInferenceService/ModelStreamInfer", "headers": [by_header]}
    path = f"/v2/models/{model.name}"
    http = {"path_separated_prefix": path}
    events: list[Config] = [
        {"path": f"{path}/generate_stream"},
        {
            "safe_regex": {
                "regex": rf"/v2/models/{re.escape(model.name)}/versions/[0-9]+/generate_stream"
            }
        },
    ]
    return [
        _without_timeout(_route(stream, f"grpc|{model.name}", model)),
        *(_without_timeout(_route(match, f"http|{model.name}", model)) for match in events),
        _route(grpc, f"grpc|{model.name}", model),
        _route(http, f"http|{model.name}", model),
    ]


def _without_timeout(route: Config) -> Config:
    """Removes the maximum duration, because a stream has none."""
    route["route"]["timeout"] = "0s"
    return route


def _route(match: Config, cluster: str, model: Model | None) -> Config:
    again = NOT_RUN + (",reset" if model and model.retry else "")
    target = {
        "cluster": cluster,
        "timeout": f"{model.timeout_s if model else 60.0:f}s",  # Envoy rejects `1e-05`.
        "retry_policy": {
            "retry_on": again,
            "num_retries": MAX_RETRIES,
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
