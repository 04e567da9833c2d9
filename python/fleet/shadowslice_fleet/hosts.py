"""The hosts as the fleet hears them through Ray: an actor for each node, asked again and again."""

import logging
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shadowslice_fleet.host import Host
from shadowslice_fleet.observed import FRESH_FOR, Assignments, HostRecord, ObservedHost
from shadowslice_fleet.spec import Files

NAMESPACE = "shadowslice"
HOST_RESOURCE = "shadowslice_host"
THREADS = 8  # calls at a time in one Host actor
REPLY_TIMEOUT = 5.0  # seconds after which a host without an answer is asked again
# Pods have names of their own, so that hosts which are away for good are ever more. Until then what
# their copies took is known.
FORGET_AFTER = 86400.0  # seconds without node and answer
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Node:
    actor: Any
    pending: Any = None
    sent_at: float = 0.0


class Hosts:
    """Not for several threads."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}  # by Ray's id
        self.records: dict[str, HostRecord] = {}  # by the host's name
        self.node_of: dict[str, Node] = {}  # by the host's name
        self.duplicates: set[str] = set()  # names that two nodes have

    def poll(self, newer_than: float) -> None:
        """Asks those that have answered, and takes what comes within so many seconds."""
        self._refresh_nodes()
        now = time.monotonic()
        for node in self.nodes.values():
            if node.pending is None or now - node.sent_at > REPLY_TIMEOUT:
                node.pending, node.sent_at = node.actor.observe.remote(), now
        pending = {node.pending: node for node in self.nodes.values()}
        if not pending:
            return
        # One that has stopped answering does not hold up the others.
        recent = [ref for ref, node in pending.items() if now - node.sent_at < newer_than]
        if recent:
            ray.wait(recent, num_returns=len(recent), timeout=newer_than)
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
        for ref in done:
            pending[ref].pending = None
            self._record(pending[ref], ref)

    def fresh(self) -> dict[str, ObservedHost]:
        """Those heard just now, whose supervisors answer."""
        return self.newer_than(FRESH_FOR)

    def newer_than(self, seconds: float) -> dict[str, ObservedHost]:
        now = time.monotonic()
        return {
            name: each.observed
            for name, each in list(self.records.items())
            if now - each.at < seconds
        }

    def apply(self, host: str, assignments: Assignments) -> None:
        self.node_of[host].actor.apply.remote(assignments)

    def fetch(self, host: str, files: Files) -> None:
        self.node_of[host].actor.fetch.remote(files)

    def drain(self, host: str, model: str) -> None:
        self.node_of[host].actor.drain.remote(model)

    def undrain(self, host: str, model: str) -> None:
        self.node_of[host].actor.undrain.remote(model)

    def _refresh_nodes(self) -> None:
        alive = {
            node["NodeID"]: node["NodeManagerAddress"]
            for node in ray.nodes()
            if node["Alive"] and HOST_RESOURCE in node["Resources"]
        }
        self.duplicates.clear()
        self._forget()
        for gone in self.nodes.keys() - alive.keys():
            del self.nodes[gone]
        for new in alive.keys() - self.nodes.keys():
            self.nodes[new] = Node(_actor(new, alive[new]))

    def _forget(self) -> None:
        now, nodes = time.monotonic(), list(self.nodes.values())
        for name in [
            name
            for name, each in self.records.items()
            if now - each.at > FORGET_AFTER and self.node_of.get(name) not in nodes
        ]:
            del self.records[name]
            self.node_of.pop(name, None)

    def _record(self, node: Node, ref: Any) -> None:
        try:
            observed: ObservedHost = ray.get(ref, timeout=0)
        except ray.exceptions.RayError as error:
            log.info("a host does not answer: %s", error)
            return
        owner = self.node_of.setdefault(observed.name, node)
        if owner is not node and owner in self.nodes.values():
            self.duplicates.add(observed.name)
            return
        self.node_of[observed.name] = node
        now = time.monotonic()
        if observed.answers:
            self.records[observed.name] = HostRecord(observed, now)
        elif observed.name in self.records:
            self.records[observed.name].why = observed.why
        else:
            self.records[observed.name] = HostRecord(observed, float("-inf"), observed.why)


def _actor(node: str, address: str) -> Any:
    return (
        ray.remote(Host)
        .options(
            name=f"host-{node}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=THREADS,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(address)
    )
