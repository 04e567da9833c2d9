"""From what is wished, placed and observed to what is done next. Pure, and by level: nothing is
remembered that could not be observed again, but for waits and failures, which then begin anew."""

from dataclasses import replace

from shadowslice_fleet.copies import Pass
from shadowslice_fleet.facts import Host, Order, Slot
from shadowslice_fleet.states import (
    Actions,
    At,
    Failure,
    Memory,
    Placement,
    Seen,
    placed,
)
from shadowslice_fleet.wish import Wish

MOST_STARTING = 8  # copies that are not ready yet, in the fleet
READY_WITHIN = 330.0  # seconds; a supervisor's `timeouts.warm` and `timeouts.spawn` are less
RETRY_AFTER, RETRY_AT_MOST = 15.0, 600.0  # seconds from a failure to the next trial; doubles


def decide(wish: Wish, seen: Seen, memory: Memory, now: float) -> tuple[Actions, Memory]:
    failures = _failures(wish, seen, memory, now)
    placement = _reverted(wish, seen, memory.placement, failures, now)
    copies = placed(wish, placement)
    starting = {
        at: memory.starting.get(at, now) for at in copies if _starts(at, seen.hosts.get(at[1]))
    }
    memory = replace(memory, placement=placement, failures=failures, starting=starting)
    running = {name for host in seen.hosts.values() for name in host.ordered}
    step = Pass(wish, seen, memory, now, MOST_STARTING - len(starting))
    for name in sorted(running | wish.models.keys() | memory.published.keys()):
        step.model(name)
    return step.actions(), step.memory()


def _starts(at: At, host: Host | None) -> bool:
    if host is None or at[0] not in host.ordered:
        return False
    copy = host.copies.get(at[0])
    return copy is None or not copy.ready


def _failures(wish: Wish, seen: Seen, memory: Memory, now: float) -> dict[At, Failure]:
    """Those of models that are wished as they were, and new ones."""
    kept = {
        at: failure
        for at, failure in memory.failures.items()
        if at[0] in wish.models
        and failure.order.startswith(wish.models[at[0]].digest)
        and not _came(at, failure, seen)
    }
    for at, order in placed(wish, memory.placement).items():
        host, before = seen.hosts.get(at[1]), kept.get(at)
        if host is None or (before and before.until > now):
            continue
        found = _failed(at, order, host, memory, now)
        if found is None or (before and before.trial == found[1] != 0):
            continue
        times = before.times + 1 if before and before.order == order.digest else 1
        wait = min(RETRY_AFTER * 2 ** (times - 1), RETRY_AT_MOST)
        kept[at] = Failure(order.digest, found[0], now + wait, times, found[1])
    return kept


def _came(at: At, failure: Failure, seen: Seen) -> bool:
    """Whether the copy is there at last."""
    host = seen.hosts.get(at[1])
    if host is None or host.ordered.get(at[0]) != failure.order or failure.order in host.refused:
        return False
    copy = host.copies.get(at[0])
    return copy is not None and copy.ready


def _failed(at: At, order: Order, host: Host, memory: Memory, now: float) -> tuple[str, int] | None:
    """Why the copy does not come, and the host's trial (0: the copy itself says so)."""
    files = order.model.files
    refusal = host.refused.get(order.digest) or (host.unfetched.get(files.key) if files else None)
    if refusal:
        return refusal.why, refusal.trial
    serves = any(each.host == at[1] for each in memory.published.get(at[0], ()))
    if serves or host.ordered.get(at[0]) != order.digest:
        return None
    copy = host.copies.get(at[0])
    if copy and copy.state == "unready":
        return copy.why or "it is unready", 0
    if now - memory.starting.get(at, now) > READY_WITHIN:
        return f"it was not ready within {READY_WITHIN:g} s", 0
    return None


def _reverted(
    wish: Wish, seen: Seen, placement: Placement, failures: dict[At, Failure], now: float
) -> Placement:
    """A copy that cannot come has its place where an old one serves."""
    reverted = dict(placement)
    for at, order in placed(wish, placement).items():
        failure = failures.get(at)
        if not failure or failure.order != order.digest or failure.until <= now:
            continue
        slots = reverted[at[0]]
        old = _old(at, order, seen, {slot.host for slot in slots})
        if old:
            rest = [slot for slot in slots if slot.host != at[1]]
            reverted[at[0]] = tuple(sorted([*rest, old]))
    return reverted


def _old(at: At, order: Order, seen: Seen, placed_on: set[str]) -> Slot | None:
    """Where the model serves besides its places: on another GPU of the host, or on another host."""
    name = at[0]
    for host in [at[1], *sorted(seen.hosts.keys() - placed_on)]:
        facts = seen.hosts.get(host)
        copy = facts.copies.get(name) if facts and name in facts.ordered else None
        if copy and copy.ready and (host, copy.gpu) != (at[1], order.gpu):
            return Slot(host, copy.gpu)
    return None
