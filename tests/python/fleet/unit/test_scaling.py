"""Copies come with load and go with it, without flapping, and take no wished copy's place."""

import unittest
from dataclasses import replace
from typing import Any

from shadowslice_fleet import load, scaling
from shadowslice_fleet.demand import Demand, View, copies, demands, most, unplaceable
from shadowslice_fleet.facts import Copy, Host, Slot
from shadowslice_fleet.load import Load
from shadowslice_fleet.placement import Placed
from shadowslice_fleet.scaling import Past
from shadowslice_fleet.wish import Wish, parse
from world import host

SETTLE = 120.0
WELL = Load(16, False, 100.0, 0.5, 2000, 800, 0.0, 1.0, 0.99, 0.4)
OVERRUN = replace(WELL, sms=None, overrun=True, busy=0.0, attainment=0.7, rate=500.0)


def wished(*models: dict[str, Any]) -> Wish:
    need = {"sms": 8, "memory": "1Gi"}
    return parse({"models": [{"copies": 1, "need": need} | each for each in models]}, "w")


def view(wish: Wish, on: dict[str, dict[str, Load]], **more: Any) -> View:
    """Three hosts of one GPU; `on`: model: host: load."""
    hosts: dict[str, Host] = {}
    for name in "abc":
        copies = {
            model: Copy("ready", None, False, 0, 0, 0, them[name])
            for model, them in on.items()
            if name in them
        }
        hosts[name] = replace(host(name), copies=copies)
    placement = {model: tuple(Slot(name, 0) for name in sorted(them)) for model, them in on.items()}
    return View(wish, placement, hosts, frozenset(Slot(name, 0) for name in "abc"), **more)


class Room:
    """Stands for `place`: the fleet has room for so many copies; those of high priority first."""

    def __init__(self, room: int) -> None:
        self.room, self.asked = room, 0

    def __call__(self, view: View, wanted: dict[str, Demand]) -> Placed:
        self.asked += 1
        left, slots, lacking = self.room, {}, {}
        for name in sorted(wanted, key=lambda name: view.wish.models[name].priority):
            count = min(left, wanted[name].copies)
            left -= count
            slots[name] = tuple(Slot(each, 0) for each in "abc"[:count])
            if count < wanted[name].copies:
                lacking[name] = wanted[name].copies - count
        return Placed(slots, {name: "no room" for name in lacking}, lacking)


class Growth(unittest.TestCase):
    def setUp(self) -> None:
        self.wish = wished({"name": "m"})
        self.short = view(self.wish, {"m": {"a": OVERRUN}})

    def look(self, of: View, past: Past, now: float, room: int = 9) -> Any:
        return scaling.look(of, past, now, SETTLE, Room(room))

    def test_an_overrun_model_that_misses_gets_one_copy_more(self) -> None:
        change, past = self.look(self.short, Past(0.0), SETTLE)
        self.assertEqual((change.model, change.extra), ("m", {"m": 1}))
        self.assertEqual((past.changed, past.missed), ({"m": SETTLE}, {"m": SETTLE}))

    def test_then_nothing_changes_until_it_has_settled(self) -> None:
        grown = view(self.wish, {"m": {"a": OVERRUN, "b": OVERRUN}}, extra={"m": 1})
        past = Past(0.0, changed={"m": 10.0})
        self.assertIsNone(self.look(grown, past, 10 + SETTLE - 1)[0])
        self.assertEqual(self.look(grown, past, 10 + SETTLE)[0].extra, {"m": 2})

    def test_one_that_misses_for_another_reason_gets_none(self) -> None:
        for each in (replace(OVERRUN, overrun=False), replace(WELL, attainment=0.5)):
            self.assertIsNone(self.look(view(self.wish, {"m": {"a": each}}), Past(0.0), 999.0)[0])

    def test_one_on_a_gpu_that_needs_more_than_it_has_gets_one(self) -> None:
        wish = wished({"name": "m"}, {"name": "n", "priority": 2})
        large = replace(WELL, sms=100)
        crowded = view(wish, {"m": {"a": replace(large, attainment=0.5)}, "n": {"a": large}})
        self.assertEqual(self.look(crowded, Past(0.0), 999.0)[0].extra, {"m": 1})

    def test_one_whose_gpu_has_just_what_its_models_need_gets_none(self) -> None:
        wish = wished({"name": "m"}, {"name": "n", "priority": 2})
        half = replace(WELL, sms=66, attainment=0.5)
        there = view(wish, {"m": {"a": half}, "n": {"a": half, "b": replace(WELL, sms=132)}})
        self.assertIsNone(self.look(there, Past(0.0), 999.0)[0])

    def test_one_that_keeps_its_objective_gets_none(self) -> None:
        there = view(self.wish, {"m": {"a": replace(OVERRUN, attainment=1.0)}})
        self.assertIsNone(self.look(there, Past(0.0), 999.0)[0])

    def test_models_that_are_wished_no_more_are_forgotten(self) -> None:
        past = Past(0.0, changed={"x": 1.0}, missed={"x": 1.0})
        _, past = self.look(view(self.wish, {"m": {"a": WELL}}), past, 2.0)
        self.assertEqual((past.changed, past.missed), ({}, {}))

    def test_copies_on_their_way_are_waited_for(self) -> None:
        loading = Copy("loading", None, False, 0, 0, 0, OVERRUN)
        hosts = self.short.hosts | {"a": replace(self.short.hosts["a"], copies={"m": loading})}
        self.assertIsNone(self.look(replace(self.short, hosts=hosts), Past(0.0), 999.0)[0])
        self.assertIsNone(self.look(replace(self.short, hosts={}), Past(0.0), 999.0)[0])

    def test_no_more_than_most_and_than_there_are_hosts(self) -> None:
        wish = wished({"name": "m", "most": 1})
        change, past = self.look(view(wish, {"m": {"a": OVERRUN}}), Past(0.0), 999.0)
        self.assertIsNone(change)
        self.assertIn("all 1 copies", past.refused["m"])
        self.assertEqual(most(self.wish.models["m"], self.short), 3)

    def test_without_room_the_reason_is_kept_until_it_is_none_any_more(self) -> None:
        change, past = self.look(self.short, Past(0.0), 999.0, room=1)
        self.assertIsNone(change)
        self.assertIn("no GPU has room for a copy more (no room)", past.refused["m"])
        self.assertEqual(
            self.look(view(self.wish, {"m": {"a": WELL}}), past, 1000.0)[1].refused, {}
        )


class Priority(unittest.TestCase):
    def setUp(self) -> None:
        self.wish = wished({"name": "high"}, {"name": "low", "priority": 2})

    def look(self, low: dict[str, Load], extra: dict[str, int], room: int) -> Any:
        there = view(self.wish, {"high": {"a": OVERRUN}, "low": low}, extra=extra)
        return scaling.look(there, Past(0.0, missed={"low": 999.0}), 999.0, SETTLE, Room(room))[0]

    def test_extra_copies_of_lower_priority_make_room(self) -> None:
        change = self.look({"a": WELL, "b": WELL}, {"low": 1}, 3)
        self.assertEqual(change.extra, {"high": 1})

    def test_the_one_of_the_highest_priority_comes_first(self) -> None:
        wish = wished({"name": "a-low", "priority": 2}, {"name": "high"})
        there = view(wish, {"a-low": {"a": OVERRUN}, "high": {"b": OVERRUN}})
        change = scaling.look(there, Past(0.0), 999.0, SETTLE, Room(9))[0]
        assert change
        self.assertEqual(change.model, "high")

    def test_the_lowest_priority_gives_first_and_an_equal_one_nothing(self) -> None:
        wish = wished(
            {"name": "m"}, {"name": "equal"}, *({"name": f"p{at}", "priority": at} for at in (2, 3))
        )
        two = {"a": WELL, "b": WELL}
        on = {"m": {"a": OVERRUN}, "equal": two, "p2": two, "p3": two}
        extra = {"equal": 1, "p2": 1, "p3": 1}
        quiet = Past(0.0, missed=dict.fromkeys(extra, 999.0))
        change = scaling.look(view(wish, on, extra=extra), quiet, 999.0, SETTLE, Room(7))[0]
        assert change
        self.assertEqual(change.extra, {"m": 1, "equal": 1, "p2": 1})
        alone = view(wish, {"m": {"a": OVERRUN}, "equal": two}, extra={"equal": 1})
        self.assertIsNone(scaling.look(alone, quiet, 999.0, SETTLE, Room(3))[0])

    def test_wished_copies_do_not(self) -> None:
        self.assertIsNone(self.look({"a": WELL}, {}, 2))

    def test_not_those_of_higher_priority(self) -> None:
        there = view(
            self.wish, {"high": {"a": WELL, "b": WELL}, "low": {"a": OVERRUN}}, extra={"high": 1}
        )
        past = Past(0.0, missed={"high": 999.0})
        self.assertIsNone(scaling.look(there, past, 999.0, SETTLE, Room(3))[0])


class Return(unittest.TestCase):
    def look(self, each: Load, past: Past, now: float = 999.0, room: int = 9) -> Any:
        there = view(wished({"name": "m"}), {"m": {"a": each, "b": each}}, extra={"m": 1})
        return scaling.look(there, past, now, SETTLE, Room(room))[0]

    def test_a_copy_goes_when_the_others_have_a_quarter_to_spare(self) -> None:
        self.assertEqual(self.look(WELL, Past(0.0)).extra, {})
        just, over = replace(WELL, sms=132, busy=0.4), replace(WELL, sms=132, busy=0.41)
        self.assertEqual(self.look(just, Past(0.0)).extra, {})
        self.assertIsNone(self.look(over, Past(0.0)))

    def test_not_soon_after_a_miss_or_a_change(self) -> None:
        self.assertIsNone(self.look(WELL, Past(0.0, missed={"m": 999.0 - SETTLE + 1})))
        self.assertIsNone(self.look(WELL, Past(0.0, changed={"m": 999.0 - SETTLE + 1})))
        self.assertIsNone(self.look(WELL, Past(990.0)), "the fleet has just started")

    def test_with_a_profile_place_says_whether_the_others_keep_up(self) -> None:
        wish = wished({"name": "m", "profile": {"execution_ms": {}}, "need": None})
        there = view(wish, {"m": {"a": WELL, "b": WELL}}, extra={"m": 1})
        asked = []

        def ask(view: View, wanted: dict[str, Demand]) -> Placed:
            asked.append(wanted["m"])
            return Placed({"m": (Slot("a", 0),)}, {}, unmet=frozenset({"m"}))

        self.assertIsNone(scaling.look(there, Past(0.0), 999.0, SETTLE, ask)[0])
        self.assertEqual(asked, [Demand(1, 250.0, None)])


class Demands(unittest.TestCase):
    def test_the_larger_of_what_is_wished_and_offered(self) -> None:
        for rate, planned in ((150, 200.0), (900, 900.0)):
            entry = {"name": "m", "profile": {"execution_ms": {}}, "rate": rate, "need": None}
            there = view(wished(entry), {"m": {"a": WELL, "b": WELL}})
            self.assertEqual(demands(there)["m"], Demand(1, planned, None))

    def test_without_a_profile_and_a_need_the_largest_that_copies_report(self) -> None:
        wish = parse({"models": [{"name": "m"}, {"name": "unknown"}]}, "w")
        there = view(wish, {"m": {"a": WELL, "b": replace(WELL, sms=24, memory_mib=1)}})
        share = demands(there)["m"].share
        assert share
        self.assertEqual((share.sms, share.memory_mib, share.shadow_mib), (24, 2000, 800))
        self.assertEqual(unplaceable(wish, there.hosts), ["unknown"])
        whole = demands(view(wish, {"m": {"a": OVERRUN}}))["m"].share
        assert whole
        self.assertEqual(whole.sms, 132)

    def test_no_more_copies_than_hosts_and_most_and_no_fewer_than_wished(self) -> None:
        wish = wished({"name": "m", "most": 2}, {"name": "n", "copies": 5})
        there = view(wish, {}, extra={"m": 9})
        self.assertEqual([copies(each, there) for each in wish.models.values()], [2, 5])
        self.assertEqual(most(wish.models["m"], replace(there, usable=frozenset())), 1)

    def test_a_status_is_read(self) -> None:
        need = {"sms": None, "why": "a copy serves 150 requests/s at most", "most": 150.0}
        need |= dict.fromkeys(("busy", "memory_mib", "shadow_mib"))
        slo = {"attainment": None, "percentile": 99.0, "slack": None}
        read = load.read({"need": need | {"rate": 1.5, "bandwidth": 0.0}, "slo": slo})
        self.assertEqual(read, Load(None, True, 1.5, 0.0, 0, 0, 0.0, None, 0.99, None))
        never = need | {"why": "the SLO cannot be met", "most": None, "rate": 1.5, "bandwidth": 0.0}
        self.assertFalse(load.read({"need": never, "slo": slo}).overrun)


if __name__ == "__main__":
    unittest.main()
