"""Decides the next actions from the spec, the placement and the observation.

The loop is level-triggered. After a restart, it observes everything again. Only its wait times and
its counts of failures start from zero.

This module does no I/O.
"""

from dataclasses import replace

from shadowslice_fleet import rollouts
from shadowslice_fleet.copies import Pass
from shadowslice_fleet.loop_state import (
    Actions,
    CopyKey,
    Failure,
    Memory,
    Observation,
    Placement,
    desired_copies,
    held_model,
)
from shadowslice_fleet.observed import Assignment, ObservedHost, Slot
from shadowslice_fleet.spec import Spec

MAX_STARTING = 8  # the maximum number of copies in the fleet that are starting
READY_TIMEOUT = 330.0  # seconds; above the defaults of `timeouts.warm` and `timeouts.spawn`
RETRY_AFTER, RETRY_MAX = 15.0, 600.0  # seconds from a failure to the next attempt: first, maximum


def decide(
    spec: Spec, observation: Observation, memory: Memory, now: float
) -> tuple[Actions, Memory]:
    """Returns the actions of this round, and the memory for the next round."""
    held = rollouts.held(spec, memory.former, observation.hosts, memory.placement)
    memory = replace(memory, held=held)
    failures = _failures(spec, observation, memory, now)
    placement = _revert_failed(spec, observation, memory, failures, now)
    copies = desired_copies(spec, placement, held)
    starting = {
        key: memory.starting.get(key, now)
        for key in copies
        if _is_starting(key, observation.hosts.get(key.host))
    }
    memory = replace(memory, placement=placement, failures=failures, starting=starting)
    running = {name for host in observation.hosts.values() for name in host.assigned}
    one_pass = Pass(spec, observation, memory, now, MAX_STARTING - len(starting))
    for name in sorted(running | spec.models.keys() | memory.published.keys()):
        one_pass.add_model(name)
    return one_pass.actions(), one_pass.memory()


def _is_starting(key: CopyKey, host: ObservedHost | None) -> bool:
    if host is None or key.model not in host.assigned:
        return False
    copy = host.copies.get(key.model)
    return copy is None or not copy.ready


def _failures(
    spec: Spec, observation: Observation, memory: Memory, now: float
) -> dict[CopyKey, Failure]:
    """Returns the new failures, and the earlier failures of models whose spec is unchanged."""
    kept = {
        key: failure
        for key, failure in memory.failures.items()
        if key.model in spec.models
        and failure.assignment.startswith(
            held_model(memory.held.get(key), spec.models[key.model]).digest
        )
        and not _has_recovered(key, failure, observation)
    }
    for key, assignment in desired_copies(spec, memory.placement, memory.held).items():
        host, before = observation.hosts.get(key.host), kept.get(key)
        if host is None or (before and before.until > now):
            continue
        found = _failure_cause(key, assignment, host, memory, now)
        if found is None or (before and before.attempt == found[1] != 0):
            continue
        times = before.times + 1 if before and before.assignment == assignment.digest else 1
        wait = min(RETRY_AFTER * 2 ** (times - 1), RETRY_MAX)
        kept[key] = Failure(assignment.digest, found[0], now + wait, times, found[1])
    return kept


def _has_recovered(key: CopyKey, failure: Failure, observation: Observation) -> bool:
    """Checks whether the copy has become ready."""
    host = observation.hosts.get(key.host)
    if (
        host is None
        or host.assigned.get(key.model) != failure.assignment
        or failure.assignment in host.refusals
    ):
        return False
    copy = host.copies.get(key.model)
    return copy is not None and copy.ready


def _failure_cause(
    key: CopyKey, assignment: Assignment, host: ObservedHost, memory: Memory, now: float
) -> tuple[str, int] | None:
    """Returns the reason why the copy does not start, and the attempt that the host refused.

    The attempt is 0 if the host did not refuse the copy, but the copy failed.
    """
    files = assignment.model.files
    refusal = host.refusals.get(assignment.digest) or (
        host.fetch_failures.get(files.key) if files else None
    )
    if refusal:
        return refusal.why, refusal.attempt
    serves = any(each.host == key.host for each in memory.published.get(key.model, ()))
    if serves or host.assigned.get(key.model) != assignment.digest:
        return None
    copy = host.copies.get(key.model)
    if copy and copy.state == "unready":
        return copy.why or "the copy is unready", 0
    if now - memory.starting.get(key, now) > READY_TIMEOUT:
        return f"the copy was not ready within {READY_TIMEOUT:g} s", 0
    return None


def _revert_failed(
    spec: Spec,
    observation: Observation,
    memory: Memory,
    failures: dict[CopyKey, Failure],
    now: float,
) -> Placement:
    """Returns a placement that replaces each failed copy with an old copy that still serves."""
    reverted = dict(memory.placement)
    for key, assignment in desired_copies(spec, memory.placement, memory.held).items():
        failure = failures.get(key)
        if not failure or failure.assignment != assignment.digest or failure.until <= now:
            continue
        slots = reverted[key.model]
        old = _serving_slot(key, assignment, observation, {slot.host for slot in slots})
        if old:
            rest = [slot for slot in slots if slot.host != key.host]
            reverted[key.model] = tuple(sorted([*rest, old]))
    return reverted


def _serving_slot(
    key: CopyKey, assignment: Assignment, observation: Observation, placed_on: set[str]
) -> Slot | None:
    """Returns a slot outside the placement that serves the model. Prefers the same host."""
    name = key.model
    for host in [key.host, *sorted(observation.hosts.keys() - placed_on)]:
        observed = observation.hosts.get(host)
        copy = observed.copies.get(name) if observed and name in observed.assigned else None
        if copy and copy.ready and (host, copy.gpu) != (key.host, assignment.gpu):
            return Slot(host, copy.gpu)
    return None
