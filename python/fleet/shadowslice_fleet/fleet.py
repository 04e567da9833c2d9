"""The Fleet actor: hears the hosts, places, reconciles, acts; each 0.5 s."""

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
from shadowslice_fleet.observed import FRESH_FOR, LOST_AFTER, Slot
from shadowslice_fleet.persisted import PersistedState
from shadowslice_fleet.reconcile import decide
from shadowslice_fleet.spec import Spec

ROUND_INTERVAL = 0.5  # seconds
POLL_TIMEOUT = 0.4  # seconds of each round
# Joined raylets notice a head's death, end, and join again; until then the files stand.
ADOPTION_TIMEOUT = 30.0
LOCK_TIMEOUT = 30.0
CHECKS_PER_SETTLE = 12  # at the load of copies, in the time that a change has to settle
EMPTY_SPEC = specs.parse({"models": []}, "no wish")
log = logging.getLogger(__name__)


# What a placement is computed from: the wish's digest, and the GPUs that may be used.
PlacementKey = tuple[str, frozenset[Slot]]


class Fleet:
    def __init__(self) -> None:
        """Raises SettingsFault and StateFault."""
        self.settings = settings.gateway()
        self.folder = Path(self.settings.state)
        self.lock_file = _locked(self.folder)
        self.lock = threading.Lock()  # of all below
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
        return self.state.spec or EMPTY_SPEC

    # What the command line asks

    def apply_spec(self, document: specs.Document) -> None:
        """Raises WishFaults, and PlaceFailed: what cannot be placed would hold up all models."""
        new = self._parsed(document)
        if new.models:
            self._try_placement(new)
        with self.lock:
            self._save(replace(self.state, spec=new))
            self._retry_all()
            self._place_again()

    def status(self) -> report.Status:
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
        """What would change. Raises WishFaults and PlaceFailed."""
        new = self._parsed(document)
        before, slots = self.spec, self.memory.placement
        return report.changes(before, new, slots, self._try_placement(new))

    def move(self, model: str, to: str, gpu: int | None, source: str | None) -> None:
        """Raises Refused."""
        with self.lock:
            slots = self.memory.placement.get(model)
            if not slots or model not in self.spec.models:
                raise CommandRefused(f"the fleet has no model '{model}'; ask `status`")
            view = self._view(LOST_AFTER)
            slot = moves.find_slot(view.hosts, view.usable, to, gpu)
            new_slots = moves.move_copy(slots, slot, source)
            self.memory = replace(self.memory, placement=self.memory.placement | {model: new_slots})
            self._retry_all()
            self._save(replace(self.state, placement=self.memory.placement))

    def drain(self, host: str, drained: bool) -> None:
        """Raises Refused."""
        with self.lock:
            known = self.hosts.records.keys() | self.state.drained
            if host not in known:
                names = ", ".join(sorted(known)) or "none"
                raise CommandRefused(f"there is no host '{host}'; there are: {names}")
            hosts = self.state.drained | {host} if drained else self.state.drained - {host}
            self._save(replace(self.state, drained=hosts))
            self._retry_all()
            self._place_again()

    # The loop

    def _run(self) -> None:
        while True:
            started = time.monotonic()
            try:
                self.hosts.poll(POLL_TIMEOUT)
                self._round()
                self.troubles.pop("fleet", None)
            except Exception as error:  # the loop goes on, whatever a round meets
                log.exception("a round failed")
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
            self.troubles["hosts"] = f"several nodes have these names: {duplicates}; see host.yaml"
        else:
            self.troubles.pop("hosts", None)
        with self.lock:
            if self._is_adopting() or self.state.spec is None:
                return
            self._place()
            self._scale(time.monotonic())
            observation = Observation(self.hosts.fresh(), self.envoy_health)
            actions, memory = decide(self.spec, observation, self.memory, time.monotonic())
            self.gateway.publish(list(self.spec.models.values()), memory.published)
            self.memory = memory
            if memory.placement != self.state.placement:
                self._save(replace(self.state, placement=memory.placement))
        self._send(actions)

    def _is_adopting(self) -> bool:
        """Nothing is done before all hosts that are known from before were heard, or a bound."""
        known = {each.host for them in self.memory.published.values() for each in them}
        known |= {slot.host for slots in self.memory.placement.values() for slot in slots}
        if known <= self.hosts.fresh().keys() or time.monotonic() - self.started > ADOPTION_TIMEOUT:
            self.adopting = False
        return self.adopting

    def _place(self) -> None:
        asked = self._placement_key()
        if asked == self.placed_for:
            return
        view = self._view()
        new_wish = self.placed_for is not None and asked[0] != self.placed_for[0]
        if new_wish or placement.is_stale(view):
            try:
                found, extra = placement.place_all(self.settings.binary, view)
                self.troubles.pop("placement", None)
            except placement.PlaceFailed as failed:
                self.troubles["placement"] = str(failed)
                return
            self._use_placement(found, extra)
        self.placed_for = asked

    def _scale(self, now: float) -> None:
        """A copy more or less of one model, when all hosts were heard just now."""
        view = self._view(FRESH_FOR)
        heard = {slot.host for slot in view.usable} <= view.hosts.keys()
        if now < self.next_check or not heard or self._placement_key() != self.placed_for:
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
            log.info("%s: %s", change.model, change.extra.get(change.model, "as wished"))
            self._use_placement(change.found, change.extra)

    def _use_placement(self, found: placement.PlacementResult, extra: dict[str, int]) -> None:
        self.memory = replace(self.memory, placement=found.slots)
        self.missing = found.missing
        self._save(replace(self.state, placement=found.slots, extra=extra))

    def _view(self, heard_for: float = float("inf")) -> View:
        """With the hosts that were heard in so many seconds."""
        hosts = self.hosts.newer_than(heard_for)
        return View(self.spec, self.memory.placement, hosts, self._usable(), self.state.extra)

    def _usable(self) -> frozenset[Slot]:
        heard = dict(self.hosts.records)
        known = observed.current_hosts(
            heard, loop_state.serving(self.envoy_health), time.monotonic()
        )
        return placement.usable(known, self.state.drained)

    def _parsed(self, document: specs.Document) -> Spec:
        """Raises WishFaults."""
        new = specs.parse(document, "the wish")
        unknown = demand.unplaceable(new, self.hosts.newer_than(float("inf")))
        if unknown:
            raise specs.SpecFaults(
                [f"the wish: model '{name}': {demand.UNKNOWN}" for name in unknown]
            )
        return new

    def _try_placement(self, new: Spec) -> placement.PlacementResult:
        """Raises PlaceFailed."""
        with self.lock:
            view = replace(self._view(), spec=new)
        return placement.place_all(self.settings.binary, view)[0]

    def _place_again(self) -> None:
        """A copy that did not come has its old place, which may not be usable: it leaves that."""
        if self.placed_for:
            self.placed_for = (self.placed_for[0], frozenset())

    def _retry_all(self) -> None:
        """What an operator asks for is tried at once, whatever has failed."""
        failures = {at: replace(each, until=0.0) for at, each in self.memory.failures.items()}
        self.memory = replace(self.memory, failures=failures)

    def _placement_key(self) -> PlacementKey:
        return self.spec.digest, self._usable()

    def _send(self, actions: Actions) -> None:
        """Nothing is waited for: what came of it is seen in the next facts."""
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
    """The actor before this one may still be ending. Raises StateFault."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        lock_file = persisted.lock(folder)
        if lock_file:
            return lock_file
        if time.monotonic() > deadline:
            raise persisted.StateFault(f"{folder} is used by another Fleet actor; end that one")
        time.sleep(0.1)
