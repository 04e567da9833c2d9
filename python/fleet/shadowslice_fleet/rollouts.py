"""Decides which copies change to a new version of a model, one host after the other.

A host rolls a new version out beside the released one if the model has a `rollout` section. While
the new version is unproven, all other copies keep the former version. If a host rolls the new
version back, the fleet starts no further rollout of this version.

This module does no I/O.
"""

from enum import Enum
from pathlib import PurePosixPath
from typing import Any

from shadowslice_fleet import spec as specs
from shadowslice_fleet.loop_state import CopyKey, Held, Placement
from shadowslice_fleet.moves import CommandRefused
from shadowslice_fleet.observed import Copy, ObservedHost, Rollout
from shadowslice_fleet.spec import Model, Spec


class VersionState(Enum):
    """The state of the spec's version of a model on a host that serves the model."""

    WAITING = "waiting"  # the host's file has another version
    ROLLING_OUT = "rolling out"
    ROLLED_BACK = "rolled back"
    RELEASED = "released"


def version_state(model: Model, host: ObservedHost) -> VersionState:
    """Returns the state of the model's version on a host that has the model in its file."""
    if host.paths.get(model.name) != model.version_path:
        return VersionState.WAITING
    copy = host.copies.get(model.name)
    if copy is None or serves(copy, model):
        return VersionState.RELEASED
    in_progress = copy.rollout is not None and copy.rollout.is_in_progress
    return VersionState.ROLLING_OUT if in_progress or host.busy else VersionState.ROLLED_BACK


def serves(copy: Copy, model: Model) -> bool:
    """Checks whether the released version of a copy is the version in the spec.

    Returns True if the supervisor does not report the loaded version.
    """
    if copy.loaded is None or model.version_path is None:
        return True
    return PurePosixPath(copy.loaded).is_relative_to(model.version_path)


def rollback_cause(model: Model, host: ObservedHost) -> str | None:
    """Returns the reason why a host serves another version than its file has, or None."""
    if model.name not in host.assigned or version_state(model, host) != VersionState.ROLLED_BACK:
        return None
    copy = host.copies[model.name]
    refusals = [each.why for of, each in host.refusals.items() if of.startswith(f"{model.digest}-")]
    if refusals:
        return refusals[0]
    if copy.rollout and copy.rollout.why:
        return copy.rollout.why
    return (
        f"the host serves {copy.loaded} and has no rollout in progress; "
        "change `files` or `path` in the spec to start a rollout"
    )


def active(name: str, hosts: dict[str, ObservedHost]) -> dict[str, Rollout]:
    """Returns the rollouts of a model for which both versions are loaded, by host.

    Raises CommandRefused if no host has one.
    """
    copies = {host: each.copies.get(name) for host, each in sorted(hosts.items())}
    if not any(copies.values()):
        raise CommandRefused(f"model '{name}' not found; `status` lists all models")
    found = {
        host: copy.rollout
        for host, copy in copies.items()
        if copy and copy.rollout and copy.rollout.is_active
    }
    if not found:
        raise CommandRefused(
            f"model '{name}' has no rollout in progress, and no host keeps its former version; "
            "see `status`"
        )
    return found


def is_gradual(before: Model | None, model: Model) -> bool:
    """Checks whether the change from `before` to `model` is a rollout."""
    return (
        before is not None
        and "rollout" in model.keys
        and model.version_path is not None
        and model.version_path != before.version_path
    )


def former(
    before: Spec, kept: Spec, new: Spec, hosts: dict[str, ObservedHost]
) -> list[specs.Document]:
    """Returns the entries of the models whose former version serves until `new` is rolled out.

    `kept` has the models for which an earlier rollout has not ended.
    """
    found = []
    for name, model in new.models.items():
        old = kept if name in kept.models else before
        serving = old.models.get(name)
        if serving and is_gradual(serving, model) and _is_ready_anywhere(serving, hosts):
            found.append(specs.entry(old, name))
    return found


def _is_ready_anywhere(model: Model, hosts: dict[str, ObservedHost]) -> bool:
    copies = [host.copies.get(model.name) for host in hosts.values()]
    return any(copy and copy.ready and serves(copy, model) for copy in copies)


def unfinished(
    spec: Spec, former: dict[str, Model], hosts: dict[str, ObservedHost], placement: Placement
) -> set[str]:
    """Returns the models of `former` whose new version is not yet released on all their hosts."""
    return {
        name
        for name in former.keys() & spec.models.keys()
        if not placement.get(name)
        or not all(
            _has_released(spec.models[name], hosts.get(slot.host)) for slot in placement[name]
        )
    }


def _has_released(model: Model, host: ObservedHost | None) -> bool:
    if host is None or model.name not in host.assigned:
        return False
    copy = host.copies.get(model.name)
    released = version_state(model, host) == VersionState.RELEASED
    return released and copy is not None and copy.ready


def held(
    spec: Spec, former: dict[str, Model], hosts: dict[str, ObservedHost], placement: Placement
) -> dict[CopyKey, Held]:
    """Returns the copies that keep or get another version than the one in the spec."""
    found: dict[CopyKey, Held] = {}
    for name, model in spec.models.items():
        if model.version_path is not None:
            names = sorted(slot.host for slot in placement.get(name, ()))
            found |= _held_copies(model, former.get(name), hosts, names)
    return found


def _held_copies(
    model: Model, former: Model | None, hosts: dict[str, ObservedHost], names: list[str]
) -> dict[CopyKey, Held]:
    """Returns the held copies of one model, which has slots on the hosts `names`."""
    name, found = model.name, {}
    there = {host: hosts[host] for host in names if host in hosts and name in hosts[host].assigned}
    states = {host: version_state(model, observed) for host, observed in there.items()}
    waiting = []
    for host in [host for host, state in states.items() if state == VersionState.WAITING]:
        copy = there[host].copies.get(name)
        if copy and copy.rollout and copy.rollout.is_active:
            found[CopyKey(name, host)] = Held(_still_active(copy, name), None)
        elif "rollout" in model.keys and not (copy and copy.loaded and serves(copy, model)):
            waiting.append(host)
    busy = sorted(key.host for key in found)
    obstacle = _obstacle(model, hosts, names, states, busy)
    for host in waiting if obstacle else waiting[1:]:
        why = obstacle or f"waits for the rollout on host '{waiting[0]}'"
        unchanged = former and there[host].assigned[name].startswith(f"{former.digest}-")
        found[CopyKey(name, host)] = Held(why, former if unchanged else None)
    proven = VersionState.RELEASED in states.values()
    if former and (VersionState.ROLLED_BACK in states.values() or not proven):
        why = "starts with the former version until the new one is released"
        found |= {CopyKey(name, host): Held(why, former) for host in names if host not in there}
    return found


def _still_active(copy: Copy, name: str) -> str:
    number = copy.rollout.candidate if copy.rollout else 0
    return (
        f"the rollout of version {number} is in progress, or the former version is kept; run "
        f"`shadowslice-fleet promote {name}` or `shadowslice-fleet rollback {name}`"
    )


def _obstacle(
    model: Model,
    hosts: dict[str, ObservedHost],
    names: list[str],
    states: dict[str, VersionState],
    busy: list[str],
) -> str | None:
    """Returns the reason why no further host can begin its rollout, or None.

    `busy` are the hosts on which the rollout of an earlier version has not ended.
    """
    copies = {host: hosts[host].copies.get(model.name) for host in states}
    unready = [host for host, copy in copies.items() if not (copy and copy.ready)]
    if states and len(unready) == len(states):
        return None  # No copy serves, so a rollout has no requests to protect.
    for host, state in states.items():
        if state == VersionState.ROLLED_BACK:
            return f"keeps its version, because host '{host}' rolled the new one back"
    rolling_out = [host for host, state in states.items() if state == VersionState.ROLLING_OUT]
    for host in rolling_out + busy:
        return f"waits for the rollout on host '{host}'"
    missing = [host for host in names if host not in states] + unready
    return f"waits until the copy on host '{missing[0]}' is ready" if missing else None


def shown(copy: Copy) -> dict[str, Any] | None:
    """Returns a copy's rollout for the status in JSON."""
    rollout = copy.rollout
    if rollout is None:
        return None
    return {
        "candidate": rollout.candidate,
        "former": rollout.former,
        "phase": rollout.phase,
        "mirror": rollout.mirror,
        "canary": rollout.canary,
        "kept_s": rollout.kept_s,
        "why": rollout.why,
    }
