"""What the fleet says of itself. Pure."""

from typing import Any, TypedDict

from shadowslice_fleet.hosts import HEARD_FOR, Heard
from shadowslice_fleet.placement import Placed
from shadowslice_fleet.state import State
from shadowslice_fleet.states import Memory, Placement, Taken
from shadowslice_fleet.wish import Wish


class CopyStatus(TypedDict):
    host: str
    gpu: int | None
    state: str  # of the supervisor, or `gone`, `coming`
    placed: bool
    published: bool
    served: bool  # Envoy sends requests there


class ModelStatus(TypedDict):
    wished: int
    served: int
    copies: list[CopyStatus]
    missing: str | None
    failures: dict[str, str]  # by host
    settled: bool


class HostStatus(TypedDict):
    answers: bool
    age_s: float | None  # since it was heard
    why: str | None
    drained: bool
    gpus: list[dict[str, Any]]
    models: list[str]


class Status(TypedDict):
    settled: bool  # all that can be is as wished
    adopting: bool
    models: dict[str, ModelStatus]
    hosts: dict[str, HostStatus]
    troubles: dict[str, str]


def status(
    state: State,
    memory: Memory,
    heard: dict[str, Heard],
    taken: Taken | None,
    missing: dict[str, str],
    troubles: dict[str, str],
    adopting: bool,
    now: float,
) -> Status:
    names = state.wish.models.keys() | {
        name for each in heard.values() for name in each.facts.ordered
    }
    models = {
        name: _model(name, state, memory, heard, taken or {}, missing.get(name), now)
        for name in sorted(names)
    }
    hosts = {name: _host(name, each, state, now) for name, each in sorted(heard.items())}
    settled = (
        not adopting and taken is not None and all(each["settled"] for each in models.values())
    )
    return Status(
        settled=settled, adopting=adopting, models=models, hosts=hosts, troubles=dict(troubles)
    )


def _model(
    name: str,
    state: State,
    memory: Memory,
    heard: dict[str, Heard],
    taken: Taken,
    missing: str | None,
    now: float,
) -> ModelStatus:
    slots = {slot.host: slot for slot in memory.placement.get(name, ())}
    published = {each.host for each in memory.published.get(name, ())}
    there = {host for host, each in heard.items() if name in each.facts.ordered}
    copies = []
    for host in sorted(slots.keys() | published | there):
        known = heard.get(host)
        fresh = known is not None and now - known.at < HEARD_FOR
        copy = known.facts.copies.get(name) if known else None
        state_ = "gone" if not fresh else copy.state if copy else "coming"
        copies.append(
            CopyStatus(
                host=host,
                gpu=copy.gpu if copy else None,
                state="drained" if copy and copy.drained and fresh else state_,
                placed=host in slots,
                published=host in published,
                served=taken.get(name, {}).get(host, False),
            )
        )
    wished = state.wish.models[name].copies if name in state.wish.models else 0
    settled = bool(slots) == (wished > 0) and all(
        each["placed"]
        and each["served"]
        and each["state"] == "ready"
        and each["gpu"] == slots[each["host"]].gpu
        for each in copies
    )
    failures = {at[1]: each.why for at, each in memory.failures.items() if at[0] == name}
    return ModelStatus(
        wished=wished,
        served=sum(each["served"] for each in copies),
        copies=copies,
        missing=missing if wished else None,
        failures=failures,
        settled=settled,
    )


def _host(name: str, heard: Heard, state: State, now: float) -> HostStatus:
    fresh = now - heard.at < HEARD_FOR
    return HostStatus(
        answers=fresh,
        age_s=round(now - heard.at, 1) if heard.at != float("-inf") else None,
        why=None if fresh else heard.why or "it is not heard",
        drained=name in state.drained,
        gpus=[
            {"gpu": gpu.index, "sms": gpu.sms, "memory_mib": gpu.memory_mib, "why": gpu.why}
            for gpu in heard.facts.gpus
        ],
        models=sorted(heard.facts.copies),
    )


def changes(before: Wish, new: Wish, slots: Placement, found: Placed) -> list[str]:
    """A line for each model that would change."""
    lines = [f"{name}: goes" for name in sorted(before.models.keys() - new.models.keys())]
    for name, model in new.models.items():
        there, then = set(slots.get(name, ())), set(found.slots.get(name, ()))
        coming = ", ".join(str(slot) for slot in sorted(then - there))
        going = ", ".join(str(slot) for slot in sorted(there - then))
        parts = [f"comes to {coming}" if coming else "", f"leaves {going}" if going else ""]
        old = before.models.get(name)
        if old and old.digest != model.digest and then & there:
            parts.append("changes in place")
        parts.append(found.missing.get(name, ""))
        said = "; ".join(part for part in parts if part)
        if said:
            lines.append(f"{name}: {said}")
    return lines


def lines(status: Status) -> list[str]:
    """A table for people."""
    table = [f"{'MODEL':20} {'COPIES':>7} ON"]
    for name, model in status["models"].items():
        on = [
            f"{copy['host']}:{'-' if copy['gpu'] is None else copy['gpu']}"
            + ("" if copy["served"] and copy["state"] == "ready" else f" ({copy['state']})")
            for copy in model["copies"]
        ]
        table.append(f"{name:20} {model['served']:>3}/{model['wished']:<3} {', '.join(on)}")
    for name, model in status["models"].items():
        if model["missing"]:
            table.append(f"{name}: {model['missing']}")
        table += [f"{name} on {host}: {why}" for host, why in model["failures"].items()]
    for name, host in status["hosts"].items():
        if host["why"] or host["drained"]:
            table.append(f"host {name}: {host['why'] or 'drained'}")
    table += [f"{what}: {why}" for what, why in status["troubles"].items()]
    return table
