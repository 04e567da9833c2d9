"""The observed state of a host and of its supervisor."""

from dataclasses import dataclass, field
from pathlib import Path
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
class CommandReply:
    """The reply of a host to a command of the operator."""

    succeeded: bool
    text: str


@dataclass(frozen=True)
class Gpu:
    """A GPU of a host."""

    index: int
    sms: int
    memory_mib: int
    why: str | None  # the reason why the GPU accepts no workers


@dataclass(frozen=True)
class Rollout:
    """The rollout of a new version on a host, or the end of the last one."""

    candidate: int  # the number of the new version
    former: int  # the number of the version that was released before
    phase: str
    mirror: float  # the fraction of requests that are copied to the new version
    canary: float  # the fraction of requests that the new version answers
    kept_s: float | None  # seconds for which the former version is still kept
    why: str | None  # the reason why the new version was rolled back

    @property
    def is_in_progress(self) -> bool:
        """True until the new version is released or rolled back."""
        return self.phase not in ("released", "completed", "rolled_back")

    @property
    def is_active(self) -> bool:
        """True while both versions are loaded, so that `rollback` has an effect."""
        return self.phase not in ("completed", "rolled_back")


@dataclass(frozen=True)
class Copy:
    """A copy of a model, as the supervisor reports it."""

    state: str
    why: str | None
    drained: bool
    gpu: int
    in_flight: int  # queued and running requests of all versions
    accepted: int
    load: Load | None = None
    asleep: bool = False  # the copy has released its weights, and its next request wakes it
    version: int | None = None  # the number of the released version
    rollout: Rollout | None = None
    # The path of the released version's files. A path in fetched files is relative to their folder.
    loaded: str | None = None

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
    paths: dict[str, str] = field(default_factory=dict)  # paths in the file, as `Copy.loaded`
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


def copies(status: Document, files: Path) -> dict[str, Copy]:
    """Reads the copies from `shadowslice status --json`. `files` is the folder of fetched files.

    Each copy has the state of its released version. A supervisor without rollouts reports no roles.
    """
    in_flight: dict[str, int] = {}
    for each in status["models"]:
        in_flight[_name(each)] = in_flight.get(_name(each), 0) + each["queue"] + each["in_flight"]
    return {_name(each): _copy(each, in_flight[_name(each)], files) for each in _released(status)}


def _released(status: Document) -> list[Document]:
    return [each for each in status["models"] if each.get("role", "released") == "released"]


def _name(row: Document) -> str:
    """Returns the name that clients use."""
    return str(row.get("model", row["name"]))


def _copy(row: Document, in_flight: int, files: Path) -> Copy:
    loaded = row.get("loaded")
    return Copy(
        row["state"],
        row["why"],
        row["drained"],
        row["gpu"],
        in_flight,
        row["requests"]["accepted"],
        load.read(row),
        (row.get("sleep") or {}).get("phase") == "asleep",
        row.get("version"),
        _rollout(row.get("rollout")),
        relative_to(loaded["path"], files) if loaded else None,
    )


def _rollout(entry: Document | None) -> Rollout | None:
    if entry is None:
        return None
    keys = ("candidate", "former", "phase", "mirror", "canary", "kept_s", "why")
    return Rollout(*(entry[key] for key in keys))


def relative_to(path: str, files: Path) -> str:
    """Returns a path relative to the folder of fetched files, or the path if it is elsewhere."""
    return path.removeprefix(f"{files}/")


def loaded_paths(status: Document) -> list[str]:
    """Returns the paths of all loaded versions, with those that are not released."""
    return [each["loaded"]["path"] for each in status["models"] if each.get("loaded")]


def loaded_models(status: Document) -> set[str]:
    """Returns the models whose released version is loaded."""
    return {_name(each) for each in _released(status) if each.get("loaded")}


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
