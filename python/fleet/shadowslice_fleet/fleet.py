"""The Fleet actor: hears the hosts, places, reconciles, acts; each 0.5 s."""

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from shadowslice_fleet import moves, placement, report, settings, state
from shadowslice_fleet import wish as wishes
from shadowslice_fleet.envoy import Listen
from shadowslice_fleet.facts import Slot
from shadowslice_fleet.gateway import AdminFailed, Gateway
from shadowslice_fleet.hosts import Hosts
from shadowslice_fleet.moves import Refused
from shadowslice_fleet.reconcile import decide
from shadowslice_fleet.state import State
from shadowslice_fleet.states import Actions, Memory, Seen, Taken
from shadowslice_fleet.wish import Wish

EVERY = 0.5  # seconds
HEARD_WITHIN = 0.4  # seconds of each round
GONE_AFTER = 5.0  # seconds without a host until its copies are placed anew
# Joined raylets notice a head's death, end, and join again; until then the files stand.
ADOPTED_WITHIN = 30.0
LOCKED_WITHIN = 30.0
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
        self.began = time.monotonic()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def wished(self) -> Wish:
        return self.state.wish or NOTHING

    # What the command line asks

    def wish(self, document: wishes.Document) -> None:
        """Raises WishFaults."""
        new = wishes.parse(document, "the wish")
        with self.lock:
            self._keep(replace(self.state, wish=new))
            self._try_all()

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
            )
        return report.status(known, time.monotonic())

    def plan(self, document: wishes.Document) -> list[str]:
        """What would change. Raises WishFaults and PlaceFailed."""
        new = wishes.parse(document, "the wish")
        with self.lock:
            before, known = self.state, self.hosts.within(GONE_AFTER)
            slots = self.memory.placement
        usable = placement.usable(known, before.drained)
        found = placement.place(self.settings.binary, new, slots, known, usable)
        return report.changes(before.wish or NOTHING, new, slots, found)

    def move(self, model: str, to: str, gpu: int | None, source: str | None) -> None:
        """Raises Refused."""
        with self.lock:
            slots = self.memory.placement.get(model)
            if not slots or model not in self.wished.models:
                raise Refused(f"the fleet has no model '{model}'; ask `status`")
            slot = moves.target(self.hosts.within(GONE_AFTER), to, gpu)
            moved = moves.moved(slots, slot, source)
            self.memory = replace(self.memory, placement=self.memory.placement | {model: moved})
            self._try_all()
            self._keep(replace(self.state, placement=self.memory.placement))

    def drain(self, host: str, drained: bool) -> None:
        """Raises Refused."""
        with self.lock:
            if host not in self.hosts.heard:
                names = ", ".join(sorted(self.hosts.heard)) or "none"
                raise Refused(f"there is no host '{host}'; there are: {names}")
            hosts = self.state.drained | {host} if drained else self.state.drained - {host}
            self._keep(replace(self.state, drained=hosts))
            self._try_all()

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
        before, (digest, usable) = self.memory.placement, asked
        known = self.hosts.within(GONE_AFTER)
        new_wish = self.placed_for is not None and digest != self.placed_for[0]
        if new_wish or placement.stale(self.wished, before, usable):
            on = placement.present(self.wished, before, known, usable)
            try:
                found = placement.place(self.settings.binary, self.wished, on, known, usable)
                self.troubles.pop("placement", None)
            except placement.PlaceFailed as failed:
                self.troubles["placement"] = str(failed)
                return
            self.memory = replace(self.memory, placement=found.slots)
            self.missing = found.missing
        self.placed_for = asked

    def _try_all(self) -> None:
        """What an operator asks for is tried at once, whatever has failed."""
        failures = {at: replace(each, until=0.0) for at, each in self.memory.failures.items()}
        self.memory = replace(self.memory, failures=failures)

    def _asked(self) -> Asked:
        known = self.hosts.within(GONE_AFTER)
        return self.wished.digest, placement.usable(known, self.state.drained)

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
