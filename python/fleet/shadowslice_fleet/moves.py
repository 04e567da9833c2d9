"""Moves by hand. Pure."""

from shadowslice_fleet.facts import Host, Slot


class Refused(Exception):
    """What was asked of the fleet cannot be done; the text says why."""


def target(hosts: dict[str, Host], usable: frozenset[Slot], host: str, gpu: int | None) -> Slot:
    """The first usable GPU if none is named. Raises Refused."""
    facts = hosts.get(host)
    if facts is None:
        names = ", ".join(sorted(hosts)) or "none"
        raise Refused(f"there is no host '{host}' that answers; there are: {names}")
    gpus = [each.index for each in facts.gpus]
    if gpu is not None and gpu not in gpus:
        raise Refused(f"host '{host}' has no GPU {gpu}; there are: {gpus}")
    fit = [slot for slot in sorted(usable) if slot.host == host and gpu in (None, slot.gpu)]
    if not fit:
        named = "" if gpu is None else f":{gpu}"
        raise Refused(f"'{host}{named}' takes no models: it is drained, or the GPU no workers")
    return fit[0]


def moved(slots: tuple[Slot, ...], to: Slot, source: str | None) -> tuple[Slot, ...]:
    """Raises Refused. A host has one copy of a model at most."""
    on = {slot.host: slot for slot in slots}
    source = source or _only_source(on, to)
    if source not in on:
        raise Refused(f"there is no copy on '{source}'; there are copies on {', '.join(on)}")
    if to.host in on and to.host != source:
        raise Refused(f"'{to.host}' has a copy of it already")
    del on[source]
    return tuple(sorted([*on.values(), to]))


def _only_source(on: dict[str, Slot], to: Slot) -> str:
    if to.host in on:
        return to.host
    if len(on) > 1:
        raise Refused(f"say --from: there are copies on {', '.join(sorted(on))}")
    return next(iter(on))
