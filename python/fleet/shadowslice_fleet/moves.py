"""Checks and computes the moves of copies that the operator requests.

This module does no I/O.
"""

from shadowslice_fleet.observed import ObservedHost, Slot


class CommandRefused(Exception):
    """The fleet cannot execute the operator's command. The error's text has the reason."""


def find_slot(
    hosts: dict[str, ObservedHost], usable: frozenset[Slot], host: str, gpu: int | None
) -> Slot:
    """Returns the slot of a GPU. If `gpu` is None, returns the host's first usable slot.

    Raises CommandRefused.
    """
    observed = hosts.get(host)
    if observed is None:
        names = ", ".join(sorted(hosts)) or "none"
        raise CommandRefused(f"host '{host}' does not reply; the hosts that reply are: {names}")
    gpus = [each.index for each in observed.gpus]
    if gpu is not None and gpu not in gpus:
        raise CommandRefused(f"host '{host}' has no GPU {gpu}; its GPUs are: {gpus}")
    fit = [slot for slot in sorted(usable) if slot.host == host and gpu in (None, slot.gpu)]
    if not fit:
        named = "" if gpu is None else f":{gpu}"
        raise CommandRefused(
            f"'{host}{named}' accepts no models: the host is drained, or the GPU is not usable; "
            "see `status`"
        )
    return fit[0]


def move_copy(slots: tuple[Slot, ...], to: Slot, source: str | None) -> tuple[Slot, ...]:
    """Returns the slots of a model after a move. Each host has at most one copy.

    Raises CommandRefused.
    """
    on = {slot.host: slot for slot in slots}
    source = source or _only_source(on, to)
    if source not in on:
        raise CommandRefused(f"host '{source}' has no copy; these hosts do: {', '.join(on)}")
    if to.host in on and to.host != source:
        raise CommandRefused(f"host '{to.host}' already has a copy of the model")
    del on[source]
    return tuple(sorted([*on.values(), to]))


def _only_source(on: dict[str, Slot], to: Slot) -> str:
    if to.host in on:
        return to.host
    if len(on) > 1:
        raise CommandRefused(
            f"several hosts have a copy; add --from, one of {', '.join(sorted(on))}"
        )
    return next(iter(on))
