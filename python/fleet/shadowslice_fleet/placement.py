"""Which GPUs have which models: `shadowslice place` decides, this asks it."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shadowslice_fleet import values
from shadowslice_fleet.facts import Host, Slot
from shadowslice_fleet.states import Placement
from shadowslice_fleet.supervisor import CommandFailed, run
from shadowslice_fleet.wish import Model, Wish

PLACE_WITHIN = 60.0  # seconds
FAULTY_SLO_MS = 1000.0


class PlaceFailed(Exception):
    """No placement could be computed."""


@dataclass(frozen=True)
class Placed:
    slots: Placement
    missing: dict[str, str]  # model: how many copies are missing, and why


def stale(wish: Wish, placement: Placement, usable: frozenset[Slot]) -> bool:
    """Whether a copy lacks a place, or its place is gone."""
    return any(
        len(placement.get(name, ())) < model.copies or not usable.issuperset(placement[name])
        for name, model in wish.models.items()
    )


def usable(hosts: dict[str, Host], drained: frozenset[str]) -> frozenset[Slot]:
    return frozenset(
        Slot(name, gpu.index)
        for name, host in hosts.items()
        if name not in drained
        for gpu in host.gpus
        if gpu.why is None
    )


def present(
    wish: Wish, placement: Placement, hosts: dict[str, Host], slots: frozenset[Slot]
) -> Placement:
    """Where copies are: their places as far as they are usable, else where they run."""
    running: Placement = {
        model: tuple(
            Slot(name, host.copies[model].gpu)
            for name, host in sorted(hosts.items())
            if model in host.ordered and model in host.copies
        )
        for model in wish.models
    }
    there = {name: placement.get(name) or running[name] for name in wish.models}
    return {name: tuple(slot for slot in on if slot in slots) for name, on in there.items()}


def place(
    binary: str, wish: Wish, placement: Placement, hosts: dict[str, Host], slots: frozenset[Slot]
) -> Placed:
    """Asks the binary. Raises PlaceFailed."""
    with tempfile.TemporaryDirectory(prefix="shadowslice-fleet-") as folder:
        question = ask(wish, placement, hosts, slots, Path(folder))
        for name, model in wish.models.items():
            if model.profile is not None:
                (Path(folder) / f"{name}.json").write_text(json.dumps(model.profile))
        try:
            answer = json.loads(run(binary, ["place", "-"], PLACE_WITHIN, json.dumps(question)))
        except (CommandFailed, ValueError) as error:
            raise PlaceFailed(f"the models cannot be placed: {error}") from error
    return read(answer)


def ask(
    wish: Wish, placement: Placement, hosts: dict[str, Host], slots: frozenset[Slot], profiles: Path
) -> dict[str, Any]:
    gpus = [
        {"host": name, "gpu": gpu.index, "sms": gpu.sms, "memory_mib": gpu.memory_mib}
        for name, host in sorted(hosts.items())
        for gpu in host.gpus
        if Slot(name, gpu.index) in slots
    ]
    models = [_model(model, placement, profiles) for model in wish.models.values()]
    return {"gpus": gpus, "models": models}


def _model(model: Model, placement: Placement, profiles: Path) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "name": model.name,
        "copies": model.copies,
        "priority": model.priority,
        "on": [{"host": slot.host, "gpu": slot.gpu} for slot in placement.get(model.name, ())],
    }
    if model.need:
        return asked | {"sms": model.need.sms, "memory_mib": model.need.memory_mib}
    slo = model.keys.get("slo")
    latency = slo.get("latency") if isinstance(slo, dict) else slo
    batch = model.keys.get("batch")
    most = batch.get("max") if isinstance(batch, dict) else None
    asked["profile"] = str(profiles / f"{model.name}.json")
    try:
        asked["slo_ms"] = values.duration_s(latency) * 1000
    except values.ValueFault:
        asked["slo_ms"] = FAULTY_SLO_MS  # the supervisor will name the fault
    if model.rate:
        asked["rate"] = model.rate
    return asked | ({"max_batch": most} if isinstance(most, int) and most > 0 else {})


def read(answer: dict[str, Any]) -> Placed:
    slots: Placement = {}
    missing: dict[str, str] = {}
    for model in answer["models"]:
        slots[model["name"]] = tuple(sorted(Slot(on["host"], on["gpu"]) for on in model["on"]))
        if model["missing"]:
            missing[model["name"]] = f"{model['missing']} missing: {model['why']}"
    return Placed(slots, missing)
