"""A simulation of hosts and Envoy with slow commands, lost messages and dead hosts."""

import random
from dataclasses import dataclass, field, replace

from shadowslice_fleet.loop_state import Actions, Memory, Observation, Placement
from shadowslice_fleet.observed import Assignment, Assignments, Copy, Gpu, ObservedHost, Slot
from shadowslice_fleet.reconcile import decide
from shadowslice_fleet.spec import Spec, parse

STEP = 0.5  # seconds


def spec(*models: str, copies: int = 2) -> Spec:
    entries = [
        {"name": name, "copies": copies, "need": {"sms": 8, "memory": "1Gi"}} for name in models
    ]
    return parse({"models": entries}, "spec")


def host(name: str, gpus: int = 1) -> ObservedHost:
    return ObservedHost(
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
    spec: Spec
    memory: Memory
    hosts: dict[str, ObservedHost]
    loads: int = 2  # steps until a new copy is ready
    lossy: float = 0.0  # the fraction of actions that are lost
    dead: set[str] = field(default_factory=set)
    broken: set[tuple[str, str]] = field(default_factory=set)  # copies that never become ready
    age: dict[tuple[str, str], int] = field(default_factory=dict)
    lag: int = 0  # steps by which Envoy's files and checks are behind
    views: list[dict[str, dict[str, bool]]] = field(default_factory=list)
    envoy_health: dict[str, dict[str, bool]] = field(default_factory=dict)
    deaf: bool = False  # Envoy does not reply
    actions: Actions = field(default_factory=lambda: Actions({}, [], [], []))
    now: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def step(self) -> None:
        """Simulates one step of Envoy, of the models' loading, of the fleet and of the hosts."""
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
        self.envoy_health = self.views[0]

    def act(self) -> None:
        reachable = {
            name: observed for name, observed in self.hosts.items() if name not in self.dead
        }
        observation = Observation(reachable, None if self.deaf else self.envoy_health)
        self.actions, self.memory = decide(self.spec, observation, self.memory, self.now)
        actions = self.actions
        for name, assignments in actions.apply.items():
            if self.chance.random() >= self.lossy:
                self._apply(name, assignments)
        for drained, them in ((True, actions.drain), (False, actions.undrain)):
            for model, name in them:
                if self.chance.random() >= self.lossy:
                    self._drain(model, name, drained)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def restart_fleet(self) -> None:
        """Restarts the Fleet actor, which loses all state that is not on disk."""
        self.memory = Memory(self.memory.placement, self.memory.published)

    def answers(self, model: str, name: str) -> bool:
        """Returns true if a readiness check by Envoy would succeed for the copy."""
        found = self.hosts[name].copies.get(model)
        return name not in self.dead and found is not None and found.ready and not found.drained

    def published(self, model: str) -> set[str]:
        return {each.host for each in self.memory.published.get(model, ())}

    def serving(self, model: str) -> set[str]:
        """Returns the published hosts that can serve the model, including drained hosts."""
        there = self.published(model) - self.dead
        copies = {name: self.hosts[name].copies.get(model) for name in there}
        return {name for name, each in copies.items() if each and each.ready}

    def astray(self, model: str) -> set[str]:
        """Returns the hosts that get the model's requests from Envoy but have no copy of it."""
        sent = {name for name, healthy in self.envoy_health.get(model, {}).items() if healthy}
        return {name for name in sent - self.dead if model not in self.hosts[name].copies}

    def table(self, model: str) -> set[Slot]:
        return {
            Slot(name, observed.copies[model].gpu)
            for name, observed in self.hosts.items()
            if name not in self.dead and model in observed.copies
        }

    def _load(self) -> None:
        for name, observed in self.hosts.items():
            copies = dict(observed.copies)
            for model, each in observed.copies.items():
                self.age[(model, name)] = self.age.get((model, name), 0) + 1
                if (model, name) in self.broken:
                    copies[model] = replace(each, state="unready", why="it is broken")
                elif self.age[(model, name)] > self.loads:
                    copies[model] = replace(each, state="ready")
            self.hosts[name] = replace(observed, copies=copies)

    def _apply(self, name: str, assignments: Assignments) -> None:
        observed = self.hosts[name]
        copies = {
            model: observed.copies[model] for model in assignments.keep if model in observed.copies
        }
        assigned = {model: observed.assigned[model] for model in assignments.keep}
        for assignment in assignments.new:
            model = assignment.model.name
            assigned[model] = assignment.digest
            old = observed.copies.get(model)
            if old is None:
                self.age[(model, name)] = 0
            copies[model] = (
                replace(old, gpu=assignment.gpu) if old else copy(assignment.gpu, "loading")
            )
        self.hosts[name] = replace(observed, copies=copies, assigned=assigned)

    def _drain(self, model: str, name: str, drained: bool) -> None:
        observed = self.hosts[name]
        if model not in observed.copies:
            return
        changed = replace(observed.copies[model], drained=drained)
        self.hosts[name] = replace(observed, copies=observed.copies | {model: changed})


def world(spec: Spec, placement: Placement, hosts: str = "abc", **more: object) -> World:
    gpus = {name: host(name, 2 if name == "c" else 1) for name in hosts}
    return World(spec, Memory(placement, {}), gpus, **more)  # type: ignore[arg-type]


def assignment(spec: Spec, model: str, gpu: int = 0) -> Assignment:
    return Assignment(spec.models[model], gpu)
