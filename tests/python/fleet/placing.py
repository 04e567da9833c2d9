"""Tests the fleet's placements, which the real command `shadowslice place` computes."""

from dataclasses import replace
from functools import partial
from typing import Any

from shadowslice_fleet import placement, scaling
from shadowslice_fleet.demand import View
from shadowslice_fleet.load import Load
from shadowslice_fleet.observed import Copy, Gpu, ObservedHost, Slot
from shadowslice_fleet.scaling import History
from shadowslice_fleet.spec import parse

from common import Options, emulated, need, spec_models, up_all
from rig import Rig
from scale import PROFILE

WELL = Load(132, False, 100.0, 0.5, 1024, 0, 0.0, 1.0, 0.99, 0.4)
OVERLOADED = replace(WELL, sms=None, overloaded=True, busy=0.0, attainment=0.5, rate=1000.0)
WIDE = {**PROFILE, "execution_ms": {"sms": [124, 132], "1": [60, 20], "4": [70, 26]}}


def placing(rig: Rig, options: Options) -> None:
    """Checks placements under overload, with priorities, and with measured resource needs."""
    overload(rig)
    priority(rig)
    known_needs(rig, options)


def overload(rig: Rig) -> None:
    there = view([hot(rate=50)], {"hot": {"a": OVERLOADED}})
    found, _ = placement.place_all(rig.binary, replace(there, extra={"hot": 1}))
    assert len(found.slots["hot"]) == 2 and not found.missing, found
    assert found.unsatisfied == {"hot"}, found
    there = view([hot(rate=5000)], {"hot": {"a": OVERLOADED}})
    found, _ = placement.place_all(rig.binary, there)
    assert "a copy serves" in found.missing["hot"], "the rate in the spec is not reduced"
    there = view([hot(copies=2), hot(name="other")], {"hot": {"a": WELL, "b": WELL}})
    found, extra = placement.place_all(rig.binary, replace(there, extra={"hot": 1}))
    assert extra == {} and len(found.slots["hot"]) == 2, (
        "copies of the spec come before extra copies"
    )


def priority(rig: Rig) -> None:
    low = hot(name="low", priority=2)
    there = view(
        [hot(), low], {"hot": {"a": OVERLOADED}, "low": {"b": WELL, "c": WELL}}, extra={"low": 1}
    )
    ask = partial(placement.place, rig.binary)
    change, _ = scaling.decide(there, History(0.0), 200.0, 120.0, ask)
    assert change and change.extra == {"hot": 1}, change
    assert {name: len(slots) for name, slots in change.found.slots.items()} == {"hot": 2, "low": 1}
    there = view(
        [hot(), low | {"copies": 2}], {"hot": {"a": OVERLOADED}, "low": {"b": WELL, "c": WELL}}
    )
    change, history = scaling.decide(there, History(0.0), 200.0, 120.0, ask)
    assert change is None and "no GPU has room" in history.blocked["hot"], (change, history)


def known_needs(rig: Rig, options: Options) -> None:
    """Checks that a running model reports the resources that it needs."""
    models = spec_models(options)
    del models[0]["need"]
    rig.cli("up", str(rig.write_spec(models)), "--within", "60")
    new = emulated("new", "FP32", 2)
    done = rig.cli("up", str(rig.write_spec([*models, new])), check=False)
    assert (
        done.returncode == 78
        and "'new': cannot place the model; add a `profile`, or `need:" in done.stderr
    ), done
    new |= {"need": need(8)}
    rig.cli("up", str(rig.write_spec([*models, new])), "--within", "60")
    del new["need"]
    rig.cli("up", str(rig.write_spec([*models, new | {"copies": 3}])), "--within", "60")
    assert rig.status()["models"]["new"]["served"] == 3
    up_all(rig, options)


def hot(**more: Any) -> dict[str, Any]:
    """Returns a model whose copies each need a whole GPU."""
    entry = {"name": "hot", "copies": 1, "profile": WIDE, "slo": "100ms", "batch": {"max": 4}}
    return entry | more


def view(models: list[dict[str, Any]], on: dict[str, dict[str, Load]], **more: Any) -> View:
    """Returns a view of three hosts with one GPU each."""
    hosts = {}
    for at, name in enumerate("abc"):
        copies = {
            model: Copy("ready", None, False, 0, 0, 0, them[name])
            for model, them in on.items()
            if name in them
        }
        gpus = (Gpu(0, 132, 81920, None),)
        hosts[name] = ObservedHost(name, f"10.0.0.{at + 1}", 8000, 8001, None, gpus, copies)
    slots = {model: tuple(Slot(name, 0) for name in sorted(them)) for model, them in on.items()}
    usable = frozenset(Slot(name, 0) for name in "abc")
    return View(parse({"models": models}, "w"), slots, hosts, usable, **more)
