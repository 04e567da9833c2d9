"""Polls the hosts through Ray. Each node has a Host actor."""

import logging
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shadowslice_fleet.host import Host
from shadowslice_fleet.observed import (
    FRESH_FOR,
    Assignments,
    CommandReply,
    HostRecord,
    ObservedHost,
)
from shadowslice_fleet.spec import Files

NAMESPACE = "shadowslice"
HOST_RESOURCE = "shadowslice_host"
THREADS = 8  # the number of concurrent calls in one Host actor
REPLY_TIMEOUT = 5.0  # seconds after which a host without a reply is polled again
# The seconds within which a host must execute `promote` or `rollback`. This is more than the
# timeout of the supervisor's command, and less than the command line's timeout.
COMMAND_TIMEOUT = 17.0
# The seconds after which the record of a lost host is removed. New pods have new names, so records
# would otherwise accumulate. A record is kept for a day, because it shows the resources that a
# model's copies needed.
FORGET_AFTER = 86400.0  # a day
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Node:
    """A Ray node with a Host actor, and the poll to which the actor has not replied yet."""

    actor: Any
    pending: Any = None
    sent_at: float = 0.0


class Hosts:
    """The hosts of the fleet. Only one thread may use this object at a time, except `run_on`."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}  # keyed by Ray's node id
        self.records: dict[str, HostRecord] = {}  # keyed by the host's name
        self.node_of: dict[str, Node] = {}  # keyed by the host's name
        self.duplicates: set[str] = set()  # host names that several nodes report

    def poll(self, newer_than: float) -> None:
        """Polls the nodes without a pending poll. Waits for replies for a limited time."""
        self._refresh_nodes()
        now = time.monotonic()
        for node in self.nodes.values():
            if node.pending is None or now - node.sent_at > REPLY_TIMEOUT:
                node.pending, node.sent_at = node.actor.observe.remote(), now
        pending = {node.pending: node for node in self.nodes.values()}
        if not pending:
            return
        # A node that has stopped replying must not delay the other nodes.
        recent = [ref for ref, node in pending.items() if now - node.sent_at < newer_than]
        if recent:
            ray.wait(recent, num_returns=len(recent), timeout=newer_than)
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
        for ref in done:
            pending[ref].pending = None
            self._record(pending[ref], ref)

    def fresh(self) -> dict[str, ObservedHost]:
        """Returns the hosts whose supervisors replied in the last `FRESH_FOR` seconds."""
        return self.newer_than(FRESH_FOR)

    def newer_than(self, seconds: float) -> dict[str, ObservedHost]:
        """Returns the hosts whose supervisors replied in the last `seconds`."""
        now = time.monotonic()
        return {
            name: each.observed
            for name, each in list(self.records.items())
            if now - each.at < seconds
        }

    def apply(self, host: str, assignments: Assignments) -> None:
        """Sends a host its assignments."""
        self.node_of[host].actor.apply.remote(assignments)

    def fetch(self, host: str, files: Files) -> None:
        """Makes a host fetch files."""
        self.node_of[host].actor.fetch.remote(files)

    def drain(self, host: str, model: str) -> None:
        """Makes a host drain a model."""
        self.node_of[host].actor.drain.remote(model)

    def undrain(self, host: str, model: str) -> None:
        """Makes a host end the drain of a model."""
        self.node_of[host].actor.undrain.remote(model)

    def run_on(self, hosts: list[str], command: str, model: str) -> dict[str, CommandReply]:
        """Runs a command for a model on these hosts, and returns their replies.

        Another thread may call this method while `poll` runs.
        """
        sent = {}
        for host in hosts:
            actor = self.node_of[host].actor
            sent[host] = getattr(actor, command).remote(model)
        done, _ = ray.wait(list(sent.values()), num_returns=len(sent), timeout=COMMAND_TIMEOUT)
        return {host: _reply(ref, ref in done) for host, ref in sent.items()}

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
            log.info("the Host actor of a node does not reply; trying again: %s", error)
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


def _reply(ref: Any, is_done: bool) -> CommandReply:
    """Returns the reply to a command, or the reason why the host did not reply."""
    if not is_done:
        return CommandReply(False, f"the host did not reply within {COMMAND_TIMEOUT:g} s")
    try:
        reply: CommandReply = ray.get(ref, timeout=0)
    except ray.exceptions.RayError as error:
        return CommandReply(False, f"the host does not reply: {error}")
    return reply


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
