"""Finds and removes fetched files that no model on a host needs any more."""

import os
import shutil
import tempfile
from pathlib import Path

from shadowslice_fleet import files
from shadowslice_fleet.spec import SHA256

PROFILES = ".profiles"  # the folder to which the Host actor writes the models' profiles
EXPIRE_AFTER = 86400.0  # seconds from the last use to the removal


def find_unused(folder: Path, used: str, now: float) -> set[Path]:
    """Returns files and profiles that `used` has not named for `EXPIRE_AFTER`.

    `used` is the configuration and the paths of loaded versions. The returned files include partial
    fetches. Updates the last use of the files that `used` names. `now` is the wall-clock time in
    seconds.
    """
    ours = [path for path in _in(folder) if SHA256.fullmatch(path.name) or _is_partial(path)]
    found = set()
    for path in [*ours, *_in(folder / PROFILES)]:
        age = now - path.stat().st_mtime
        if path.name in used or age < 0:
            files.mark_used(path)
        elif age > EXPIRE_AFTER:
            found.add(path)
    return found


def move_aside(path: Path) -> Path:
    """Renames a path in one step, so that a file with its final name is never incomplete.

    Returns the new path. Raises OSError.
    """
    aside = Path(tempfile.mkdtemp(prefix=f"{files.PARTIAL}{path.name}-", dir=path.parent))
    os.replace(path, aside if path.is_dir() else aside / path.name)
    return aside


def remove(aside: Path) -> None:
    """Removes a path that was moved aside. Raises OSError."""
    shutil.rmtree(aside)


def _in(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _is_partial(path: Path) -> bool:
    return path.name.startswith(files.PARTIAL)
