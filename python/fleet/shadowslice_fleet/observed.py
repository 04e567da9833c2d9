"""What is known of a host: its own description, and what its supervisor says of itself."""

from dataclasses import dataclass, field
from typing import Any

from shadowslice_fleet import load
from shadowslice_fleet.load import Load
from shadowslice_fleet.spec import Document, Files, Model

FRESH_FOR = 2.0  # seconds for which facts count as heard just now
LOST_AFTER = 3.0  # seconds without a host that serves nothing until its copies are placed anew
# The same if Envoy reaches its copies: its unit of the fleet may only be restarting.
LOST_AFTER_SERVING = 300.0


@dataclass(frozen=True, order=True)
class Slot:
    """A GPU of a host, as a place for one copy."""

    host: str
    gpu: int

    def __str__(self) -> str:
        return f"{self.host}:{self.gpu}"


@dataclass(frozen=True)
class Assignment:
    """One model as a host is to have it."""

    model: Model
    gpu: int

    @property
    def digest(self) -> str:
        return f"{self.model.digest}-{self.gpu}"


@dataclass(frozen=True)
class Assignments:
    """All that a host is to have; models in `keep` stay as they are."""

    new: tuple[Assignment, ...]
    keep: tuple[str, ...]


@dataclass(frozen=True)
class Refusal:
    """Why what was asked for has not been done; each trial has a number of its own."""

    why: str
    attempt: int


@dataclass(frozen=True)
class Gpu:
    index: int
    sms: int
    memory_mib: int
    why: str | None  # it takes no workers


@dataclass(frozen=True)
class Copy:
    """A model as the supervisor has it."""

    state: str
    why: str | None
    drained: bool
    gpu: int
    in_flight: int  # requests that wait or run
    accepted: int
    load: Load | None = None

    @property
    def ready(self) -> bool:
        return self.state in ("ready", "moved")


@dataclass(frozen=True)
class ObservedHost:
    name: str
    address: str
    http_port: int
    grpc_port: int
    why: str | None  # its supervisor does not answer
    gpus: tuple[Gpu, ...] = ()
    copies: dict[str, Copy] = field(default_factory=dict)
    assigned: dict[str, str] = field(
        default_factory=dict
    )  # model: digest, as the served file has it
    refusals: dict[str, Refusal] = field(default_factory=dict)  # by an order's digest
    fetched: frozenset[str] = frozenset()  # keys of files
    fetch_failures: dict[str, Refusal] = field(default_factory=dict)  # by the files' key
    busy: bool = False  # an order is being carried out
    interrupted: bool = False  # the supervisor does not go by all of its file; to be repeated

    @property
    def answers(self) -> bool:
        return self.why is None


def gpus(status: Document, emulated_mib: int) -> tuple[Gpu, ...]:
    """From `shadowslice status --json`; emulated GPUs have no memory, so that it is given."""
    return tuple(
        Gpu(each["index"], each["sms"], _memory_mib(each["nvml"], emulated_mib), each["why"])
        for each in status["gpus"]
    )


def _memory_mib(nvml: dict[str, Any] | None, emulated_mib: int) -> int:
    if nvml is None:
        return emulated_mib
    memory = nvml["memory"]
    return int(memory["total_mib"]) if memory else 0


def copies(status: Document) -> dict[str, Copy]:
    return {
        each["name"]: Copy(
            each["state"],
            each["why"],
            each["drained"],
            each["gpu"],
            each["queue"] + each["in_flight"],
            each["requests"]["accepted"],
            load.read(each),
        )
        for each in status["models"]
    }


def files_to_fetch(assignment: Assignment, host: ObservedHost) -> Files | None:
    """What the host has to fetch before it can carry out the order."""
    files = assignment.model.files
    return files if files and files.key not in host.fetched else None


@dataclass
class HostRecord:
    """What was heard of a host last; times are of the monotonic clock."""

    observed: ObservedHost
    at: float  # of the last facts from a supervisor that answered
    why: str | None = None  # the supervisor does not answer


def current_hosts(
    records: dict[str, HostRecord], serving: set[str], now: float
) -> dict[str, ObservedHost]:
    """Hosts whose copies stay where they are; Envoy sends requests to those in `serving`."""
    return {
        name: each.observed
        for name, each in records.items()
        if now - each.at < (LOST_AFTER_SERVING if name in serving else LOST_AFTER)
    }
