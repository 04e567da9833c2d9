"""Adds copies of a model if it violates its SLO, and removes them when they are not needed.

This module does no I/O, except for the function that runs `shadowslice place`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from shadowslice_fleet.demand import Demand, View, copies, demands, max_copies
from shadowslice_fleet.load import Load, copy_loads, sms_needed, violates_slo
from shadowslice_fleet.observed import ObservedHost, Slot
from shadowslice_fleet.placement import PlacementResult, has_more_missing
from shadowslice_fleet.spec import Model

MAX_DONORS = 8  # the maximum number of other models' extra copies to remove for one copy
HEADROOM = 1.25  # the remaining copies must be able to serve the current rate times this
# The states of copies that are neither starting nor stopping.
STABLE_STATES = ("unready", "ready", "moved")

Place = Callable[[View, dict[str, Demand]], PlacementResult]  # raises PlaceFailed


@dataclass(frozen=True)
class History:
    """The times of earlier changes and violations, in seconds of the caller's clock, by model."""

    began: float
    changed: dict[str, float] = field(default_factory=dict)  # the last change of copies
    violated: dict[str, float] = field(default_factory=dict)  # the last SLO violation
    blocked: dict[str, str] = field(default_factory=dict)  # why the model gets no further copy


@dataclass(frozen=True)
class Change:
    """A change of the number of copies of one model, and the resulting placement."""

    model: str
    found: PlacementResult
    extra: dict[str, int]


def decide(
    view: View, history: History, now: float, settle: float, place: Place
) -> tuple[Change | None, History]:
    """Changes the copies of at most one model: the first by priority that needs a change.

    `view.hosts` are the hosts that have replied recently. Raises PlaceFailed.
    """
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
    """Adds new violations to the history, and removes models that are not in the spec."""
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
    """Checks whether all copies of the model run and none is starting or stopping."""
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
    """Checks whether the model violates its SLO and cannot meet the SLO with its current copies.

    The copies are insufficient if the rate exceeds the capacity of a copy, or if the models on a
    copy's GPU need more SMs than this GPU has.
    """
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
    """Returns the number of SMs that all models on a GPU need together."""
    there: ObservedHost = view.hosts[slot.host]
    return sum(
        sms_needed(copy.load, _total_sms(view, slot))
        for name, copy in there.copies.items()
        if copy.gpu == slot.gpu and copy.load and name != without
    )


def add_copy(view: View, model: Model, place: Place, blocked: dict[str, str]) -> Change | None:
    """Adds a copy.

    If no GPU has room, removes extra copies of models with lower priority. Never removes copies
    that the spec requires. If there is still no room, adds the reason to `blocked`.
    """
    name, count = model.name, copies(model, view)
    if count >= max_copies(model, view):
        blocked[name] = f"the model violates its SLO with its maximum of {count} copies"
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
    blocked[name] = f"the model violates its SLO, and no GPU has room for another copy ({why})"
    return None


def _missing_counts(view: View) -> dict[str, int]:
    """Returns the number of copies without a slot before the change, by model."""
    return {
        name: copies(model, view) - len(view.placement.get(name, ()))
        for name, model in view.spec.models.items()
    }


def _donors(view: View, model: Model) -> list[str]:
    """Returns the models of lower priority, lowest first, each once for each extra copy."""
    lower = [each for each in reversed(_by_priority(view)) if each.priority > model.priority]
    return [each.name for each in lower for _ in range(view.extra.get(each.name, 0))][:MAX_DONORS]


def _without_one(extra: dict[str, int], name: str) -> dict[str, int]:
    left = extra | {name: extra[name] - 1}
    return {each: count for each, count in left.items() if count > 0}


def remove_copy(view: View, model: Model, place: Place) -> Change | None:
    """Removes an extra copy if the other copies can serve `HEADROOM` times the current rate."""
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
    """Checks whether the other copies of a model without a profile have enough headroom.

    The estimate assumes that a batch takes the same number of SM-seconds on every GPU. It also
    assumes that the removed copy is on the GPU with the most free SMs.
    """
    loads = copy_loads(model.name, view.placement, view.hosts)
    if any(load.overloaded for load in loads.values()):
        return False
    busy = sum(sms_needed(load, 0) * load.busy for load in loads.values())
    slots = view.placement[model.name]
    free = sorted(
        max(0, _total_sms(view, slot) - _needed_sms(view, slot, model.name)) for slot in slots
    )
    return busy * HEADROOM <= sum(free[:-1])
