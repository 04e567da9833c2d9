"""Decides for each copy of all models whether to add, keep or remove the copy.

To add a copy, the fleet assigns the model to a host. When the copy is ready, the fleet publishes
it, and Envoy sends requests to it.

To remove a copy, the fleet waits until enough other copies serve. Then the fleet drains the copy
and unpublishes it. When Envoy has released the copy and all its requests are answered, the fleet
removes the model from the host's assignments.

This module does no I/O.
"""

from dataclasses import replace

from shadowslice_fleet.envoy import Endpoint
from shadowslice_fleet.loop_state import (
    Actions,
    CopyKey,
    Memory,
    Observation,
    Published,
    held_model,
)
from shadowslice_fleet.observed import (
    Assignment,
    Assignments,
    Copy,
    ObservedHost,
    Slot,
    files_to_fetch,
)
from shadowslice_fleet.spec import Files, Model, Spec

IDLE_FOR = 1.0  # seconds from Envoy's release of an idle copy to the copy's removal
# Seconds from Envoy's release of a copy to the copy's removal if its requests are still in flight.
# The supervisor then waits another 60 s for these requests.
IDLE_TIMEOUT = 60.0


class Pass:
    """A pass over all models in the spec, on the hosts and in the gateway."""

    def __init__(
        self, spec: Spec, observation: Observation, memory: Memory, now: float, start_budget: int
    ) -> None:
        self.spec, self.observation, self.before, self.now = spec, observation, memory, now
        self.start_budget = start_budget
        self.new: dict[str, list[Assignment]] = {host: [] for host in observation.hosts}
        self.keep: dict[str, list[str]] = {host: [] for host in observation.hosts}
        self.published: Published = {}
        self.released_at: dict[CopyKey, float] = {}
        self.drain: list[CopyKey] = []
        self.undrain: list[CopyKey] = []
        self.fetch: list[tuple[str, Files]] = []

    def add_model(self, name: str) -> None:
        """Adds the actions for a model."""
        model = self.spec.models.get(name)
        slots = {slot.host: slot for slot in self.before.placement.get(name, ())} if model else {}
        there = [
            host for host, observed in self.observation.hosts.items() if name in observed.assigned
        ]
        endpoints = {each.host: each for each in self.before.published.get(name, ())}
        leaving = self._leaving(name, slots, there)
        for host in there:
            if model is None or host in leaving:
                self._remove(name, host, endpoints)
            else:
                self._keep(model, host, slots.get(host), endpoints)
        if model:
            self._start(model, slots, there)
        self._forget(name, slots, there, endpoints)
        if endpoints:
            self.published[name] = tuple(sorted(endpoints.values()))

    def actions(self) -> Actions:
        """Returns the actions for all models."""
        apply = {}
        for name, host in self.observation.hosts.items():
            assignments = Assignments(tuple(self.new[name]), tuple(self.keep[name]))
            if not host.busy and _differs(assignments, host):
                apply[name] = assignments
        return Actions(apply, self.fetch, self.drain, self.undrain)

    def memory(self) -> Memory:
        """Returns the memory for the next round."""
        return replace(self.before, published=self.published, released_at=self.released_at)

    def _live(self, name: str) -> set[str]:
        """Returns the hosts that serve the model and to which Envoy sends the model's requests."""
        envoy_health = (self.observation.envoy_health or {}).get(name, {})
        return {
            host for host, healthy in envoy_health.items() if healthy and self._ready(name, host)
        }

    def _ready(self, name: str, host: str) -> bool:
        copy = self._copy(name, host)
        return copy is not None and copy.ready and not copy.drained

    def _copy(self, name: str, host: str) -> Copy | None:
        observed = self.observation.hosts.get(host)
        return observed.copies.get(name) if observed and name in observed.assigned else None

    def _failed(self, name: str, host: str) -> bool:
        failure = self.before.failures.get(CopyKey(name, host))
        return failure is not None and failure.until > self.now

    def _leaving(self, name: str, slots: dict[str, Slot], there: list[str]) -> set[str]:
        """Returns the hosts of copies without a slot, if enough other copies serve."""
        live, leaving = self._live(name), set()
        for host in sorted(set(there) - slots.keys()):
            if slots and len(live - {host}) >= len(slots):
                leaving.add(host)
                live.discard(host)
        return leaving

    def _remove(self, name: str, host: str, endpoints: dict[str, Endpoint]) -> None:
        copy = self._copy(name, host)
        if copy and not copy.drained and host in endpoints:
            self.drain.append(CopyKey(name, host))
            self.keep[host].append(name)
            return
        endpoints.pop(host, None)
        if not self._is_idle(name, host, copy):
            self.keep[host].append(name)

    def _is_idle(self, name: str, host: str, copy: Copy | None) -> bool:
        """Checks whether the copy can be removed: it is idle, or `IDLE_TIMEOUT` has passed."""
        health, key = self.observation.envoy_health, CopyKey(name, host)
        if health is None or host in health.get(name, {}):
            return False
        since = self.released_at[key] = self.before.released_at.get(key, self.now)
        answered = copy is None or copy.in_flight == 0
        return self.now - since >= (IDLE_FOR if answered else IDLE_TIMEOUT)

    def _keep(
        self, model: Model, host: str, slot: Slot | None, endpoints: dict[str, Endpoint]
    ) -> None:
        name, observed = model.name, self.observation.hosts[host]
        copy = self._copy(name, host)
        failed = self._failed(name, host)
        held = self.before.held.get(CopyKey(name, host))
        if slot and not failed and (held is None or held.model):
            self._assign(Assignment(held_model(held, model), slot.gpu), observed)
        elif held or slot is None or host in endpoints or (copy and copy.ready):
            self.keep[host].append(name)
        if copy and copy.drained:
            self.undrain.append(CopyKey(name, host))
        elif copy and copy.ready:
            endpoints[host] = Endpoint(
                host, observed.address, observed.http_port, observed.grpc_port
            )

    def _start(self, model: Model, slots: dict[str, Slot], there: list[str]) -> None:
        """Starts copies within the budget. If the model already serves, starts one at a time."""
        name = model.name
        starting = [host for host in slots if host in there and not self._ready(name, host)]
        serves = bool(self._live(name))
        for host, slot in slots.items():
            observed = self.observation.hosts.get(host)
            if observed is None or host in there or self._failed(name, host):
                continue
            if self.start_budget <= 0 or (serves and starting):
                return
            self.start_budget -= 1
            starting.append(host)
            held = self.before.held.get(CopyKey(name, host))
            self._assign(Assignment(held_model(held, model), slot.gpu), observed)

    def _assign(self, assignment: Assignment, observed: ObservedHost) -> None:
        files, name = files_to_fetch(assignment, observed), assignment.model.name
        if files is None:
            self.new[observed.name].append(assignment)
            return
        self.fetch.append((observed.name, files))
        if name in observed.assigned:
            self.keep[observed.name].append(name)

    def _forget(
        self,
        name: str,
        slots: dict[str, Slot],
        there: list[str],
        endpoints: dict[str, Endpoint],
    ) -> None:
        """Drops endpoints of lost hosts and of hosts without the model if enough copies serve."""
        for host in endpoints.keys() - set(there):
            others = len(self._live(name))  # The live hosts never include `host`.
            if name not in self.spec.models or (slots and others >= len(slots)):
                del endpoints[host]


def _differs(assignments: Assignments, host: ObservedHost) -> bool:
    """Checks whether the host must apply its assignments, for the first time or again."""
    digests = {assignment.model.name: assignment.digest for assignment in assignments.new}
    digests |= {name: host.assigned[name] for name in assignments.keep}
    return digests != host.assigned or host.interrupted or not host.copies.keys() >= digests.keys()
