"""Tests that extra copies follow the load without flapping, and that the spec's copies stay."""

import unittest
from dataclasses import replace
from typing import Any

from shadowslice_fleet import load, scaling
from shadowslice_fleet.demand import Demand, View, copies, demands, max_copies, unplaceable
from shadowslice_fleet.load import Load
from shadowslice_fleet.observed import Copy, ObservedHost, Slot
from shadowslice_fleet.placement import PlacementResult
from shadowslice_fleet.scaling import History
from shadowslice_fleet.spec import Spec, parse
from world import host

SETTLE = 120.0
WELL = Load(16, False, 100.0, 0.5, 2000, 800, 0.0, 1.0, 0.99, 0.4)
OVERLOADED = replace(WELL, sms=None, overloaded=True, busy=0.0, attainment=0.7, rate=500.0)


def spec_of(*models: dict[str, Any]) -> Spec:
    need = {"sms": 8, "memory": "1Gi"}
    return parse({"models": [{"copies": 1, "need": need} | each for each in models]}, "w")


def view(spec: Spec, on: dict[str, dict[str, Load]], **more: Any) -> View:
    """Returns a view of three hosts with one GPU each. `on` maps models and hosts to loads."""
    hosts: dict[str, ObservedHost] = {}
    for name in "abc":
        copies = {
            model: Copy("ready", None, False, 0, 0, 0, them[name])
            for model, them in on.items()
            if name in them
        }
        hosts[name] = replace(host(name), copies=copies)
    placement = {model: tuple(Slot(name, 0) for name in sorted(them)) for model, them in on.items()}
    return View(spec, placement, hosts, frozenset(Slot(name, 0) for name in "abc"), **more)


class Room:
    """A replacement for `place` with room for `room` copies. Higher priorities come first."""

    def __init__(self, room: int) -> None:
        self.room, self.calls = room, 0

    def __call__(self, view: View, wanted: dict[str, Demand]) -> PlacementResult:
        self.calls += 1
        left, slots, missing_counts = self.room, {}, {}
        for name in sorted(wanted, key=lambda name: view.spec.models[name].priority):
            count = min(left, wanted[name].copies)
            left -= count
            slots[name] = tuple(Slot(each, 0) for each in "abc"[:count])
            if count < wanted[name].copies:
                missing_counts[name] = wanted[name].copies - count
        return PlacementResult(slots, {name: "no room" for name in missing_counts}, missing_counts)


class Growth(unittest.TestCase):
    def setUp(self) -> None:
        self.spec = spec_of({"name": "m"})
        self.short = view(self.spec, {"m": {"a": OVERLOADED}})

    def decide(self, of: View, history: History, now: float, room: int = 9) -> Any:
        return scaling.decide(of, history, now, SETTLE, Room(room))

    def test_an_overloaded_model_that_violates_its_slo_gets_a_copy(self) -> None:
        change, history = self.decide(self.short, History(0.0), SETTLE)
        self.assertEqual((change.model, change.extra), ("m", {"m": 1}))
        self.assertEqual((history.changed, history.violated), ({"m": SETTLE}, {"m": SETTLE}))

    def test_then_nothing_changes_until_it_has_settled(self) -> None:
        grown = view(self.spec, {"m": {"a": OVERLOADED, "b": OVERLOADED}}, extra={"m": 1})
        history = History(0.0, changed={"m": 10.0})
        self.assertIsNone(self.decide(grown, history, 10 + SETTLE - 1)[0])
        self.assertEqual(self.decide(grown, history, 10 + SETTLE)[0].extra, {"m": 2})

    def test_a_violation_with_another_cause_adds_none(self) -> None:
        for each in (replace(OVERLOADED, overloaded=False), replace(WELL, attainment=0.5)):
            self.assertIsNone(
                self.decide(view(self.spec, {"m": {"a": each}}), History(0.0), 999.0)[0]
            )

    def test_a_model_on_an_oversubscribed_gpu_gets_one(self) -> None:
        spec = spec_of({"name": "m"}, {"name": "n", "priority": 2})
        large = replace(WELL, sms=100)
        crowded = view(spec, {"m": {"a": replace(large, attainment=0.5)}, "n": {"a": large}})
        self.assertEqual(self.decide(crowded, History(0.0), 999.0)[0].extra, {"m": 1})

    def test_a_model_on_an_exactly_full_gpu_gets_none(self) -> None:
        spec = spec_of({"name": "m"}, {"name": "n", "priority": 2})
        half = replace(WELL, sms=66, attainment=0.5)
        there = view(spec, {"m": {"a": half}, "n": {"a": half, "b": replace(WELL, sms=132)}})
        self.assertIsNone(self.decide(there, History(0.0), 999.0)[0])

    def test_a_model_that_meets_its_slo_gets_none(self) -> None:
        there = view(self.spec, {"m": {"a": replace(OVERLOADED, attainment=1.0)}})
        self.assertIsNone(self.decide(there, History(0.0), 999.0)[0])

    def test_models_that_left_the_spec_are_forgotten(self) -> None:
        history = History(0.0, changed={"x": 1.0}, violated={"x": 1.0})
        _, history = self.decide(view(self.spec, {"m": {"a": WELL}}), history, 2.0)
        self.assertEqual((history.changed, history.violated), ({}, {}))

    def test_starting_copies_are_waited_for(self) -> None:
        loading = Copy("loading", None, False, 0, 0, 0, OVERLOADED)
        hosts = self.short.hosts | {"a": replace(self.short.hosts["a"], copies={"m": loading})}
        self.assertIsNone(self.decide(replace(self.short, hosts=hosts), History(0.0), 999.0)[0])
        self.assertIsNone(self.decide(replace(self.short, hosts={}), History(0.0), 999.0)[0])

    def test_no_more_copies_than_the_maximum_and_hosts(self) -> None:
        spec = spec_of({"name": "m", "most": 1})
        change, history = self.decide(view(spec, {"m": {"a": OVERLOADED}}), History(0.0), 999.0)
        self.assertIsNone(change)
        self.assertIn("maximum of 1 copies", history.blocked["m"])
        self.assertEqual(max_copies(self.spec.models["m"], self.short), 3)

    def test_without_room_the_reason_is_kept_while_it_applies(self) -> None:
        change, history = self.decide(self.short, History(0.0), 999.0, room=1)
        self.assertIsNone(change)
        self.assertIn("no GPU has room for another copy (no room)", history.blocked["m"])
        self.assertEqual(
            self.decide(view(self.spec, {"m": {"a": WELL}}), history, 1000.0)[1].blocked, {}
        )


class Priority(unittest.TestCase):
    def setUp(self) -> None:
        self.spec = spec_of({"name": "high"}, {"name": "low", "priority": 2})

    def decide(self, low: dict[str, Load], extra: dict[str, int], room: int) -> Any:
        there = view(self.spec, {"high": {"a": OVERLOADED}, "low": low}, extra=extra)
        return scaling.decide(
            there, History(0.0, violated={"low": 999.0}), 999.0, SETTLE, Room(room)
        )[0]

    def test_extra_copies_of_lower_priority_make_room(self) -> None:
        change = self.decide({"a": WELL, "b": WELL}, {"low": 1}, 3)
        self.assertEqual(change.extra, {"high": 1})

    def test_the_one_of_the_highest_priority_comes_first(self) -> None:
        spec = spec_of({"name": "a-low", "priority": 2}, {"name": "high"})
        there = view(spec, {"a-low": {"a": OVERLOADED}, "high": {"b": OVERLOADED}})
        change = scaling.decide(there, History(0.0), 999.0, SETTLE, Room(9))[0]
        assert change
        self.assertEqual(change.model, "high")

    def test_the_lowest_priority_gives_first_and_an_equal_one_nothing(self) -> None:
        spec = spec_of(
            {"name": "m"}, {"name": "equal"}, *({"name": f"p{at}", "priority": at} for at in (2, 3))
        )
        two = {"a": WELL, "b": WELL}
        on = {"m": {"a": OVERLOADED}, "equal": two, "p2": two, "p3": two}
        extra = {"equal": 1, "p2": 1, "p3": 1}
        quiet = History(0.0, violated=dict.fromkeys(extra, 999.0))
        change = scaling.decide(view(spec, on, extra=extra), quiet, 999.0, SETTLE, Room(7))[0]
        assert change
        self.assertEqual(change.extra, {"m": 1, "equal": 1, "p2": 1})
        alone = view(spec, {"m": {"a": OVERLOADED}, "equal": two}, extra={"equal": 1})
        self.assertIsNone(scaling.decide(alone, quiet, 999.0, SETTLE, Room(3))[0])

    def test_copies_of_the_spec_make_no_room(self) -> None:
        self.assertIsNone(self.decide({"a": WELL}, {}, 2))

    def test_copies_of_higher_priority_make_no_room(self) -> None:
        there = view(
            self.spec, {"high": {"a": WELL, "b": WELL}, "low": {"a": OVERLOADED}}, extra={"high": 1}
        )
        history = History(0.0, violated={"high": 999.0})
        self.assertIsNone(scaling.decide(there, history, 999.0, SETTLE, Room(3))[0])


class Return(unittest.TestCase):
    def decide(self, each: Load, history: History, now: float = 999.0, room: int = 9) -> Any:
        there = view(spec_of({"name": "m"}), {"m": {"a": each, "b": each}}, extra={"m": 1})
        return scaling.decide(there, history, now, SETTLE, Room(room))[0]

    def test_a_copy_is_removed_when_the_others_have_headroom(self) -> None:
        self.assertEqual(self.decide(WELL, History(0.0)).extra, {})
        just, over = replace(WELL, sms=132, busy=0.4), replace(WELL, sms=132, busy=0.41)
        self.assertEqual(self.decide(just, History(0.0)).extra, {})
        self.assertIsNone(self.decide(over, History(0.0)))

    def test_no_copy_is_removed_soon_after_a_violation_or_a_change(self) -> None:
        self.assertIsNone(self.decide(WELL, History(0.0, violated={"m": 999.0 - SETTLE + 1})))
        self.assertIsNone(self.decide(WELL, History(0.0, changed={"m": 999.0 - SETTLE + 1})))
        self.assertIsNone(self.decide(WELL, History(990.0)), "the fleet has just started")

    def test_with_a_profile_place_says_whether_the_others_keep_up(self) -> None:
        spec = spec_of({"name": "m", "profile": {"execution_ms": {}}, "need": None})
        there = view(spec, {"m": {"a": WELL, "b": WELL}}, extra={"m": 1})
        calls = []

        def ask(view: View, wanted: dict[str, Demand]) -> PlacementResult:
            calls.append(wanted["m"])
            return PlacementResult({"m": (Slot("a", 0),)}, {}, unsatisfied=frozenset({"m"}))

        self.assertIsNone(scaling.decide(there, History(0.0), 999.0, SETTLE, ask)[0])
        self.assertEqual(calls, [Demand(1, 250.0, None)])


class Demands(unittest.TestCase):
    def test_the_larger_of_the_planned_and_the_measured_rate(self) -> None:
        for rate, planned in ((150, 200.0), (900, 900.0)):
            entry = {"name": "m", "profile": {"execution_ms": {}}, "rate": rate, "need": None}
            there = view(spec_of(entry), {"m": {"a": WELL, "b": WELL}})
            self.assertEqual(demands(there)["m"], Demand(1, planned, None))

    def test_without_a_profile_and_a_need_the_largest_that_copies_report(self) -> None:
        spec = parse({"models": [{"name": "m"}, {"name": "unknown"}]}, "w")
        there = view(spec, {"m": {"a": WELL, "b": replace(WELL, sms=24, memory_mib=1)}})
        resources = demands(there)["m"].resources
        assert resources
        self.assertEqual(
            (resources.sms, resources.memory_mib, resources.shadow_mib), (24, 2000, 800)
        )
        self.assertEqual(unplaceable(spec, there.hosts), ["unknown"])
        full = demands(view(spec, {"m": {"a": OVERLOADED}}))["m"].resources
        assert full
        self.assertEqual(full.sms, 132)

    def test_limits_of_the_number_of_copies(self) -> None:
        spec = spec_of({"name": "m", "most": 2}, {"name": "n", "copies": 5})
        there = view(spec, {}, extra={"m": 9})
        self.assertEqual([copies(each, there) for each in spec.models.values()], [2, 5])
        self.assertEqual(max_copies(spec.models["m"], replace(there, usable=frozenset())), 1)

    def test_a_status_is_read(self) -> None:
        need = {"sms": None, "why": "a copy serves 150 requests/s at most", "most": 150.0}
        need |= dict.fromkeys(("busy", "memory_mib", "shadow_mib"))
        slo = {"attainment": None, "percentile": 99.0, "slack": None}
        read = load.read({"need": need | {"rate": 1.5, "bandwidth": 0.0}, "slo": slo})
        self.assertEqual(read, Load(None, True, 1.5, 0.0, 0, 0, 0.0, None, 0.99, None))
        never = need | {"why": "the SLO cannot be met", "most": None, "rate": 1.5, "bandwidth": 0.0}
        self.assertFalse(load.read({"need": never, "slo": slo}).overloaded)


if __name__ == "__main__":
    unittest.main()
