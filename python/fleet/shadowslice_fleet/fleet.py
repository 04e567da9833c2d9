"""The Fleet actor. Every 0.5 s it observes the hosts, places models, and acts on the hosts."""

import logging
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shadowslice_fleet import (
    demand,
    loop_state,
    moves,
    observed,
    persisted,
    placement,
    report,
    rollouts,
    scaling,
    settings,
)
from shadowslice_fleet import spec as specs
from shadowslice_fleet.demand import View
from shadowslice_fleet.envoy import Listen
from shadowslice_fleet.gateway import AdminFailed, Gateway
from shadowslice_fleet.hosts import Hosts
from shadowslice_fleet.loop_state import Actions, EnvoyHealth, Memory, Observation
from shadowslice_fleet.moves import CommandRefused
from shadowslice_fleet.observed import FRESH_FOR, LOST_AFTER, CommandReply, ObservedHost, Slot
from shadowslice_fleet.persisted import PersistedState
from shadowslice_fleet.reconcile import decide
from shadowslice_fleet.spec import Spec

ROUND_INTERVAL = 0.5  # seconds
POLL_TIMEOUT = 0.4  # seconds for which each round waits for the hosts' replies
# The time, in seconds, for which Envoy's files stay unchanged after the actor started. In this
# time, the raylets of the other nodes notice the head's death, exit and join again.
ADOPTION_TIMEOUT = 30.0
LOCK_TIMEOUT = 30.0
CHECKS_PER_SETTLE = 12  # the number of load checks within the time `settle`
log = logging.getLogger(__name__)


# The spec's digest and the usable GPUs. If they change, models are placed again.
PlacementKey = tuple[str, frozenset[Slot]]


class Fleet:
    """The Fleet actor. Its public methods are the commands of the command line."""

    def __init__(self) -> None:
        """Starts the control loop. Raises SettingsFault and StateFault."""
        self.settings = settings.gateway()
        self.folder = Path(self.settings.state)
        self.lock_file = _locked(self.folder)
        self.lock = threading.Lock()  # guards the fields that follow
        self.state = persisted.load(self.folder)
        ours = self.settings
        self.gateway = Gateway(
            Path(ours.run_dir), Listen(ours.address, ours.http_port, ours.grpc_port)
        )
        self.memory = Memory(self.state.placement, self.gateway.published())
        self.hosts = Hosts()
        self.envoy_health: EnvoyHealth | None = None
        self.missing: dict[str, str] = {}
        self.placed_for: PlacementKey | None = None
        self.troubles: dict[str, str] = {}
        self.adopting = True
        self.started = self.next_check = time.monotonic()
        self.history = scaling.History(self.started)
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def spec(self) -> Spec:
        """The current spec. It is empty before the first `up`."""
        return self.state.spec or specs.EMPTY

    # Commands
    def apply_spec(self, document: specs.Document) -> None:
        """Replaces the spec.

        Raises SpecFaults. Raises PlaceFailed if `place` rejects the spec, because a rejected spec
        would prevent any placement.
        """
        new = self._parsed(document)
        if new.models:
            self._try_placement(new)
        with self.lock:
            hosts = self.hosts.newer_than(float("inf"))
            former = rollouts.former(self.spec, self.state.former, new, hosts)
            self._save(replace(self.state, spec=new, former=specs.of_entries(former)))
            self._retry_all()
            self._place_again()

    def promote(self, model: str) -> dict[str, CommandReply]:
        """Ends the current step of a model's rollout on each host that has one in progress.

        If no rollout is in progress, unloads the former versions. Returns the hosts' replies.
        Raises CommandRefused.
        """
        active = rollouts.active(model, self.hosts.fresh())
        in_progress = [host for host, each in active.items() if each.is_in_progress]
        return self.hosts.run_on(in_progress or list(active), "promote", model)

    def roll_back(self, model: str) -> dict[str, CommandReply]:
        """Rolls a model back on each host that has a rollout or keeps the former version.

        Returns the hosts' replies. Raises CommandRefused.
        """
        active = rollouts.active(model, self.hosts.fresh())
        return self.hosts.run_on(list(active), "roll_back", model)

    def status(self) -> report.Status:
        """Returns the state of all models and hosts."""
        with self.lock:
            snapshot = report.Snapshot(
                self.state,
                self.memory,
                dict(self.hosts.records),
                self.envoy_health,
                self.missing,
                self.troubles,
                not self.adopting and self._placement_key() == self.placed_for,
                dict(self.history.blocked),
            )
        return report.status(snapshot, time.monotonic())

    def plan(self, document: specs.Document) -> list[str]:
        """Returns the changes that a spec would cause. Raises SpecFaults and PlaceFailed."""
        new = self._parsed(document)
        before, slots = self.spec, self.memory.placement
        return report.changes(before, new, slots, self._try_placement(new))

    def move(self, model: str, to: str, gpu: int | None, source: str | None) -> None:
        """Moves a copy to another host or GPU. Raises CommandRefused."""
        with self.lock:
            slots = self.memory.placement.get(model)
            if not slots or model not in self.spec.models:
                raise CommandRefused(f"model '{model}' not found; `status` lists all models")
            view = self._view(LOST_AFTER)
            slot = moves.find_slot(view.hosts, view.usable, to, gpu)
            new_slots = moves.move_copy(slots, slot, source)
            self.memory = replace(self.memory, placement=self.memory.placement | {model: new_slots})
            self._retry_all()
            self._save(replace(self.state, placement=self.memory.placement))

    def drain(self, host: str, drained: bool) -> None:
        """Drains a host, or ends the drain. Raises CommandRefused."""
        with self.lock:
            known = self.hosts.records.keys() | self.state.drained
            if host not in known:
                names = ", ".join(sorted(known)) or "none"
                raise CommandRefused(f"host '{host}' not found; the hosts are: {names}")
            hosts = self.state.drained | {host} if drained else self.state.drained - {host}
            self._save(replace(self.state, drained=hosts))
            self._retry_all()
            self._place_again()

    # The control loop

    def _run(self) -> None:
        while True:
            started = time.monotonic()
            try:
                self.hosts.poll(POLL_TIMEOUT)
                self._round()
                self.troubles.pop("fleet", None)
            except Exception as error:  # The control loop must survive every error in a round.
                log.exception("a round of the Fleet actor's control loop failed; trying again")
                self.troubles["fleet"] = f"{type(error).__name__}: {error}"
            time.sleep(max(0.0, ROUND_INTERVAL - (time.monotonic() - started)))

    def _round(self) -> None:
        try:
            self.envoy_health = self.gateway.envoy_health()
            self.troubles.pop("gateway", None)
        except AdminFailed as failed:
            self.envoy_health = None
            self.troubles["gateway"] = str(failed)
        duplicates = ", ".join(sorted(self.hosts.duplicates))
        if duplicates:
            self.troubles["hosts"] = (
                f"several nodes have these names: {duplicates}; set `name` in their host.yaml"
            )
        else:
            self.troubles.pop("hosts", None)
        with self.lock:
            if self._is_adopting() or self.state.spec is None:
                return
            self._place()
            self._scale(time.monotonic())
            observation = Observation(self.hosts.fresh(), self.envoy_health)
            memory = replace(self.memory, former=self.state.former.models)
            actions, memory = decide(self.spec, observation, memory, time.monotonic())
            self.gateway.publish(list(self.spec.models.values()), memory.published)
            self.memory = memory
            if memory.placement != self.state.placement:
                self._save(replace(self.state, placement=memory.placement))
            self._forget_former(observation.hosts)
        self._send(actions)

    def _forget_former(self, hosts: dict[str, ObservedHost]) -> None:
        """Forgets the former versions of models whose rollout has ended."""
        former, slots = self.state.former, self.memory.placement
        left = rollouts.unfinished(self.spec, former.models, hosts, slots)
        if left != former.models.keys():
            entries = [specs.entry(former, name) for name in sorted(left)]
            self._save(replace(self.state, former=specs.of_entries(entries)))

    def _is_adopting(self) -> bool:
        """Checks whether the actor still waits for hosts that the previous actor knew."""
        known = {each.host for them in self.memory.published.values() for each in them}
        known |= {slot.host for slots in self.memory.placement.values() for slot in slots}
        if known <= self.hosts.fresh().keys() or time.monotonic() - self.started > ADOPTION_TIMEOUT:
            self.adopting = False
        return self.adopting

    def _place(self) -> None:
        key = self._placement_key()
        if key == self.placed_for:
            return
        view = self._view()
        has_new_spec = self.placed_for is not None and key[0] != self.placed_for[0]
        if has_new_spec or placement.is_stale(view):
            try:
                found, extra = placement.place_all(self.settings.binary, view)
                self.troubles.pop("placement", None)
            except placement.PlaceFailed as failed:
                self.troubles["placement"] = str(failed)
                return
            self._use_placement(found, extra)
        self.placed_for = key

    def _scale(self, now: float) -> None:
        """Adds or removes a copy of one model, if all hosts have replied recently."""
        view = self._view(FRESH_FOR)
        all_recent = {slot.host for slot in view.usable} <= view.hosts.keys()
        if now < self.next_check or not all_recent or self._placement_key() != self.placed_for:
            return
        settle, binary = self.settings.settle, self.settings.binary
        self.next_check = now + settle / CHECKS_PER_SETTLE
        try:
            change, self.history = scaling.decide(
                view, self.history, now, settle, partial(placement.place, binary)
            )
            self.troubles.pop("scaling", None)
        except placement.PlaceFailed as failed:
            self.troubles["scaling"] = str(failed)
            return
        if change:
            log.info(
                "scaling model %s: %d copies more than in the spec",
                change.model,
                change.extra.get(change.model, 0),
            )
            self._use_placement(change.found, change.extra)

    def _use_placement(self, found: placement.PlacementResult, extra: dict[str, int]) -> None:
        self.memory = replace(self.memory, placement=found.slots)
        self.missing = found.missing
        self._save(replace(self.state, placement=found.slots, extra=extra))

    def _view(self, max_age: float = float("inf")) -> View:
        """Returns the input of a placement. It contains the hosts that replied within `max_age`."""
        hosts = self.hosts.newer_than(max_age)
        return View(self.spec, self.memory.placement, hosts, self._usable(), self.state.extra)

    def _usable(self) -> frozenset[Slot]:
        records = dict(self.hosts.records)
        hosts = observed.current_hosts(
            records, loop_state.serving(self.envoy_health), time.monotonic()
        )
        return placement.usable(hosts, self.state.drained)

    def _parsed(self, document: specs.Document) -> Spec:
        """Parses a spec. Raises SpecFaults for faults, and for models with unknown resources."""
        new = specs.parse(document, "the spec")
        unknown = demand.unplaceable(new, self.hosts.newer_than(float("inf")))
        if unknown:
            raise specs.SpecFaults(
                [f"the spec: model '{name}': {demand.UNKNOWN}" for name in unknown]
            )
        return new

    def _try_placement(self, new: Spec) -> placement.PlacementResult:
        """Computes a placement without using it. Raises PlaceFailed."""
        with self.lock:
            view = replace(self._view(), spec=new)
        return placement.place_all(self.settings.binary, view)[0]

    def _place_again(self) -> None:
        """Forces a new placement, because a failed copy may have an unusable slot."""
        if self.placed_for:
            self.placed_for = (self.placed_for[0], frozenset())

    def _retry_all(self) -> None:
        """Lets failed copies start immediately, because the operator sent a command."""
        failures = {at: replace(each, until=0.0) for at, each in self.memory.failures.items()}
        self.memory = replace(self.memory, failures=failures)

    def _placement_key(self) -> PlacementKey:
        return self.spec.digest, self._usable()

    def _send(self, actions: Actions) -> None:
        """Sends actions to the hosts without waiting. The next observations show the results."""
        for model, host in actions.drain:
            self.hosts.drain(host, model)
        for model, host in actions.undrain:
            self.hosts.undrain(host, model)
        for host, files in actions.fetch:
            self.hosts.fetch(host, files)
        for host, assignments in actions.apply.items():
            self.hosts.apply(host, assignments)

    def _save(self, new: PersistedState) -> None:
        persisted.save(self.folder, new)
        self.state = new


def _locked(folder: Path) -> Any:
    """Waits until the previous actor has ended, and locks the state's folder. Raises StateFault."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        lock_file = persisted.lock(folder)
        if lock_file:
            return lock_file
        if time.monotonic() > deadline:
            raise persisted.StateFault(f"another Fleet actor uses {folder}; stop that actor")
        time.sleep(0.1)
