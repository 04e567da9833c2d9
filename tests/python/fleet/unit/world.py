"""Hosts and an Envoy without processes: orders take time, messages are lost, hosts die."""

import random
from dataclasses import dataclass, field, replace

from shadowslice_fleet.facts import Copy, Gpu, Host, Order, Orders, Slot
from shadowslice_fleet.reconcile import decide
from shadowslice_fleet.states import Actions, Memory, Placement, Seen
from shadowslice_fleet.wish import Wish, parse

STEP = 0.5  # seconds


def wish(*models: str, copies: int = 2) -> Wish:
    entries = [
        {"name": name, "copies": copies, "need": {"sms": 8, "memory": "1Gi"}} for name in models
    ]
    return parse({"models": entries}, "wish")


def host(name: str, gpus: int = 1) -> Host:
    return Host(
        name,
        f"10.0.0.{ord(name)}",
        8000,
        8001,
        None,
        tuple(Gpu(at, 132, 1 << 16, None) for at in range(gpus)),
    )


def copy(gpu: int, state: str = "ready", why: str | None = None) -> Copy:
    return Copy(state, why, False, gpu, 0, 0)


@dataclass
class World:
    wish: Wish
    memory: Memory
    hosts: dict[str, Host]
    loads: int = 2  # steps until a new copy is ready
    lossy: float = 0.0  # the part of actions that come to nothing
    dead: set[str] = field(default_factory=set)
    broken: set[tuple[str, str]] = field(default_factory=set)  # copies that never become ready
    age: dict[tuple[str, str], int] = field(default_factory=dict)
    lag: int = 0  # steps by which Envoy's files and checks are behind
    views: list[dict[str, dict[str, bool]]] = field(default_factory=list)
    taken: dict[str, dict[str, bool]] = field(default_factory=dict)
    deaf: bool = False  # Envoy does not answer
    actions: Actions = field(default_factory=lambda: Actions({}, [], [], []))
    now: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def step(self) -> None:
        """Envoy reads its files, models load, the fleet decides, hosts act."""
        self.wait()
        self.act()

    def wait(self) -> None:
        self.now += STEP
        self._load()
        self.views.append(
            {
                name: {each.host: self.answers(name, each.host) for each in them}
                for name, them in self.memory.published.items()
            }
        )
        self.views = self.views[-1 - self.lag :]
        self.taken = self.views[0]

    def act(self) -> None:
        heard = {name: facts for name, facts in self.hosts.items() if name not in self.dead}
        seen = Seen(heard, None if self.deaf else self.taken)
        self.actions, self.memory = decide(self.wish, seen, self.memory, self.now)
        actions = self.actions
        for name, orders in actions.apply.items():
            if self.chance.random() >= self.lossy:
                self._apply(name, orders)
        for drained, them in ((True, actions.drain), (False, actions.undrain)):
            for model, name in them:
                if self.chance.random() >= self.lossy:
                    self._drain(model, name, drained)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def restart_fleet(self) -> None:
        """What is on disk stays."""
        self.memory = Memory(self.memory.placement, self.memory.published)

    def answers(self, model: str, name: str) -> bool:
        """Whether the copy is ready, as Envoy finds."""
        found = self.hosts[name].copies.get(model)
        return name not in self.dead and found is not None and found.ready and not found.drained

    def published(self, model: str) -> set[str]:
        return {each.host for each in self.memory.published.get(model, ())}

    def serving(self, model: str) -> set[str]:
        """Hosts to which Envoy may send the model's requests and that answer, drained or not."""
        there = self.published(model) - self.dead
        copies = {name: self.hosts[name].copies.get(model) for name in there}
        return {name for name, each in copies.items() if each and each.ready}

    def astray(self, model: str) -> set[str]:
        """Hosts to which Envoy sends the model's requests, and that do not have it."""
        sent = {name for name, healthy in self.taken.get(model, {}).items() if healthy}
        return {name for name in sent - self.dead if model not in self.hosts[name].copies}

    def table(self, model: str) -> set[Slot]:
        return {
            Slot(name, facts.copies[model].gpu)
            for name, facts in self.hosts.items()
            if name not in self.dead and model in facts.copies
        }

    def _load(self) -> None:
        for name, facts in self.hosts.items():
            copies = dict(facts.copies)
            for model, each in facts.copies.items():
                self.age[(model, name)] = self.age.get((model, name), 0) + 1
                if (model, name) in self.broken:
                    copies[model] = replace(each, state="unready", why="it is broken")
                elif self.age[(model, name)] > self.loads:
                    copies[model] = replace(each, state="ready")
            self.hosts[name] = replace(facts, copies=copies)

    def _apply(self, name: str, orders: Orders) -> None:
        facts = self.hosts[name]
        copies = {model: facts.copies[model] for model in orders.keep if model in facts.copies}
        ordered = {model: facts.ordered[model] for model in orders.keep}
        for order in orders.new:
            model = order.model.name
            ordered[model] = order.digest
            old = facts.copies.get(model)
            if old is None:
                self.age[(model, name)] = 0
            copies[model] = replace(old, gpu=order.gpu) if old else copy(order.gpu, "loading")
        self.hosts[name] = replace(facts, copies=copies, ordered=ordered)

    def _drain(self, model: str, name: str, drained: bool) -> None:
        facts = self.hosts[name]
        if model not in facts.copies:
            return
        changed = replace(facts.copies[model], drained=drained)
        self.hosts[name] = replace(facts, copies=facts.copies | {model: changed})


def world(wished: Wish, placement: Placement, hosts: str = "abc", **more: object) -> World:
    gpus = {name: host(name, 2 if name == "c" else 1) for name in hosts}
    return World(wished, Memory(placement, {}), gpus, **more)  # type: ignore[arg-type]


def order(wished: Wish, model: str, gpu: int = 0) -> Order:
    return Order(wished.models[model], gpu)
