"""Renders a supervisor's configuration from the base configuration and the host's assignments.

The first line is a comment with the digest of each assignment. The file therefore contains both the
assignments and the configuration, and one atomic replacement updates both.

This module does no I/O.
"""

import json
import re
from pathlib import Path

from shadowslice_fleet.observed import Assignment, Assignments, relative_to
from shadowslice_fleet.spec import Document

MARK = "# shadowslice-fleet "


def render(
    base: Document, assignments: Assignments, before: str, files: Path, profiles: Path
) -> str:
    """Returns the new text. `before` is the current text, which contains the models to keep."""
    digests, entries = assigned(before), _entries(before)
    kept = [name for name in assignments.keep if name in digests and name in entries]
    models = [entries[name] for name in kept]
    models += [entry(assignment, files, profiles) for assignment in assignments.new]
    now = {name: digests[name] for name in kept}
    now |= {assignment.model.name: assignment.digest for assignment in assignments.new}
    document = json.dumps(base | {"models": models}, indent=1)
    return f"{MARK}{json.dumps(now)}\n{document}\n"


def _entries(text: str) -> dict[str, Document]:
    if not text.startswith(MARK):
        return {}
    return {each["name"]: each for each in json.loads(text.partition("\n")[2])["models"]}


def paths(text: str, files: Path) -> dict[str, str]:
    """Returns the path of each model with files. Paths in fetched files are relative to `files`.

    Returns nothing if the file is damaged, as after a full disk. The next change replaces the file.
    """
    try:
        entries = _entries(text)
    except ValueError:
        return {}
    return {
        name: relative_to(str(each["path"]), files)
        for name, each in entries.items()
        if "path" in each
    }


def models_with_rollout(text: str) -> set[str]:
    """Returns the models that may serve another version than the file has. Raises ValueError."""
    return {name for name, each in _entries(text).items() if "rollout" in each}


def model_names(text: str) -> list[str]:
    """Returns the models' names in the order of the file, because faults refer to indexes."""
    return list(_entries(text))


def entry(assignment: Assignment, files: Path, profiles: Path) -> Document:
    """Returns a model's configuration. Its relative paths refer to the folder of fetched files."""
    model = assignment.model
    own = model.keys | {"gpu": assignment.gpu, "priority": model.priority}
    if model.files and "path" in own:
        own["path"] = str(files / model.files.key / str(own["path"]))
    if model.profile is not None:
        own["profile"] = str(profile(assignment, profiles))
    return own


def profile(assignment: Assignment, profiles: Path) -> Path:
    """Returns the path of the file to which the Host actor writes a model's profile."""
    return profiles / f"{assignment.model.name}-{assignment.model.digest}.json"


def assigned(text: str) -> dict[str, str]:
    """Returns each assignment's digest by model, or nothing if the fleet did not write the file."""
    first = text.partition("\n")[0]
    if not first.startswith(MARK):
        return {}
    try:
        digests = json.loads(first[len(MARK) :])
    except ValueError:
        return {}
    return {str(name): str(digest) for name, digest in digests.items()}


def faults_by_model(faults: list[str], models: list[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the faults of each model, and the faults of the base configuration."""
    by_model: dict[str, str] = {}
    others = []
    for fault in faults:
        found = re.search(r": models\[(\d+)\]\.?(.*)", fault)
        if found and int(found[1]) < len(models):
            by_model.setdefault(models[int(found[1])], found[2].removeprefix(": "))
        elif " note: " not in fault:
            others.append(fault)
    return by_model, others
