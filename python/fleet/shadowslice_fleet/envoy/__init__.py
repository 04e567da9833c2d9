"""Renders Envoy's configuration as JSON, which Envoy reads as YAML.

This module does no I/O.
"""

from shadowslice_fleet.envoy.clusters import clusters, endpoints
from shadowslice_fleet.envoy.common import ANY_HOST, Endpoint, Listen, bootstrap
from shadowslice_fleet.envoy.listeners import listeners
from shadowslice_fleet.envoy.routes import NOT_RUN, routes

__all__ = [
    "ANY_HOST",
    "NOT_RUN",
    "Endpoint",
    "Listen",
    "bootstrap",
    "clusters",
    "endpoints",
    "listeners",
    "routes",
]
