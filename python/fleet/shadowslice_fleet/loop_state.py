"""The data of the control loop: its observation, its memory and its actions."""

from dataclasses import dataclass, field
from typing import NamedTuple

from shadowslice_fleet.envoy import Endpoint
from shadowslice_fleet.observed import Assignment, Assignments, ObservedHost, Slot
from shadowslice_fleet.spec import Files, Model, Spec


class CopyKey(NamedTuple):
    """The model and the host of a copy."""

    model: str
    host: str


Placement = dict[str, tuple[Slot, ...]]
Published = dict[str, tuple[Endpoint, ...]]
EnvoyHealth = dict[str, dict[str, bool]]  # by model and host; True if Envoy sends requests there


@dataclass(frozen=True)
class Observation:
    """The observation of a round: the hosts that replied recently, and the state of Envoy."""

    hosts: dict[str, ObservedHost]
    envoy_health: EnvoyHealth | None  # None if Envoy does not reply


@dataclass(frozen=True)
class Failure:
    """A copy that did not start. The next attempt is not before `until`."""

    assignment: str  # the assignment's digest
    why: str
    until: float
    times: int
    attempt: int


@dataclass(frozen=True)
class Held:
    """A copy that keeps its version although the spec has another one."""

    why: str
    model: Model | None  # the former model; None: the model in the host's file


@dataclass(frozen=True)
class Memory:
    """The state that one round passes to the next. Times are in seconds of the caller's clock."""

    placement: Placement
    published: Published
    starting: dict[CopyKey, float] = field(default_factory=dict)
    released_at: dict[CopyKey, float] = field(default_factory=dict)
    failures: dict[CopyKey, Failure] = field(default_factory=dict)
    # The models whose former version serves until their rollout ends.
    former: dict[str, Model] = field(default_factory=dict)
    held: dict[CopyKey, Held] = field(default_factory=dict)


@dataclass(frozen=True)
class Actions:
    """The actions of a round."""

    apply: dict[str, Assignments]
    fetch: list[tuple[str, Files]]
    drain: list[CopyKey]
    undrain: list[CopyKey]


def serving(envoy_health: EnvoyHealth | None) -> set[str]:
    """Returns the hosts to which Envoy sends requests of at least one model."""
    hosts = (envoy_health or {}).values()
    return {host for them in hosts for host, healthy in them.items() if healthy}


def desired_copies(
    spec: Spec, placement: Placement, held: dict[CopyKey, Held] | None = None
) -> dict[CopyKey, Assignment]:
    """Returns the copies that the placement demands. Held copies have their former model."""
    return {
        CopyKey(name, slot.host): Assignment(
            held_model((held or {}).get(CopyKey(name, slot.host)), model), slot.gpu
        )
        for name, model in spec.models.items()
        for slot in placement.get(name, ())
    }


def held_model(held: Held | None, model: Model) -> Model:
    """Returns the model of a copy, which is the former one if the copy is held."""
    return held.model if held and held.model else model
