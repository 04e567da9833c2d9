"""Copies beyond the wish: they come where load makes them necessary, and go with it. Pure, but for
`shadowslice place`, which is asked through a function."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from shadowslice_fleet.demand import Demand, View, copies, demands, most
from shadowslice_fleet.facts import Host, Slot
from shadowslice_fleet.load import Load, loads, misses, takes
from shadowslice_fleet.placement import Placed, lacks_more
from shadowslice_fleet.wish import Model

MOST_GIVERS = 8  # copies of other models that may make room for one
SPARE = 1.25  # times what is offered; fewer copies must serve as much
COMING = ("unready", "ready", "moved")  # states of copies that are not on their way

Ask = Callable[[View, dict[str, Demand]], Placed]  # raises PlaceFailed


@dataclass(frozen=True)
class Past:
    """Times in seconds of the caller's clock, by model."""

    began: float
    changed: dict[str, float] = field(default_factory=dict)  # its number of copies, last
    missed: dict[str, float] = field(default_factory=dict)  # its objective, last
    refused: dict[str, str] = field(default_factory=dict)  # why it has no copy more


@dataclass(frozen=True)
class Change:
    model: str
    found: Placed
    extra: dict[str, int]


def look(view: View, past: Past, now: float, settle: float, ask: Ask) -> tuple[Change | None, Past]:
    """One model at a time, of those that miss the one of the highest priority first; `view.hosts`
    are those heard just now. Raises PlaceFailed."""
    past = _seen(view, past, now)
    refused: dict[str, str] = {}
    change = None
    for model in _by_priority(view):
        if (
            change is None
            and _settled(view, model)
            and _waited(past.changed, past, model, now, settle)
        ):
            if lacks(view, model):
                change = more(view, model, ask, refused)
            elif _waited(past.missed, past, model, now, settle):
                change = fewer(view, model, ask)
    moved = {name: now for name in _changed(view, change)} if change else {}
    return change, replace(past, changed=past.changed | moved, refused=refused)


def _seen(view: View, past: Past, now: float) -> Past:
    """Models that are wished no more are forgotten."""
    models = view.wish.models
    missed = {name: at for name, at in past.missed.items() if name in models}
    missed |= {name: now for name in models if misses(_loads(view, name))}
    changed = {name: at for name, at in past.changed.items() if name in models}
    return replace(past, missed=missed, changed=changed)


def _by_priority(view: View) -> list[Model]:
    return sorted(view.wish.models.values(), key=lambda model: (model.priority, model.name))


def _loads(view: View, name: str) -> list[Load]:
    return list(loads(name, view.placement, view.hosts).values())


def _waited(since: dict[str, float], past: Past, model: Model, now: float, settle: float) -> bool:
    return now - since.get(model.name, past.began) >= settle


def _settled(view: View, model: Model) -> bool:
    """Whether no copy is on its way."""
    on = [view.hosts.get(slot.host) for slot in view.placement.get(model.name, ())]
    there = [host.copies.get(model.name) for host in on if host]
    return (
        bool(on)
        and len(there) == len(on)
        and all(copy is not None and copy.state in COMING for copy in there)
    )


def _changed(view: View, change: Change) -> set[str]:
    before, after = view.extra, change.extra
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def lacks(view: View, model: Model) -> bool:
    """Whether the model misses its objective, and cannot keep it where its copies are: more is
    offered than a copy serves, or models need more of its GPU than that has."""
    them = loads(model.name, view.placement, view.hosts)
    if not misses(list(them.values())):
        return False
    gpus = {slot.host: slot for slot in view.placement[model.name]}
    return any(
        load.overrun or _taken(view, gpus[host]) > _whole(view, gpus[host])
        for host, load in them.items()
    )


def _whole(view: View, slot: Slot) -> int:
    return next((gpu.sms for gpu in view.hosts[slot.host].gpus if gpu.index == slot.gpu), 0)


def _taken(view: View, slot: Slot, without: str | None = None) -> int:
    """SMs that the models on a GPU need together."""
    there: Host = view.hosts[slot.host]
    return sum(
        takes(copy.load, _whole(view, slot))
        for name, copy in there.copies.items()
        if copy.gpu == slot.gpu and copy.load and name != without
    )


def more(view: View, model: Model, ask: Ask, refused: dict[str, str]) -> Change | None:
    """A copy more. Without room it takes the place of further copies of models of lower priority,
    and of no copy that is wished; `refused` then says why it does not come."""
    name, count = model.name, copies(model, view)
    if count >= most(model, view):
        refused[name] = f"it misses its objective with all {count} copies that it may have"
        return None
    before = _lacking(view)
    extra = view.extra | {name: count + 1 - model.copies}
    found = None
    for given in [None, *_givers(view, model)]:
        if given:
            extra = _less(extra, given)
        tried = replace(view, extra=extra)
        found = ask(tried, demands(tried))
        if not lacks_more(found, before):
            return Change(name, found, extra)
    why = found.missing.get(name) if found else None
    refused[name] = f"it misses its objective, and no GPU has room for a copy more ({why})"
    return None


def _lacking(view: View) -> dict[str, int]:
    """Copies without a place, before anything changes."""
    return {
        name: copies(model, view) - len(view.placement.get(name, ()))
        for name, model in view.wish.models.items()
    }


def _givers(view: View, model: Model) -> list[str]:
    """Models of lower priority, each as often as it has further copies; the lowest first."""
    lower = [each for each in reversed(_by_priority(view)) if each.priority > model.priority]
    return [each.name for each in lower for _ in range(view.extra.get(each.name, 0))][:MOST_GIVERS]


def _less(extra: dict[str, int], name: str) -> dict[str, int]:
    left = extra | {name: extra[name] - 1}
    return {each: count for each, count in left.items() if count > 0}


def fewer(view: View, model: Model, ask: Ask) -> Change | None:
    """A copy less, if those that stay would serve a quarter more than is offered."""
    name = model.name
    if not view.extra.get(name):
        return None
    extra = _less(view.extra, name)
    left = replace(view, extra=extra)
    wanted = demands(left)
    if name not in wanted or not (model.profile is not None or _spare(view, model)):
        return None
    wanted[name] = replace(wanted[name], rate=wanted[name].rate * SPARE)
    found = ask(left, wanted)
    return (
        None
        if name in found.unmet or lacks_more(found, _lacking(left))
        else Change(name, found, extra)
    )


def _spare(view: View, model: Model) -> bool:
    """By what its copies execute, for models without a profile: batches take as many SMs times
    seconds on other GPUs, and the GPUs with most to spare may be those that go."""
    them = loads(model.name, view.placement, view.hosts)
    if any(load.overrun for load in them.values()):
        return False
    busy = sum(takes(load, 0) * load.busy for load in them.values())
    slots = view.placement[model.name]
    free = sorted(max(0, _whole(view, slot) - _taken(view, slot, model.name)) for slot in slots)
    return busy * SPARE <= sum(free[:-1])
