"""What reconciliation goes by, and what it asks for."""

from dataclasses import dataclass, field

from shadowslice_fleet.envoy import Endpoint
from shadowslice_fleet.facts import Host, Order, Orders, Slot
from shadowslice_fleet.wish import Files, Wish

At = tuple[str, str]  # model, host
Placement = dict[str, tuple[Slot, ...]]
Published = dict[str, tuple[Endpoint, ...]]
Taken = dict[str, dict[str, bool]]  # model: host: whether Envoy sends requests there


@dataclass(frozen=True)
class Seen:
    """`hosts` are those heard just now."""

    hosts: dict[str, Host]
    taken: Taken | None  # None: Envoy does not answer


@dataclass(frozen=True)
class Failure:
    """A copy that did not come; until `until` it is not tried again."""

    order: str  # digest
    why: str
    until: float
    times: int
    trial: int


@dataclass(frozen=True)
class Memory:
    """What the next step needs; times are in seconds of the caller's clock."""

    placement: Placement
    published: Published
    starting: dict[At, float] = field(default_factory=dict)
    let_go: dict[At, float] = field(default_factory=dict)
    failures: dict[At, Failure] = field(default_factory=dict)


@dataclass(frozen=True)
class Actions:
    apply: dict[str, Orders]
    fetch: list[tuple[str, Files]]
    drain: list[At]
    undrain: list[At]


def serving(taken: Taken | None) -> set[str]:
    """Hosts to which Envoy sends requests."""
    hosts = (taken or {}).values()
    return {host for them in hosts for host, healthy in them.items() if healthy}


def placed(wish: Wish, placement: Placement) -> dict[At, Order]:
    """The copies that should be."""
    return {
        (name, slot.host): Order(model, slot.gpu)
        for name, model in wish.models.items()
        for slot in placement.get(name, ())
    }
