"""What the fleet keeps on its head's disk: the wish, where copies are placed, drained hosts."""

import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from shadowslice_fleet import wish
from shadowslice_fleet.facts import Slot
from shadowslice_fleet.states import Placement
from shadowslice_fleet.wish import Wish


class StateFault(Exception):
    """The state folder cannot be used."""


@dataclass(frozen=True)
class State:
    wish: Wish | None = None  # None: nothing was ever wished, so that nothing is removed
    placement: Placement = field(default_factory=dict)
    drained: frozenset[str] = frozenset()
    extra: dict[str, int] = field(default_factory=dict)  # copies beyond the wish, by model


def lock(folder: Path) -> IO[str] | None:
    """Held by the one Fleet actor that may write; None while another one holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    held = (folder / "lock").open("w")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.close()
        return None
    return held


def load(folder: Path) -> State:
    """Raises StateFault."""
    path = folder / "fleet.json"
    try:
        kept = json.loads(path.read_text())
        placement = {
            name: tuple(Slot(host, gpu) for host, gpu in slots)
            for name, slots in kept["placement"].items()
        }
        wished = wish.parse(kept["wish"], str(path)) if kept["wish"] is not None else None
        return State(wished, placement, frozenset(kept["drained"]), dict(kept["extra"]))
    except FileNotFoundError:
        return State()
    except (OSError, ValueError, KeyError, TypeError, wish.WishFaults) as error:
        raise StateFault(f"{path} cannot be read; mend or remove it: {error}") from error


def save(folder: Path, state: State) -> None:
    """Raises StateFault."""
    slots = {
        name: [(slot.host, slot.gpu) for slot in slots] for name, slots in state.placement.items()
    }
    document = {
        "wish": state.wish.document if state.wish else None,
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
