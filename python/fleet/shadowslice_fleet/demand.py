"""What placing is asked for: how many copies of each model, and what each of them takes. Pure."""

from dataclasses import dataclass, field

from shadowslice_fleet.facts import Host, Slot
from shadowslice_fleet.load import offered, takes
from shadowslice_fleet.states import Placement
from shadowslice_fleet.wish import Model, Wish

UNKNOWN = "a `profile`, or `need: {sms: 24, memory: 4Gi}` is needed to place it"


@dataclass(frozen=True)
class View:
    """What placing goes by. `hosts` is what each host said last, whether it answers or not."""

    wish: Wish
    placement: Placement
    hosts: dict[str, Host]
    usable: frozenset[Slot]
    extra: dict[str, int] = field(default_factory=dict)  # copies beyond the wish, by model


@dataclass(frozen=True)
class Share:
    """What a copy takes of a GPU."""

    sms: int
    memory_mib: int
    shadow_mib: int = 0
    bandwidth: float = 0.0


@dataclass(frozen=True)
class Demand:
    copies: int
    rate: float  # rows a second of all copies, where a profile says what they take
    share: Share | None  # of each copy, where none does


def demands(view: View) -> dict[str, Demand]:
    """Of all models that can be placed."""
    found = {}
    for name, model in view.wish.models.items():
        share = _share(model, view.hosts)
        if model.profile is not None or share:
            rate = max(model.rate or 0.0, offered(name, view.placement, view.hosts))
            found[name] = Demand(copies(model, view), rate, share)
    return found


def copies(model: Model, view: View) -> int:
    return min(model.copies + view.extra.get(model.name, 0), most(model, view))


def extras(view: View) -> dict[str, int]:
    """Copies beyond the wish, as many as may be."""
    beyond = {name: copies(model, view) - model.copies for name, model in view.wish.models.items()}
    return {name: count for name, count in beyond.items() if count > 0}


def most(model: Model, view: View) -> int:
    """Copies that the model may have; a host has one at most."""
    hosts = len({slot.host for slot in view.usable})
    return max(model.copies, hosts if model.most is None else min(model.most, hosts))


def unplaceable(wish: Wish, hosts: dict[str, Host]) -> list[str]:
    """Models of which neither the wish nor a copy says what they take."""
    return [
        name
        for name, model in wish.models.items()
        if model.profile is None and not _share(model, hosts)
    ]


def _share(model: Model, hosts: dict[str, Host]) -> Share | None:
    if model.profile is not None:
        return None
    if model.need:
        return Share(model.need.sms, model.need.memory_mib)
    said = [
        Share(takes(copy.load, gpu.sms), copy.load.memory_mib, copy.load.shadow_mib)
        for host in hosts.values()
        for gpu in host.gpus
        if (copy := host.copies.get(model.name)) and copy.load and copy.gpu == gpu.index
    ]
    if not said:
        return None
    return Share(
        max(each.sms for each in said),
        max(each.memory_mib for each in said),
        max(each.shadow_mib for each in said),
    )
