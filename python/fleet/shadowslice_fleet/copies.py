"""One pass over all models: each copy comes, stays or goes. Pure.

A copy comes: the host is ordered to have it, it is ready there, it is published, Envoy sends it
requests. A copy goes, once enough others are so far: it is drained, unpublished, Envoy has let go
of it, its requests are answered, the host is ordered not to have it.
"""

from dataclasses import replace

from shadowslice_fleet.envoy import Endpoint
from shadowslice_fleet.facts import Copy, Host, Order, Orders, Slot, unfetched
from shadowslice_fleet.states import Actions, At, Memory, Published, Seen
from shadowslice_fleet.wish import Files, Model, Wish

IDLE_FOR = 1.0  # seconds from Envoy's letting go of a copy until it is removed
IDLE_WITHIN = 60.0  # seconds; then requests under way are left to the supervisor, for as long again


class Pass:
    def __init__(self, wish: Wish, seen: Seen, memory: Memory, now: float, may_start: int) -> None:
        self.wish, self.seen, self.before, self.now = wish, seen, memory, now
        self.may_start = may_start
        self.new: dict[str, list[Order]] = {host: [] for host in seen.hosts}
        self.keep: dict[str, list[str]] = {host: [] for host in seen.hosts}
        self.published: Published = {}
        self.let_go: dict[At, float] = {}
        self.drain: list[At] = []
        self.undrain: list[At] = []
        self.fetch: list[tuple[str, Files]] = []

    def model(self, name: str) -> None:
        model = self.wish.models.get(name)
        slots = {slot.host: slot for slot in self.before.placement.get(name, ())} if model else {}
        there = [host for host, facts in self.seen.hosts.items() if name in facts.ordered]
        endpoints = {each.host: each for each in self.before.published.get(name, ())}
        leaving = self._leaving(name, slots, there)
        for host in there:
            if model is None or host in leaving:
                self._leave(name, host, endpoints)
            else:
                self._stay(model, host, slots.get(host), endpoints)
        if model:
            self._start(model, slots, there)
        self._forget(name, slots, there, endpoints)
        if endpoints:
            self.published[name] = tuple(sorted(endpoints.values()))

    def actions(self) -> Actions:
        apply = {}
        for name, host in self.seen.hosts.items():
            orders = Orders(tuple(self.new[name]), tuple(self.keep[name]))
            if not host.busy and _differ(orders, host):
                apply[name] = orders
        return Actions(apply, self.fetch, self.drain, self.undrain)

    def memory(self) -> Memory:
        return replace(self.before, published=self.published, let_go=self.let_go)

    def _live(self, name: str) -> set[str]:
        """Hosts that serve the model and to which Envoy sends its requests."""
        taken = (self.seen.taken or {}).get(name, {})
        return {host for host, healthy in taken.items() if healthy and self._ready(name, host)}

    def _ready(self, name: str, host: str) -> bool:
        copy = self._copy(name, host)
        return copy is not None and copy.ready and not copy.drained

    def _copy(self, name: str, host: str) -> Copy | None:
        facts = self.seen.hosts.get(host)
        return facts.copies.get(name) if facts and name in facts.ordered else None

    def _failed(self, name: str, host: str) -> bool:
        failure = self.before.failures.get((name, host))
        return failure is not None and failure.until > self.now

    def _leaving(self, name: str, slots: dict[str, Slot], there: list[str]) -> set[str]:
        """Copies without a place, as far as enough others serve."""
        live, leaving = self._live(name), set()
        for host in sorted(set(there) - slots.keys()):
            if slots and len(live - {host}) >= len(slots):
                leaving.add(host)
                live.discard(host)
        return leaving

    def _leave(self, name: str, host: str, endpoints: dict[str, Endpoint]) -> None:
        copy = self._copy(name, host)
        if copy and not copy.drained and host in endpoints:
            self.drain.append((name, host))
            self.keep[host].append(name)
            return
        endpoints.pop(host, None)
        if not self._idle(name, host, copy):
            self.keep[host].append(name)

    def _idle(self, name: str, host: str, copy: Copy | None) -> bool:
        """Whether Envoy has let go of the copy for long enough, and its requests are answered."""
        if self.seen.taken is None or host in self.seen.taken.get(name, {}):
            return False
        since = self.let_go[(name, host)] = self.before.let_go.get((name, host), self.now)
        answered = copy is None or copy.under_way == 0
        return self.now - since >= (IDLE_FOR if answered else IDLE_WITHIN)

    def _stay(
        self, model: Model, host: str, slot: Slot | None, endpoints: dict[str, Endpoint]
    ) -> None:
        name, facts, copy = model.name, self.seen.hosts[host], self._copy(model.name, host)
        failed = self._failed(name, host)
        if slot and not failed:
            self._order(Order(model, slot.gpu), facts)
        elif slot is None or host in endpoints or (copy and copy.ready):
            self.keep[host].append(name)
        if copy and copy.drained:
            self.undrain.append((name, host))
        elif copy and copy.ready:
            endpoints[host] = Endpoint(host, facts.address, facts.http_port, facts.grpc_port)

    def _start(self, model: Model, slots: dict[str, Slot], there: list[str]) -> None:
        """One after the other where copies serve; else as many as may start in the fleet."""
        name = model.name
        starting = [host for host in slots if host in there and not self._ready(name, host)]
        serves = bool(self._live(name))
        for host, slot in slots.items():
            facts = self.seen.hosts.get(host)
            if facts is None or host in there or self._failed(name, host):
                continue
            if self.may_start <= 0 or (serves and starting):
                return
            self.may_start -= 1
            starting.append(host)
            self._order(Order(model, slot.gpu), facts)

    def _order(self, order: Order, facts: Host) -> None:
        files, name = unfetched(order, facts), order.model.name
        if files is None:
            self.new[facts.name].append(order)
            return
        self.fetch.append((facts.name, files))
        if name in facts.ordered:
            self.keep[facts.name].append(name)

    def _forget(
        self,
        name: str,
        slots: dict[str, Slot],
        there: list[str],
        endpoints: dict[str, Endpoint],
    ) -> None:
        """Endpoints of hosts that are gone, or have lost the model, once enough others serve."""
        for host in endpoints.keys() - set(there):
            others = len(self._live(name))  # it is none of them
            if name not in self.wish.models or (slots and others >= len(slots)):
                del endpoints[host]


def _differ(orders: Orders, host: Host) -> bool:
    """Whether the host has other models than ordered, or has not read the order."""
    digests = {order.model.name: order.digest for order in orders.new}
    digests |= {name: host.ordered[name] for name in orders.keep}
    return digests != host.ordered or host.interrupted or not host.copies.keys() >= digests.keys()
