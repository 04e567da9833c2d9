"""The hosts as the fleet hears them through Ray: an actor for each node, asked again and again."""

import logging
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shadowslice_fleet.facts import HEARD_FOR, Heard, Orders
from shadowslice_fleet.facts import Host as Facts
from shadowslice_fleet.host import Host
from shadowslice_fleet.wish import Files

NAMESPACE = "shadowslice"
HOST_RESOURCE = "shadowslice_host"
THREADS = 8  # calls at a time in one Host actor
ASKED_FOR = 5.0  # seconds after which a host without an answer is asked again
# Pods have names of their own, so that hosts which are away for good are ever more. Until then what
# their copies took is known.
FORGOTTEN_AFTER = 86400.0  # seconds without node and answer
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Node:
    actor: Any
    asked: Any = None
    asked_at: float = 0.0


class Hosts:
    """Not for several threads."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}  # by Ray's id
        self.heard: dict[str, Heard] = {}  # by the host's name
        self.of: dict[str, Node] = {}  # by the host's name
        self.twins: set[str] = set()  # names that two nodes have

    def hear(self, within: float) -> None:
        """Asks those that have answered, and takes what comes within so many seconds."""
        self._find()
        now = time.monotonic()
        for node in self.nodes.values():
            if node.asked is None or now - node.asked_at > ASKED_FOR:
                node.asked, node.asked_at = node.actor.facts.remote(), now
        asked = {node.asked: node for node in self.nodes.values()}
        if not asked:
            return
        # One that has stopped answering does not hold up the others.
        recent = [ref for ref, node in asked.items() if now - node.asked_at < within]
        if recent:
            ray.wait(recent, num_returns=len(recent), timeout=within)
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
        for ref in done:
            asked[ref].asked = None
            self._take(asked[ref], ref)

    def fresh(self) -> dict[str, Facts]:
        """Those heard just now, whose supervisors answer."""
        return self.within(HEARD_FOR)

    def within(self, seconds: float) -> dict[str, Facts]:
        now = time.monotonic()
        return {
            name: each.facts for name, each in list(self.heard.items()) if now - each.at < seconds
        }

    def apply(self, host: str, orders: Orders) -> None:
        self.of[host].actor.apply.remote(orders)

    def fetch(self, host: str, files: Files) -> None:
        self.of[host].actor.fetch.remote(files)

    def drain(self, host: str, model: str) -> None:
        self.of[host].actor.drain.remote(model)

    def undrain(self, host: str, model: str) -> None:
        self.of[host].actor.undrain.remote(model)

    def _find(self) -> None:
        alive = {
            node["NodeID"]: node["NodeManagerAddress"]
            for node in ray.nodes()
            if node["Alive"] and HOST_RESOURCE in node["Resources"]
        }
        self.twins.clear()
        self._forget()
        for gone in self.nodes.keys() - alive.keys():
            del self.nodes[gone]
        for new in alive.keys() - self.nodes.keys():
            self.nodes[new] = Node(_actor(new, alive[new]))

    def _forget(self) -> None:
        now, nodes = time.monotonic(), list(self.nodes.values())
        for name in [
            name
            for name, each in self.heard.items()
            if now - each.at > FORGOTTEN_AFTER and self.of.get(name) not in nodes
        ]:
            del self.heard[name]
            self.of.pop(name, None)

    def _take(self, node: Node, ref: Any) -> None:
        try:
            facts: Facts = ray.get(ref, timeout=0)
        except ray.exceptions.RayError as error:
            log.info("a host does not answer: %s", error)
            return
        owner = self.of.setdefault(facts.name, node)
        if owner is not node and owner in self.nodes.values():
            self.twins.add(facts.name)
            return
        self.of[facts.name] = node
        now = time.monotonic()
        if facts.answers:
            self.heard[facts.name] = Heard(facts, now)
        elif facts.name in self.heard:
            self.heard[facts.name].why = facts.why
        else:
            self.heard[facts.name] = Heard(facts, float("-inf"), facts.why)


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
