"""Copies beyond the wish: they come where load makes them necessary, and go with it. Pure, but for
`shadowslice place`, which is asked through a function."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from shadowslice_fleet.demand import Demand, View, copies, demands, max_copies
from shadowslice_fleet.load import Load, copy_loads, sms_needed, violates_slo
from shadowslice_fleet.observed import ObservedHost, Slot
from shadowslice_fleet.placement import PlacementResult, has_more_missing
from shadowslice_fleet.spec import Model

MAX_DONORS = 8  # copies of other models that may make room for one
HEADROOM = 1.25  # times what is offered; fewer copies must serve as much
STABLE_STATES = ("unready", "ready", "moved")  # states of copies that are not on their way

Place = Callable[[View, dict[str, Demand]], PlacementResult]  # raises PlaceFailed


@dataclass(frozen=True)
class History:
    """Times in seconds of the caller's clock, by model."""

    began: float
    changed: dict[str, float] = field(default_factory=dict)  # its number of copies, last
    violated: dict[str, float] = field(default_factory=dict)  # its objective, last
    blocked: dict[str, str] = field(default_factory=dict)  # why it has no copy more


@dataclass(frozen=True)
class Change:
    model: str
    found: PlacementResult
    extra: dict[str, int]


def decide(
    view: View, history: History, now: float, settle: float, place: Place
) -> tuple[Change | None, History]:
    """One model at a time, of those that miss the one of the highest priority first; `view.hosts`
    are those heard just now. Raises PlaceFailed."""
    history = _update(view, history, now)
    blocked: dict[str, str] = {}
    change = None
    for model in _by_priority(view):
        if (
            change is None
            and _is_settled(view, model)
            and _has_waited(history.changed, history, model, now, settle)
        ):
            if needs_copy(view, model):
                change = add_copy(view, model, place, blocked)
            elif _has_waited(history.violated, history, model, now, settle):
                change = remove_copy(view, model, place)
    move_copy = {name: now for name in _changed(view, change)} if change else {}
    return change, replace(history, changed=history.changed | move_copy, blocked=blocked)


def _update(view: View, history: History, now: float) -> History:
    """Models that are wished no more are forgotten."""
    models = view.spec.models
    violated = {name: at for name, at in history.violated.items() if name in models}
    violated |= {name: now for name in models if violates_slo(_copy_loads(view, name))}
    changed = {name: at for name, at in history.changed.items() if name in models}
    return replace(history, violated=violated, changed=changed)


def _by_priority(view: View) -> list[Model]:
    return sorted(view.spec.models.values(), key=lambda model: (model.priority, model.name))


def _copy_loads(view: View, name: str) -> list[Load]:
    return list(copy_loads(name, view.placement, view.hosts).values())


def _has_waited(
    since: dict[str, float], history: History, model: Model, now: float, settle: float
) -> bool:
    return now - since.get(model.name, history.began) >= settle


def _is_settled(view: View, model: Model) -> bool:
    """Whether no copy is on its way."""
    on = [view.hosts.get(slot.host) for slot in view.placement.get(model.name, ())]
    there = [host.copies.get(model.name) for host in on if host]
    return (
        bool(on)
        and len(there) == len(on)
        and all(copy is not None and copy.state in STABLE_STATES for copy in there)
    )


def _changed(view: View, change: Change) -> set[str]:
    before, after = view.extra, change.extra
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def needs_copy(view: View, model: Model) -> bool:
    """Whether the model misses its objective, and cannot keep it where its copies are: more is
    offered than a copy serves, or models need more of its GPU than that has."""
    loads = copy_loads(model.name, view.placement, view.hosts)
    if not violates_slo(list(loads.values())):
        return False
    gpus = {slot.host: slot for slot in view.placement[model.name]}
    return any(
        load.overloaded or _needed_sms(view, gpus[host]) > _total_sms(view, gpus[host])
        for host, load in loads.items()
    )


def _total_sms(view: View, slot: Slot) -> int:
    return next((gpu.sms for gpu in view.hosts[slot.host].gpus if gpu.index == slot.gpu), 0)


def _needed_sms(view: View, slot: Slot, without: str | None = None) -> int:
    """SMs that the models on a GPU need together."""
    there: ObservedHost = view.hosts[slot.host]
    return sum(
        sms_needed(copy.load, _total_sms(view, slot))
        for name, copy in there.copies.items()
        if copy.gpu == slot.gpu and copy.load and name != without
    )


def add_copy(view: View, model: Model, place: Place, blocked: dict[str, str]) -> Change | None:
    """A copy more. Without room it takes the place of further copies of models of lower priority,
    and of no copy that is wished; `refused` then says why it does not come."""
    name, count = model.name, copies(model, view)
    if count >= max_copies(model, view):
        blocked[name] = f"it misses its objective with all {count} copies that it may have"
        return None
    before = _missing_counts(view)
    extra = view.extra | {name: count + 1 - model.copies}
    found = None
    for given in [None, *_donors(view, model)]:
        if given:
            extra = _without_one(extra, given)
        tried = replace(view, extra=extra)
        found = place(tried, demands(tried))
        if not has_more_missing(found, before):
            return Change(name, found, extra)
    why = found.missing.get(name) if found else None
    blocked[name] = f"it misses its objective, and no GPU has room for a copy more ({why})"
    return None


def _missing_counts(view: View) -> dict[str, int]:
    """Copies without a place, before anything changes."""
    return {
        name: copies(model, view) - len(view.placement.get(name, ()))
        for name, model in view.spec.models.items()
    }


def _donors(view: View, model: Model) -> list[str]:
    """Models of lower priority, each as often as it has further copies; the lowest first."""
    lower = [each for each in reversed(_by_priority(view)) if each.priority > model.priority]
    return [each.name for each in lower for _ in range(view.extra.get(each.name, 0))][:MAX_DONORS]


def _without_one(extra: dict[str, int], name: str) -> dict[str, int]:
    left = extra | {name: extra[name] - 1}
    return {each: count for each, count in left.items() if count > 0}


def remove_copy(view: View, model: Model, place: Place) -> Change | None:
    """A copy less, if those that stay would serve a quarter more than is offered."""
    name = model.name
    if not view.extra.get(name):
        return None
    extra = _without_one(view.extra, name)
    left = replace(view, extra=extra)
    wanted = demands(left)
    if name not in wanted or not (model.profile is not None or _has_headroom(view, model)):
        return None
    wanted[name] = replace(wanted[name], rate=wanted[name].rate * HEADROOM)
    found = place(left, wanted)
    return (
        None
        if name in found.unsatisfied or has_more_missing(found, _missing_counts(left))
        else Change(name, found, extra)
    )


def _has_headroom(view: View, model: Model) -> bool:
    """By what its copies execute, for models without a profile: batches take as many SMs times
    seconds on other GPUs, and the GPUs with most to spare may be those that go."""
    loads = copy_loads(model.name, view.placement, view.hosts)
    if any(load.overloaded for load in loads.values()):
        return False
    busy = sum(sms_needed(load, 0) * load.busy for load in loads.values())
    slots = view.placement[model.name]
    free = sorted(
        max(0, _total_sms(view, slot) - _needed_sms(view, slot, model.name)) for slot in slots
    )
    return busy * HEADROOM <= sum(free[:-1])
