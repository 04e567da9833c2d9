"""What the fleet keeps on its head's disk: the wish, where copies are placed, drained hosts."""

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
    """The state folder cannot be used."""


@dataclass(frozen=True)
class PersistedState:
    spec: Spec | None = None  # None: nothing was ever wished, so that nothing is removed
    placement: Placement = field(default_factory=dict)
    drained: frozenset[str] = frozenset()
    extra: dict[str, int] = field(default_factory=dict)  # copies beyond the wish, by model


def lock(folder: Path) -> IO[str] | None:
    """Held by the one Fleet actor that may write; None while another one holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock_file = (folder / "lock").open("w")
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock_file.close()
        return None
    return lock_file


def load(folder: Path) -> PersistedState:
    """Raises StateFault."""
    path = folder / "fleet.json"
    try:
        kept = json.loads(path.read_text())
        placement = {
            name: tuple(Slot(host, gpu) for host, gpu in slots)
            for name, slots in kept["placement"].items()
        }
        spec = specs.parse(kept["wish"], str(path)) if kept["wish"] is not None else None
        return PersistedState(spec, placement, frozenset(kept["drained"]), dict(kept["extra"]))
    except FileNotFoundError:
        return PersistedState()
    except (OSError, ValueError, KeyError, TypeError, specs.SpecFaults) as error:
        raise StateFault(f"{path} cannot be read; mend or remove it: {error}") from error


def save(folder: Path, state: PersistedState) -> None:
    """Raises StateFault."""
    slots = {
        name: [(slot.host, slot.gpu) for slot in slots] for name, slots in state.placement.items()
    }
    document = {
        "wish": state.spec.document if state.spec else None,
        "placement": slots,
        "drained": sorted(state.drained),
        "extra": state.extra,
    }
    draft = folder / ".fleet.json.draft"
    try:
        with draft.open("w") as file:
            os.fchmod(file.fileno(), 0o600)  # URLs of files may have passwords
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, folder / "fleet.json")
    except OSError as error:
        raise StateFault(f"{folder} cannot be written: {error}") from error
