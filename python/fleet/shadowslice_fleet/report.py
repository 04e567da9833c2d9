"""Describes the fleet's status, and the changes that a spec would cause.

This module does no I/O.
"""

from dataclasses import dataclass
from typing import Any, TypedDict

from shadowslice_fleet import rollouts
from shadowslice_fleet.loop_state import CopyKey, EnvoyHealth, Memory, Placement
from shadowslice_fleet.observed import FRESH_FOR, Assignment, HostRecord
from shadowslice_fleet.persisted import PersistedState
from shadowslice_fleet.placement import PlacementResult
from shadowslice_fleet.spec import Spec


class CopyStatus(TypedDict):
    """The status of a copy."""

    host: str
    gpu: int | None
    state: str  # the state in the supervisor's status, `gone` or `coming`
    placed: bool
    published: bool
    served: bool  # Envoy sends requests to the copy
    as_wished: bool
    asleep: bool  # the copy sleeps until its next request
    version: int | None  # the number of the released version, which each host counts on its own
    rollout: dict[str, Any] | None  # the rollout of a new version, or the end of the last one
    held: str | None  # why the copy keeps a version that differs from the spec
    rolled_back: str | None  # why the copy serves the former version although it got the new one
    rate: float | None  # rows per second; like the next two fields, over one or two minutes
    attainment: float | None
    slack: float | None


class ModelStatus(TypedDict):
    """The status of a model."""

    wished: int  # the desired number of copies, including `extra`
    extra: int  # copies in addition to the spec, added under load
    no_more: str | None  # why a model that violates its SLO gets no further copy
    served: int
    copies: list[CopyStatus]
    missing: str | None
    failures: dict[str, str]  # the last failure on each host
    failing: list[str]  # the hosts on which the fleet waits before the next attempt
    rolled_back: dict[str, str]  # the hosts that rolled the spec's version back, and the reasons
    settled: bool


class HostStatus(TypedDict):
    """The status of a host."""

    answers: bool
    age_s: float | None  # seconds since the last reply
    why: str | None
    drained: bool
    gpus: list[dict[str, Any]]
    models: list[str]


@dataclass(frozen=True)
class Snapshot:
    """The state of the Fleet actor from which the status is created."""

    state: PersistedState
    memory: Memory
    records: dict[str, HostRecord]
    envoy_health: EnvoyHealth | None
    missing: dict[str, str]
    troubles: dict[str, str]
    placed: bool  # the placement is for the current spec and hosts
    no_more: dict[str, str]


class Status(TypedDict):
    """The status of the fleet."""

    settled: bool  # every model is in the desired state or waits after a failure
    models: dict[str, ModelStatus]
    hosts: dict[str, HostStatus]
    troubles: dict[str, str]


def status(snapshot: Snapshot, now: float) -> Status:
    """Returns the status of the fleet."""
    running = {name for each in snapshot.records.values() for name in each.observed.assigned}
    desired = snapshot.state.spec.models if snapshot.state.spec else {}
    names = sorted(desired.keys() | running)
    models = {name: _model(name, snapshot, now) for name in names}
    hosts = {
        name: _host(name, each, snapshot.state, now) for name, each in snapshot.records.items()
    }
    settled = snapshot.placed and snapshot.envoy_health is not None
    return Status(
        settled=settled and all(each["settled"] for each in models.values()),
        models=models,
        hosts=dict(sorted(hosts.items())),
        troubles=dict(snapshot.troubles),
    )


def _model(name: str, snapshot: Snapshot, now: float) -> ModelStatus:
    model = snapshot.state.spec.models.get(name) if snapshot.state.spec else None
    slots = {slot.host: slot for slot in snapshot.memory.placement.get(name, ())} if model else {}
    published = {each.host for each in snapshot.memory.published.get(name, ())}
    there = {host for host, each in snapshot.records.items() if name in each.observed.assigned}
    failures = {
        key.host: each for key, each in snapshot.memory.failures.items() if key.model == name
    }
    failing = sorted(host for host, each in failures.items() if each.until > now)
    extra = snapshot.state.extra.get(name, 0) if model else 0
    copies = []
    for host in sorted(slots.keys() | published | there):
        assignment = Assignment(model, slots[host].gpu) if model and host in slots else None
        copies.append(_copy(name, host, assignment, host in published, snapshot, now))
    rolled_back = {
        each["host"]: each["rolled_back"] or "" for each in copies if each["rolled_back"]
    }
    done = all(_done(each, failing, bool(rolled_back)) for each in copies)
    return ModelStatus(
        wished=model.copies + extra if model else 0,
        extra=extra,
        no_more=snapshot.no_more.get(name),
        served=sum(each["served"] for each in copies),
        copies=copies,
        missing=snapshot.missing.get(name) if model else None,
        failures={host: each.why for host, each in failures.items()},
        failing=failing,
        rolled_back=rolled_back,
        settled=bool(slots) == (model is not None) and done,
    )


def _done(copy: CopyStatus, failing: list[str], rolled_back: bool) -> bool:
    """Checks whether the copy needs no action now, for example because its host is lost.

    After a rollback, the copies that still have the former version need no action.
    """
    if copy["placed"]:
        stays = rolled_back and (copy["held"] or copy["rolled_back"])
        return copy["as_wished"] or copy["host"] in failing or bool(stays)
    return copy["state"] == "gone" and not copy["published"]


def _copy(
    name: str,
    host: str,
    assignment: Assignment | None,
    published: bool,
    snapshot: Snapshot,
    now: float,
) -> CopyStatus:
    record = snapshot.records.get(host)
    fresh = record is not None and now - record.at < FRESH_FOR
    copy = record.observed.copies.get(name) if record else None
    load = copy.load if copy else None
    served = (snapshot.envoy_health or {}).get(name, {}).get(host, False)
    state = "gone" if not fresh else "coming" if not copy else copy.state
    held = snapshot.memory.held.get(CopyKey(name, host)) if assignment else None
    cause = None
    if record and assignment:
        cause = rollouts.rollback_cause(assignment.model, record.observed)
    as_wished = (
        record is not None
        and copy is not None
        and assignment is not None
        and record.observed.assigned.get(name) == assignment.digest
        and copy.gpu == assignment.gpu
        and rollouts.serves(copy, assignment.model)
        and not record.observed.busy
    )
    return CopyStatus(
        host=host,
        gpu=copy.gpu if copy else None,
        state="drained" if fresh and copy and copy.drained else state,
        placed=assignment is not None,
        published=published,
        served=served,
        as_wished=as_wished and served and state == "ready",
        asleep=fresh and copy is not None and copy.asleep,
        version=copy.version if copy else None,
        rollout=rollouts.shown(copy) if copy else None,
        held=held.why if held else None,
        rolled_back=cause,
        rate=load.rate if load else None,
        attainment=load.attainment if load else None,
        slack=load.slack if load else None,
    )


def _host(name: str, record: HostRecord, state: PersistedState, now: float) -> HostStatus:
    fresh = now - record.at < FRESH_FOR
    return HostStatus(
        answers=fresh,
        age_s=round(now - record.at, 1) if record.at != float("-inf") else None,
        why=None if fresh else record.why or "the host does not reply",
        drained=name in state.drained,
        gpus=[
            {"gpu": gpu.index, "sms": gpu.sms, "memory_mib": gpu.memory_mib, "why": gpu.why}
            for gpu in record.observed.gpus
        ],
        models=sorted(record.observed.copies),
    )


def is_sufficient(model: ModelStatus) -> bool:
    """Checks whether a model has at least one copy with a slot, and all such copies serve."""
    placed = [each for each in model["copies"] if each["placed"]]
    return bool(placed) and all(each["as_wished"] for each in placed)


def rollback_reason(name: str, model: ModelStatus) -> str:
    """Returns a sentence for each host that rolled the spec's version back."""
    return "; ".join(
        f"host '{host}' rolled the new version of model '{name}' back: {why}"
        for host, why in model["rolled_back"].items()
    )


def reason(model: ModelStatus) -> str:
    """Returns the reason why a model's copies do not run in their slots."""
    known = [*model["failures"].values(), *model["rolled_back"].values(), model["missing"] or ""]
    return "; ".join(known).strip("; ")


def changes(before: Spec, new: Spec, slots: Placement, found: PlacementResult) -> list[str]:
    """Returns a line for each model that the spec would change."""
    lines = [f"{name}: removed" for name in sorted(before.models.keys() - new.models.keys())]
    for name, model in new.models.items():
        there, then = set(slots.get(name, ())), set(found.slots.get(name, ()))
        coming = ", ".join(str(slot) for slot in sorted(then - there))
        going = ", ".join(str(slot) for slot in sorted(there - then))
        parts = [f"added on {coming}" if coming else "", f"removed from {going}" if going else ""]
        old = before.models.get(name)
        if old and old.digest != model.digest and then & there:
            parts.append("rolled out" if rollouts.is_gradual(old, model) else "changed in place")
        parts.append(found.missing.get(name, ""))
        said = "; ".join(part for part in parts if part)
        if said:
            lines.append(f"{name}: {said}")
    return lines


def _remark(copy: CopyStatus) -> str:
    serves = copy["served"] and copy["state"] == "ready"
    remarks = ["" if serves else copy["state"]]
    remarks += ["asleep" if serves and copy["asleep"] else "", _rollout_remark(copy)]
    text = ", ".join(remark for remark in remarks if remark)
    return f" ({text})" if text else ""


def _rollout_remark(copy: CopyStatus) -> str:
    """Returns the phase of a rollout in few words. A completed rollout has no remark."""
    if copy["rolled_back"]:
        return "rolled back"
    rollout = copy["rollout"]
    phase = rollout["phase"] if rollout else "completed"
    if not rollout or phase in ("completed", "rolled_back"):
        return "former version" if copy["held"] else ""
    if phase in ("mirror", "canary"):
        return f"{phase} {rollout[phase] * 100:g}%"
    if phase == "released" and rollout["kept_s"] is not None:
        return f"released, former version kept for {rollout['kept_s']:.0f} s"
    return str(phase)


def lines(status: Status) -> list[str]:
    """Returns the status as a table for operators."""
    table = [f"{'MODEL':20} {'COPIES':>7} ON"]
    for name, model in status["models"].items():
        on = [
            f"{copy['host']}:{'-' if copy['gpu'] is None else copy['gpu']}" + _remark(copy)
            for copy in model["copies"]
        ]
        table.append(f"{name:20} {model['served']:>3}/{model['wished']:<3} {', '.join(on)}")
    table.append(f"{'HOST':20} {'GPUS':>7} MODELS")
    for name, host in status["hosts"].items():
        why = host["why"] or ("drained" if host["drained"] else None)
        fine = sum(gpu["why"] is None for gpu in host["gpus"])
        row = f"{name:20} {fine:>3}/{len(host['gpus']):<3} {len(host['models'])}"
        table.append(row + (f" ({why})" if why else ""))
    for name, model in status["models"].items():
        if model["extra"]:
            table.append(f"{name}: {model['extra']} extra copies due to load")
        table += [f"{name}: {why}" for why in (model["missing"], model["no_more"]) if why]
        table += [f"{name} on {host}: {why}" for host, why in model["failures"].items()]
        table += [
            f"{name} on {host}: rolled back: {why}" for host, why in model["rolled_back"].items()
        ]
        table += [
            f"{name} on {each['host']}: {each['held']}" for each in model["copies"] if each["held"]
        ]
    table += [f"{what}: {why}" for what, why in status["troubles"].items()]
    return table
