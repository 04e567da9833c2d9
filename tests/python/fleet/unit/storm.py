"""The simulated world with random events, which depend only on a seed."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from shadowslice_fleet.loop_state import Memory
from shadowslice_fleet.observed import Assignment, Assignments, Refusal, Slot
from shadowslice_fleet.spec import parse
from world import World, copy, host

MODELS, HOSTS = "mno", "abcd"


@dataclass
class Storm(World):
    entries: dict[str, dict[str, object]] = field(default_factory=dict)
    unfetchable: set[str] = field(default_factory=set)  # hosts that cannot fetch files
    refusing: set[tuple[str, str]] = field(default_factory=set)  # (model, host)
    before: dict[str, dict[str, str]] = field(default_factory=dict)  # assignments of an older file
    placed_for: object = None
    attempts: int = 0
    faults: list[str] = field(default_factory=list)  # violations of invariants

    def act(self) -> None:
        self._place()
        self.lossy = self.chance.choice([0.0, 0.0, 0.5])
        serving = {name: self._fully(name) for name in self.spec.models}
        published = {name: self.published(name) for name in self.spec.models}
        super().act()
        for name, files in self.actions.fetch:
            self._fetch(name, files.key)
        for name in self.spec.models:
            if serving[name] and not self._fully(name):
                self.faults.append(f"{self.now}: none of {serving[name]} serves {name} any more")
            for new in self.published(name) - published[name]:
                if not self.hosts[new].copies[name].ready:
                    self.faults.append(f"{self.now}: {name} is published on {new} unready")

    def _fully(self, model: str) -> set[str]:
        """Returns the published hosts that accept new requests for the model."""
        return {name for name in self.published(model) if self.answers(model, name)}

    def _apply(self, name: str, assignments: Assignments) -> None:
        observed = self.hosts[name]
        assigned_models = {assignment.model.name for assignment in assignments.new} | set(
            assignments.keep
        )
        for model, each in observed.copies.items():
            sent = self.envoy_health.get(model, {}).get(name) and not self.deaf
            if (
                model not in assigned_models
                and each.ready
                and (sent or name in self.published(model))
            ):
                self.faults.append(f"{self.now}: {model} is removed from {name} while it serves")
        self.before[name] = observed.assigned
        refusals = [each for each in assignments.new if (each.model.name, name) in self.refusing]
        fit = tuple(each for each in assignments.new if each not in refusals)
        kept = tuple(each.model.name for each in refusals if each.model.name in observed.assigned)
        super()._apply(name, Assignments(fit, assignments.keep + kept))
        self.hosts[name] = replace(self.hosts[name], refusals=self._refusals(refusals))

    def _refusals(self, assignments: list[Assignment]) -> dict[str, Refusal]:
        self.attempts += 1
        return {each.digest: Refusal("refused", self.attempts) for each in assignments}

    def _fetch(self, name: str, key: str) -> None:
        observed = self.hosts[name]
        if name in self.unfetchable:
            self.attempts += 1
            fetch_failures = observed.fetch_failures | {key: Refusal("not fetched", self.attempts)}
            self.hosts[name] = replace(observed, fetch_failures=fetch_failures)
        else:
            fetch_failures = {of: why for of, why in observed.fetch_failures.items() if of != key}
            fetched = observed.fetched | {key}
            self.hosts[name] = replace(observed, fetched=fetched, fetch_failures=fetch_failures)

    def _usable(self) -> list[Slot]:
        return [
            Slot(name, gpu.index)
            for name, observed in sorted(self.hosts.items())
            for gpu in observed.gpus
            if name not in self.dead and gpu.why is None
        ]

    def _place(self) -> None:
        """Replaces `place`. Copies on usable slots stay, and other copies get random slots."""
        usable = self._usable()
        if (self.spec.digest, usable) == self.placed_for:
            return
        self.placed_for = (self.spec.digest, usable)
        placement = {}
        for name, model in self.spec.models.items():
            on = self.memory.placement.get(name) or tuple(self.table(name))
            kept = {slot.host: slot for slot in on if slot in usable}
            for slot in self.chance.sample(usable, len(usable)):
                kept.setdefault(slot.host, slot)
            placement[name] = tuple(sorted(list(kept.values())[: model.copies]))
        self.memory = replace(self.memory, placement=placement)

    def update_spec(self) -> None:
        entries = [
            {"name": name, "need": {"sms": 8, "memory": "1Gi"}} | keys
            for name, keys in self.entries.items()
        ]
        self.spec = parse({"models": entries}, "spec")

    # Events

    def dies(self, name: str, _: str) -> None:
        if len(self.dead) < 2:
            self.dead.add(name)

    def back(self, *_: str) -> None:
        for name in sorted(self.dead):
            if self.chance.random() < 0.5:
                self.supervisor_restarts(name, "")
        self.dead.clear()

    def supervisor_restarts(self, name: str, _: str) -> None:
        """Restarts a supervisor, either with its current file or with an older version."""
        observed = self.hosts[name]
        assigned = self.chance.choice([observed.assigned, self.before.get(name, observed.assigned)])
        copies = {model: copy(int(digest[-1]), "loading") for model, digest in assigned.items()}
        self.age |= {(model, name): 0 for model in copies}
        self.hosts[name] = replace(observed, assigned=assigned, copies=copies)

    def actor_restarts(self, name: str, _: str) -> None:
        cut = self.chance.random() < 0.3
        self.hosts[name] = replace(
            self.hosts[name], refusals={}, fetch_failures={}, interrupted=cut
        )

    def fleet_restarts(self, *_: str) -> None:
        self.restart_fleet()
        self.placed_for = None

    def envoy_s_files_are_lost(self, *_: str) -> None:
        self.memory = Memory(self.memory.placement, {})

    def breaks(self, name: str, model: str) -> None:
        self.broken.add((model, name))

    def refuses(self, name: str, model: str) -> None:
        self.refusing.add((model, name))

    def does_not_fetch(self, name: str, _: str) -> None:
        self.unfetchable.add(name)

    def everything_recovers(self, *_: str) -> None:
        self.broken.clear()
        self.refusing.clear()
        self.unfetchable.clear()
        self.deaf = False

    def gpu_fails(self, name: str, _: str) -> None:
        observed = self.hosts[name]
        gpus = tuple(replace(gpu, why=self.chance.choice([None, "lost"])) for gpu in observed.gpus)
        self.hosts[name] = replace(observed, gpus=gpus)

    def envoy_is_deaf(self, *_: str) -> None:
        self.deaf = True

    def envoy_is_slow(self, *_: str) -> None:
        self.lag = self.chance.choice([0, 1, 3, 8])

    def spec_changes(self, _: str, model: str) -> None:
        changed: dict[str, object] = {"copies": self.chance.choice([1, 2, 3])}
        version = self.chance.randrange(4)
        changed["slo"] = f"{10 + version}ms"
        if version > 1:
            changed["files"] = f"s3://models/{model}-{version}"
        self.entries[model] = changed
        self.update_spec()

    def model_is_removed(self, _: str, model: str) -> None:
        if len(self.entries) > 1:
            self.entries.pop(model, None)
            self.update_spec()

    def moves(self, _: str, model: str) -> None:
        slots, usable = self.memory.placement.get(model), self._usable()
        if model not in self.spec.models or not slots or not usable:
            return
        source, to = self.chance.choice(slots), self.chance.choice(usable)
        stay = [slot for slot in slots if slot != source]
        if to.host not in {slot.host for slot in stay}:
            placement = self.memory.placement | {model: tuple(sorted([*stay, to]))}
            self.memory = replace(self.memory, placement=placement)

    def happens(self) -> None:
        events: list[Callable[[str, str], None]] = [
            self.dies, self.back, self.back, self.supervisor_restarts, self.actor_restarts,
            self.fleet_restarts, self.envoy_s_files_are_lost, self.breaks, self.refuses,
            self.does_not_fetch, self.everything_recovers, self.gpu_fails, self.envoy_is_deaf,
            self.envoy_is_slow, self.spec_changes, self.model_is_removed, self.moves, self.moves,
        ]  # fmt: skip
        self.chance.choice(events)(self.chance.choice(HOSTS), self.chance.choice(MODELS))

    def calms(self) -> None:
        self.everything_recovers()
        self.dead.clear()
        self.lag = 0
        for name, observed in self.hosts.items():
            gpus = tuple(replace(gpu, why=None) for gpu in observed.gpus)
            self.hosts[name] = replace(observed, gpus=gpus, interrupted=False)


def storm(seed: int) -> Storm:
    hosts = {name: host(name, 1 + (name > "b")) for name in HOSTS}
    entries: dict[str, dict[str, object]] = {
        name: {"copies": 1 + at} for at, name in enumerate(MODELS)
    }
    there = Storm(parse({"models": []}, "w"), Memory({}, {}), hosts, entries=entries)
    there.chance = Random(seed)
    there.update_spec()
    return there
