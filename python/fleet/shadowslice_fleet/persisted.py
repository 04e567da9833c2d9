"""The state on the head's disk: the spec, the placement and the drained hosts."""

import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from shadowslice_fleet import spec as specs
from shadowslice_fleet.loop_state import Placement
from shadowslice_fleet.observed import Slot
from shadowslice_fleet.spec import Spec


class StateFault(Exception):
    """The state's folder cannot be read or written, or another actor uses the folder."""


@dataclass(frozen=True)
class PersistedState:
    """The state that is kept when the Fleet actor ends."""

    spec: Spec | None = None  # None before the first `up`; without a spec, no model is removed
    placement: Placement = field(default_factory=dict)
    drained: frozenset[str] = frozenset()
    extra: dict[str, int] = field(default_factory=dict)  # copies in addition to the spec, by model
    former: Spec = specs.EMPTY  # the former versions of models whose rollout has not ended


def lock(folder: Path) -> IO[str] | None:
    """Locks the folder, so that only one Fleet actor writes. Returns None if it is locked."""
    folder.mkdir(parents=True, exist_ok=True)
    lock_file = (folder / "lock").open("w")
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock_file.close()
        return None
    return lock_file


def load(folder: Path) -> PersistedState:
    """Reads the state. Raises StateFault."""
    path = folder / "fleet.json"
    try:
        kept = json.loads(path.read_text())
        placement = {
            name: tuple(Slot(host, gpu) for host, gpu in slots)
            for name, slots in kept["placement"].items()
        }
        spec = specs.parse(kept["wish"], str(path)) if kept["wish"] is not None else None
        former = specs.parse(kept.get("former", specs.EMPTY.document), str(path))
        return PersistedState(
            spec, placement, frozenset(kept["drained"]), dict(kept["extra"]), former
        )
    except FileNotFoundError:
        return PersistedState()
    except (OSError, ValueError, KeyError, TypeError, specs.SpecFaults) as error:
        raise StateFault(f"cannot read {path}; repair or remove the file: {error}") from error


def save(folder: Path, state: PersistedState) -> None:
    """Writes the state. Raises StateFault."""
    slots = {
        name: [(slot.host, slot.gpu) for slot in slots] for name, slots in state.placement.items()
    }
    document = {
        "wish": state.spec.document if state.spec else None,
        "placement": slots,
        "drained": sorted(state.drained),
        "extra": state.extra,
        "former": state.former.document,
    }
    draft = folder / ".fleet.json.draft"
    try:
        with draft.open("w") as file:
            os.fchmod(file.fileno(), 0o600)  # The URLs of models' files may contain passwords.
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, folder / "fleet.json")
    except OSError as error:
        raise StateFault(f"cannot write to {folder}: {error}") from error
