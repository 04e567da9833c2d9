"""Places models on GPUs with the command `shadowslice place`."""

import json
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shadowslice_fleet import values
from shadowslice_fleet.demand import UNKNOWN, Demand, View, demands, extra_copies
from shadowslice_fleet.loop_state import Placement
from shadowslice_fleet.observed import ObservedHost, Slot
from shadowslice_fleet.spec import Model
from shadowslice_fleet.supervisor import CommandFailed, run

PLACE_TIMEOUT = 60.0  # seconds
FAULTY_SLO_MS = 1000.0
# If the rate exceeds the capacity of all copies, `place` assigns no slots to the copies. The
# request is then repeated with lower rates, and finally with the rate in the spec.
RATE_FACTOR, MAX_REDUCTIONS = 0.75, 8


class PlaceFailed(Exception):
    """The command `place` failed."""


@dataclass(frozen=True)
class PlacementResult:
    """The slots of all models, and the copies without a slot."""

    slots: Placement
    missing: dict[str, str]  # by model: the number of missing copies, and the reason
    missing_counts: dict[str, int] = field(default_factory=dict)  # the number of missing copies
    unsatisfied: frozenset[str] = frozenset()  # models whose copies cannot serve the demanded rate


def is_stale(view: View) -> bool:
    """Checks whether a copy has no slot or an unusable slot."""
    return any(
        len(view.placement.get(name, ())) < model.copies
        or not view.usable.issuperset(view.placement[name])
        for name, model in view.spec.models.items()
    )


def usable(hosts: dict[str, ObservedHost], drained: frozenset[str]) -> frozenset[Slot]:
    """Returns the GPUs that accept workers, on hosts that are not drained."""
    return frozenset(
        Slot(name, gpu.index)
        for name, host in hosts.items()
        if name not in drained
        for gpu in host.gpus
        if gpu.why is None
    )


def current_slots(view: View) -> Placement:
    """Returns each model's usable slots. Models without a placement use their copies' slots."""
    running: Placement = {
        model: tuple(
            Slot(name, host.copies[model].gpu)
            for name, host in sorted(view.hosts.items())
            if model in host.assigned and model in host.copies
        )
        for model in view.spec.models
    }
    there = {name: view.placement.get(name) or running[name] for name in view.spec.models}
    return {name: tuple(slot for slot in on if slot in view.usable) for name, on in there.items()}


def place_all(binary: str, view: View) -> tuple[PlacementResult, dict[str, int]]:
    """Places all models. Returns the result, and the additional copies by model.

    The additional copies stay only if all copies in the spec still get slots. Raises PlaceFailed.
    """
    least = place(binary, view, demands(replace(view, extra={})))
    if not view.extra:
        return least, {}
    found = place(binary, view, demands(view))
    if has_more_missing(found, least.missing_counts):
        return least, {}
    return found, extra_copies(view)


def has_more_missing(found: PlacementResult, before: dict[str, int]) -> bool:
    """Checks whether any model has more copies without a slot than in `before`."""
    return any(count > before.get(name, 0) for name, count in found.missing_counts.items())


def place(binary: str, view: View, wanted: dict[str, Demand]) -> PlacementResult:
    """Runs `place`. Lowers rates that the copies cannot serve. Raises PlaceFailed."""
    models, found = view.spec.models, _run_place(binary, view, wanted)
    unsatisfied = found.unsatisfied
    for left in range(MAX_REDUCTIONS, 0, -1):
        planned = {name: models[name].rate or 0.0 for name in found.unsatisfied}
        over = [name for name in planned if wanted[name].rate > planned[name]]
        if not over:
            break
        wanted = wanted | {
            name: replace(
                wanted[name],
                rate=max(planned[name], wanted[name].rate * (RATE_FACTOR if left > 1 else 0)),
            )
            for name in over
        }
        found = _run_place(binary, view, wanted)
    unknown = models.keys() - wanted.keys()
    why = {name: f"{models[name].copies} missing: {UNKNOWN}" for name in unknown}
    stay = {name: slots for name, slots in current_slots(view).items() if name in unknown}
    return PlacementResult(
        found.slots | stay, found.missing | why, found.missing_counts, unsatisfied
    )


def _run_place(binary: str, view: View, wanted: dict[str, Demand]) -> PlacementResult:
    with tempfile.TemporaryDirectory(prefix="shadowslice-fleet-") as folder:
        stdin = request(view, wanted, Path(folder))
        for name, model in view.spec.models.items():
            if model.profile is not None:
                (Path(folder) / f"{name}.json").write_text(json.dumps(model.profile))
        try:
            answer = json.loads(run(binary, ["place", "-"], PLACE_TIMEOUT, json.dumps(stdin)))
        except (CommandFailed, ValueError) as error:
            raise PlaceFailed(f"cannot place the models: {error}") from error
    return parse_reply(answer)


def request(view: View, wanted: dict[str, Demand], profiles: Path) -> dict[str, Any]:
    """Returns the input of `place`."""
    gpus = [
        {"host": name, "gpu": gpu.index, "sms": gpu.sms, "memory_mib": gpu.memory_mib}
        for name, host in sorted(view.hosts.items())
        for gpu in host.gpus
        if Slot(name, gpu.index) in view.usable
    ]
    on = current_slots(view)
    models = [
        _model(view.spec.models[name], demand, on[name], profiles)
        for name, demand in wanted.items()
    ]
    return {"gpus": gpus, "models": models}


def _model(model: Model, demand: Demand, on: tuple[Slot, ...], profiles: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": model.name,
        "copies": demand.copies,
        "priority": model.priority,
        "on": [{"host": slot.host, "gpu": slot.gpu} for slot in on],
    }
    if demand.resources:
        return entry | asdict(demand.resources)
    slo = model.keys.get("slo")
    latency = slo.get("latency") if isinstance(slo, dict) else slo
    batch = model.keys.get("batch")
    max_batch = batch.get("max") if isinstance(batch, dict) else None
    entry |= {"profile": str(profiles / f"{model.name}.json"), "rate": demand.rate}
    entry |= {"asleep": True} if demand.asleep else {}
    try:
        entry["slo_ms"] = values.duration_s(latency) * 1000
    except values.ValueFault:
        entry["slo_ms"] = FAULTY_SLO_MS  # The SLO is faulty, and the supervisor reports the fault.
    return entry | (
        {"max_batch": max_batch} if isinstance(max_batch, int) and max_batch > 0 else {}
    )


def parse_reply(answer: dict[str, Any]) -> PlacementResult:
    """Parses the output of `place`."""
    slots: Placement = {}
    missing: dict[str, str] = {}
    missing_counts: dict[str, int] = {}
    for model in answer["models"]:
        slots[model["name"]] = tuple(sorted(Slot(on["host"], on["gpu"]) for on in model["on"]))
        if model["missing"]:
            missing[model["name"]] = f"{model['missing']} missing: {model['why']}"
            missing_counts[model["name"]] = model["missing"]
    unsatisfied = frozenset(model["name"] for model in answer["models"] if not model.get("need"))
    return PlacementResult(slots, missing, missing_counts, unsatisfied)
