"""Moves by hand. Pure."""

from shadowslice_fleet.observed import ObservedHost, Slot


class CommandRefused(Exception):
    """What was asked of the fleet cannot be done; the text says why."""


def find_slot(
    hosts: dict[str, ObservedHost], usable: frozenset[Slot], host: str, gpu: int | None
) -> Slot:
    """The first usable GPU if none is named. Raises Refused."""
    observed = hosts.get(host)
    if observed is None:
        names = ", ".join(sorted(hosts)) or "none"
        raise CommandRefused(f"there is no host '{host}' that answers; there are: {names}")
    gpus = [each.index for each in observed.gpus]
    if gpu is not None and gpu not in gpus:
        raise CommandRefused(f"host '{host}' has no GPU {gpu}; there are: {gpus}")
    fit = [slot for slot in sorted(usable) if slot.host == host and gpu in (None, slot.gpu)]
    if not fit:
        named = "" if gpu is None else f":{gpu}"
        raise CommandRefused(
            f"'{host}{named}' takes no models: it is drained, or the GPU no workers"
        )
    return fit[0]


def move_copy(slots: tuple[Slot, ...], to: Slot, source: str | None) -> tuple[Slot, ...]:
    """Raises Refused. A host has one copy of a model at most."""
    on = {slot.host: slot for slot in slots}
    source = source or _only_source(on, to)
    if source not in on:
        raise CommandRefused(f"there is no copy on '{source}'; there are copies on {', '.join(on)}")
    if to.host in on and to.host != source:
        raise CommandRefused(f"'{to.host}' has a copy of it already")
    del on[source]
    return tuple(sorted([*on.values(), to]))


def _only_source(on: dict[str, Slot], to: Slot) -> str:
    if to.host in on:
        return to.host
    if len(on) > 1:
        raise CommandRefused(f"say --from: there are copies on {', '.join(sorted(on))}")
    return next(iter(on))
