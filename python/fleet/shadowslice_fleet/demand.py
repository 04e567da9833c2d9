"""The demand of each model: the number of copies, and the resources of each copy.

This module does no I/O.
"""

from dataclasses import dataclass, field

from shadowslice_fleet.load import offered_rate, sms_needed
from shadowslice_fleet.loop_state import Placement
from shadowslice_fleet.observed import ObservedHost, Slot
from shadowslice_fleet.spec import Model, Spec

UNKNOWN = "cannot place the model; add a `profile`, or `need: {sms: 24, memory: 4Gi}`"


@dataclass(frozen=True)
class View:
    """The input of a placement. `hosts` has the last observation of each host."""

    spec: Spec
    placement: Placement
    hosts: dict[str, ObservedHost]
    usable: frozenset[Slot]
    extra: dict[str, int] = field(default_factory=dict)  # copies in addition to the spec, by model


@dataclass(frozen=True)
class Resources:
    """The resources of a GPU that a copy needs."""

    sms: int
    memory_mib: int
    shadow_mib: int = 0
    bandwidth: float = 0.0


@dataclass(frozen=True)
class Demand:
    """The demand of a model."""

    copies: int
    rate: float  # rows per second over all copies, for models with a profile
    resources: Resources | None  # the resources of each copy, for models without a profile
    asleep: bool = False  # all copies sleep, so they need memory only when they wake


def demands(view: View) -> dict[str, Demand]:
    """Returns the demand of all models that can be placed."""
    found = {}
    for name, model in view.spec.models.items():
        resources = _resources(model, view.hosts)
        if model.profile is not None or resources:
            rate = max(model.rate or 0.0, offered_rate(name, view.placement, view.hosts))
            asleep = _is_asleep(name, view.hosts)
            found[name] = Demand(copies(model, view), rate, resources, asleep)
    return found


def _is_asleep(name: str, hosts: dict[str, ObservedHost]) -> bool:
    """Checks whether all copies of a model sleep."""
    known = [copy for host in hosts.values() if (copy := host.copies.get(name))]
    return bool(known) and all(copy.asleep for copy in known)


def copies(model: Model, view: View) -> int:
    """Returns the number of copies that the model should have."""
    return min(model.copies + view.extra.get(model.name, 0), max_copies(model, view))


def extra_copies(view: View) -> dict[str, int]:
    """Returns the number of copies in addition to the spec, as far as the limits allow."""
    beyond = {name: copies(model, view) - model.copies for name, model in view.spec.models.items()}
    return {name: count for name, count in beyond.items() if count > 0}


def max_copies(model: Model, view: View) -> int:
    """Returns the maximum number of copies. Each host has at most one copy."""
    hosts = len({slot.host for slot in view.usable})
    return max(model.copies, hosts if model.max_copies is None else min(model.max_copies, hosts))


def unplaceable(spec: Spec, hosts: dict[str, ObservedHost]) -> list[str]:
    """Returns the models whose required resources are neither in the spec nor measured."""
    return [
        name
        for name, model in spec.models.items()
        if model.profile is None and not _resources(model, hosts)
    ]


def _resources(model: Model, hosts: dict[str, ObservedHost]) -> Resources | None:
    if model.profile is not None:
        return None
    if model.need:
        return Resources(model.need.sms, model.need.memory_mib)
    reported = [
        Resources(sms_needed(copy.load, gpu.sms), copy.load.memory_mib, copy.load.shadow_mib)
        for host in hosts.values()
        for gpu in host.gpus
        if (copy := host.copies.get(model.name)) and copy.load and copy.gpu == gpu.index
    ]
    if not reported:
        return None
    return Resources(
        max(each.sms for each in reported),
        max(each.memory_mib for each in reported),
        max(each.shadow_mib for each in reported),
    )
