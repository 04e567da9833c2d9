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
    facts,
    moves,
    placement,
    report,
    scaling,
    settings,
    state,
    states,
)
from shadowslice_fleet import wish as wishes
from shadowslice_fleet.demand import View
from shadowslice_fleet.envoy import Listen
from shadowslice_fleet.facts import GONE_AFTER, HEARD_FOR, Slot
from shadowslice_fleet.gateway import AdminFailed, Gateway
from shadowslice_fleet.hosts import Hosts
from shadowslice_fleet.moves import Refused
from shadowslice_fleet.reconcile import decide
from shadowslice_fleet.state import State
from shadowslice_fleet.states import Actions, Memory, Seen, Taken
from shadowslice_fleet.wish import Wish

EVERY = 0.5  # seconds
HEARD_WITHIN = 0.4  # seconds of each round
# Joined raylets notice a head's death, end, and join again; until then the files stand.
ADOPTED_WITHIN = 30.0
LOCKED_WITHIN = 30.0
LOOKS = 12  # at the load of copies, in the time that a change has to settle
NOTHING = wishes.parse({"models": []}, "no wish")
log = logging.getLogger(__name__)


# What a placement is computed from: the wish's digest, and the GPUs that may be used.
Asked = tuple[str, frozenset[Slot]]


class Fleet:
    def __init__(self) -> None:
        """Raises SettingsFault and StateFault."""
        self.settings = settings.gateway()
        self.folder = Path(self.settings.state)
        self.held = _locked(self.folder)
        self.lock = threading.Lock()  # of all below
        self.state = state.load(self.folder)
        ours = self.settings
        self.gateway = Gateway(
            Path(ours.run_dir), Listen(ours.address, ours.http_port, ours.grpc_port)
        )
        self.memory = Memory(self.state.placement, self.gateway.published())
        self.hosts = Hosts()
        self.taken: Taken | None = None
        self.missing: dict[str, str] = {}
        self.placed_for: Asked | None = None
        self.troubles: dict[str, str] = {}
        self.adopting = True
        self.began = self.looks_at = time.monotonic()
        self.past = scaling.Past(self.began)
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def wished(self) -> Wish:
        return self.state.wish or NOTHING

    # What the command line asks

    def wish(self, document: wishes.Document) -> None:
        """Raises WishFaults, and PlaceFailed: what cannot be placed would hold up all models."""
        new = self._parsed(document)
        if new.models:
            self._tried(new)
        with self.lock:
            self._keep(replace(self.state, wish=new))
            self._try_all()
            self._place_again()

    def status(self) -> report.Status:
        with self.lock:
            known = report.Known(
                self.state,
                self.memory,
                dict(self.hosts.heard),
                self.taken,
                self.missing,
                self.troubles,
                not self.adopting and self._asked() == self.placed_for,
                dict(self.past.refused),
            )
        return report.status(known, time.monotonic())

    def plan(self, document: wishes.Document) -> list[str]:
        """What would change. Raises WishFaults and PlaceFailed."""
        new = self._parsed(document)
        before, slots = self.wished, self.memory.placement
        return report.changes(before, new, slots, self._tried(new))

    def move(self, model: str, to: str, gpu: int | None, source: str | None) -> None:
        """Raises Refused."""
        with self.lock:
            slots = self.memory.placement.get(model)
            if not slots or model not in self.wished.models:
                raise Refused(f"the fleet has no model '{model}'; ask `status`")
            view = self._view(GONE_AFTER)
            slot = moves.target(view.hosts, view.usable, to, gpu)
            moved = moves.moved(slots, slot, source)
            self.memory = replace(self.memory, placement=self.memory.placement | {model: moved})
            self._try_all()
            self._keep(replace(self.state, placement=self.memory.placement))

    def drain(self, host: str, drained: bool) -> None:
        """Raises Refused."""
        with self.lock:
            known = self.hosts.heard.keys() | self.state.drained
            if host not in known:
                names = ", ".join(sorted(known)) or "none"
                raise Refused(f"there is no host '{host}'; there are: {names}")
            hosts = self.state.drained | {host} if drained else self.state.drained - {host}
            self._keep(replace(self.state, drained=hosts))
            self._try_all()
            self._place_again()

    # The loop

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                self.hosts.hear(HEARD_WITHIN)
                self._round()
                self.troubles.pop("fleet", None)
            except Exception as error:  # the loop goes on, whatever a round meets
                log.exception("a round failed")
                self.troubles["fleet"] = f"{type(error).__name__}: {error}"
            time.sleep(max(0.0, EVERY - (time.monotonic() - began)))

    def _round(self) -> None:
        try:
            self.taken = self.gateway.taken()
            self.troubles.pop("gateway", None)
        except AdminFailed as failed:
            self.taken = None
            self.troubles["gateway"] = str(failed)
        twins = ", ".join(sorted(self.hosts.twins))
        if twins:
            self.troubles["hosts"] = f"several nodes have these names: {twins}; see host.yaml"
        else:
            self.troubles.pop("hosts", None)
        with self.lock:
            if self._adopts() or self.state.wish is None:
                return
            self._place()
            self._scale(time.monotonic())
            seen = Seen(self.hosts.fresh(), self.taken)
            actions, memory = decide(self.wished, seen, self.memory, time.monotonic())
            self.gateway.publish(list(self.wished.models.values()), memory.published)
            self.memory = memory
            if memory.placement != self.state.placement:
                self._keep(replace(self.state, placement=memory.placement))
        self._act(actions)

    def _adopts(self) -> bool:
        """Nothing is done before all hosts that are known from before were heard, or a bound."""
        known = {each.host for them in self.memory.published.values() for each in them}
        known |= {slot.host for slots in self.memory.placement.values() for slot in slots}
        if known <= self.hosts.fresh().keys() or time.monotonic() - self.began > ADOPTED_WITHIN:
            self.adopting = False
        return self.adopting

    def _place(self) -> None:
        asked = self._asked()
        if asked == self.placed_for:
            return
        view = self._view()
        new_wish = self.placed_for is not None and asked[0] != self.placed_for[0]
        if new_wish or placement.stale(view):
            try:
                found, extra = placement.anew(self.settings.binary, view)
                self.troubles.pop("placement", None)
            except placement.PlaceFailed as failed:
                self.troubles["placement"] = str(failed)
                return
            self._take(found, extra)
        self.placed_for = asked

    def _scale(self, now: float) -> None:
        """A copy more or less of one model, when all hosts were heard just now."""
        view = self._view(HEARD_FOR)
        heard = {slot.host for slot in view.usable} <= view.hosts.keys()
        if now < self.looks_at or not heard or self._asked() != self.placed_for:
            return
        settle, binary = self.settings.settle, self.settings.binary
        self.looks_at = now + settle / LOOKS
        try:
            change, self.past = scaling.look(
                view, self.past, now, settle, partial(placement.place, binary)
            )
            self.troubles.pop("scaling", None)
        except placement.PlaceFailed as failed:
            self.troubles["scaling"] = str(failed)
            return
        if change:
            log.info("%s: %s", change.model, change.extra.get(change.model, "as wished"))
            self._take(change.found, change.extra)

    def _take(self, found: placement.Placed, extra: dict[str, int]) -> None:
        self.memory = replace(self.memory, placement=found.slots)
        self.missing = found.missing
        self._keep(replace(self.state, placement=found.slots, extra=extra))

    def _view(self, heard_for: float = float("inf")) -> View:
        """With the hosts that were heard in so many seconds."""
        hosts = self.hosts.within(heard_for)
        return View(self.wished, self.memory.placement, hosts, self._usable(), self.state.extra)

    def _usable(self) -> frozenset[Slot]:
        heard = dict(self.hosts.heard)
        known = facts.there(heard, states.serving(self.taken), time.monotonic())
        return placement.usable(known, self.state.drained)

    def _parsed(self, document: wishes.Document) -> Wish:
        """Raises WishFaults."""
        new = wishes.parse(document, "the wish")
        unknown = demand.unplaceable(new, self.hosts.within(float("inf")))
        if unknown:
            raise wishes.WishFaults(
                [f"the wish: model '{name}': {demand.UNKNOWN}" for name in unknown]
            )
        return new

    def _tried(self, new: Wish) -> placement.Placed:
        """Raises PlaceFailed."""
        with self.lock:
            view = replace(self._view(), wish=new)
        return placement.anew(self.settings.binary, view)[0]

    def _place_again(self) -> None:
        """A copy that did not come has its old place, which may not be usable: it leaves that."""
        if self.placed_for:
            self.placed_for = (self.placed_for[0], frozenset())

    def _try_all(self) -> None:
        """What an operator asks for is tried at once, whatever has failed."""
        failures = {at: replace(each, until=0.0) for at, each in self.memory.failures.items()}
        self.memory = replace(self.memory, failures=failures)

    def _asked(self) -> Asked:
        return self.wished.digest, self._usable()

    def _act(self, actions: Actions) -> None:
        """Nothing is waited for: what came of it is seen in the next facts."""
        for model, host in actions.drain:
            self.hosts.drain(host, model)
        for model, host in actions.undrain:
            self.hosts.undrain(host, model)
        for host, files in actions.fetch:
            self.hosts.fetch(host, files)
        for host, orders in actions.apply.items():
            self.hosts.apply(host, orders)

    def _keep(self, new: State) -> None:
        state.save(self.folder, new)
        self.state = new


def _locked(folder: Path) -> Any:
    """The actor before this one may still be ending. Raises StateFault."""
    deadline = time.monotonic() + LOCKED_WITHIN
    while True:
        held = state.lock(folder)
        if held:
            return held
        if time.monotonic() > deadline:
            raise state.StateFault(f"{folder} is used by another Fleet actor; end that one")
        time.sleep(0.1)
