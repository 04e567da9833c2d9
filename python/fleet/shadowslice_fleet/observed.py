"""The observed state of a host and of its supervisor."""

from dataclasses import dataclass, field
from typing import Any

from shadowslice_fleet import load
from shadowslice_fleet.load import Load
from shadowslice_fleet.spec import Document, Files, Model

FRESH_FOR = 2.0  # the seconds for which an observation counts as recent
# The seconds without a reply after which a host's copies are placed on other hosts.
LOST_AFTER = 3.0
# The same limit for a host whose copies Envoy reaches. Such a host is probably up, and only its
# Host actor may be restarting.
LOST_AFTER_SERVING = 300.0


@dataclass(frozen=True, order=True)
class Slot:
    """A GPU of a host, as the place for a copy of a model."""

    host: str
    gpu: int

    def __str__(self) -> str:
        return f"{self.host}:{self.gpu}"


@dataclass(frozen=True)
class Assignment:
    """A model that a host must serve, and the GPU for it."""

    model: Model
    gpu: int

    @property
    def digest(self) -> str:
        """The digest of the model's configuration and of the GPU's index."""
        return f"{self.model.digest}-{self.gpu}"


@dataclass(frozen=True)
class Assignments:
    """All models that a host must serve. Models in `keep` keep their current configuration."""

    new: tuple[Assignment, ...]
    keep: tuple[str, ...]


@dataclass(frozen=True)
class Refusal:
    """The reason why a command failed, and the unique number of the attempt."""

    why: str
    attempt: int


@dataclass(frozen=True)
class Gpu:
    """A GPU of a host."""

    index: int
    sms: int
    memory_mib: int
    why: str | None  # the reason why the GPU accepts no workers


@dataclass(frozen=True)
class Copy:
    """A copy of a model, as the supervisor reports it."""

    state: str
    why: str | None
    drained: bool
    gpu: int
    in_flight: int  # queued and running requests
    accepted: int
    load: Load | None = None
    asleep: bool = False  # the copy has released its weights, and its next request wakes it

    @property
    def ready(self) -> bool:
        """True if the copy serves requests."""
        return self.state in ("ready", "moved")


@dataclass(frozen=True)
class ObservedHost:
    """The observed state of a host."""

    name: str
    address: str
    http_port: int
    grpc_port: int
    why: str | None  # the reason why the supervisor does not reply
    gpus: tuple[Gpu, ...] = ()
    copies: dict[str, Copy] = field(default_factory=dict)
    assigned: dict[str, str] = field(default_factory=dict)  # digests in the file, by model
    refusals: dict[str, Refusal] = field(default_factory=dict)  # keyed by the assignment's digest
    fetched: frozenset[str] = frozenset()  # the values of `Files.key`
    fetch_failures: dict[str, Refusal] = field(default_factory=dict)  # keyed by `Files.key`
    busy: bool = False  # the host is changing its configuration
    interrupted: bool = False  # a part of the file is not applied; the fleet must send it again

    @property
    def answers(self) -> bool:
        """True if the supervisor replied."""
        return self.why is None


def gpus(status: Document, emulated_mib: int) -> tuple[Gpu, ...]:
    """Reads the GPUs from `shadowslice status --json`.

    `emulated_mib` is the memory of an emulated GPU, because the status does not contain it.
    """
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
    """Reads the copies from `shadowslice status --json`."""
    return {
        each["name"]: Copy(
            each["state"],
            each["why"],
            each["drained"],
            each["gpu"],
            each["queue"] + each["in_flight"],
            each["requests"]["accepted"],
            load.read(each),
            (each.get("sleep") or {}).get("phase") == "asleep",
        )
        for each in status["models"]
    }


def files_to_fetch(assignment: Assignment, host: ObservedHost) -> Files | None:
    """Returns the files that the host must fetch before it can apply the assignment."""
    files = assignment.model.files
    return files if files and files.key not in host.fetched else None


@dataclass
class HostRecord:
    """The last reply of a host. Times are in seconds of the monotonic clock."""

    observed: ObservedHost
    at: float  # the time of the last observation with a reply of the supervisor
    why: str | None = None  # the reason why the supervisor does not reply


def current_hosts(
    records: dict[str, HostRecord], serving: set[str], now: float
) -> dict[str, ObservedHost]:
    """Returns the hosts that are not lost. Hosts in `serving` get `LOST_AFTER_SERVING`."""
    return {
        name: each.observed
        for name, each in records.items()
        if now - each.at < (LOST_AFTER_SERVING if name in serving else LOST_AFTER)
    }
