"""Tests the status of the fleet, and the moves that the fleet refuses."""

import unittest
from dataclasses import replace

from shadowslice_fleet import moves, report
from shadowslice_fleet.observed import HostRecord, Slot
from shadowslice_fleet.persisted import PersistedState
from shadowslice_fleet.placement import PlacementResult
from world import World, host, spec, world

A, B, C0, C1 = Slot("a", 0), Slot("b", 0), Slot("c", 0), Slot("c", 1)


def status(there: World, unheard: str = "", **more: object) -> report.Status:
    """Returns the current status. The hosts in `unheard` last replied a minute ago."""
    records = {
        name: HostRecord(observed, there.now - (60 if name in unheard else 0))
        for name, observed in there.hosts.items()
    }
    state = PersistedState(there.spec, there.memory.placement)
    snapshot = report.Snapshot(state, there.memory, records, there.envoy_health, {}, {}, True, {})
    return report.status(replace(snapshot, **more), there.now)  # type: ignore[arg-type]


class Statuses(unittest.TestCase):
    def setUp(self) -> None:
        self.world = world(spec("m"), {"m": (A, B)})
        self.world.steps(10)

    def test_a_fleet_in_the_desired_state(self) -> None:
        current = status(self.world)
        self.assertTrue(current["settled"] and report.is_sufficient(current["models"]["m"]))
        self.assertEqual(current["models"]["m"]["served"], 2)

    def test_a_copy_that_sleeps_is_in_the_desired_state_and_marked(self) -> None:
        awake = self.world.hosts["b"].copies["m"]
        self.world.hosts["b"] = replace(
            self.world.hosts["b"], copies={"m": replace(awake, asleep=True)}
        )
        current = status(self.world)
        self.assertTrue(current["settled"] and report.is_sufficient(current["models"]["m"]))
        self.assertIn("a:0, b:0 (asleep)", "\n".join(report.lines(current)))

    def test_a_silent_host_is_not_in_the_desired_state(self) -> None:
        current = status(self.world, "b")
        self.assertFalse(current["settled"] or report.is_sufficient(current["models"]["m"]))
        self.assertIn("b:0 (gone)", "\n".join(report.lines(current)))

    def test_a_lost_host_is_waited_for_until_its_copies_serve_elsewhere(self) -> None:
        self.world.dead.add("b")
        self.world.memory = replace(self.world.memory, placement={"m": (A, C0)})
        seen = []
        for _ in range(20):
            self.world.step()
            current = status(self.world, "b")
            seen.append(current["settled"])
            self.assertEqual(current["settled"], self.world.published("m") == {"a", "c"})
        self.assertEqual(seen[-1], True)
        self.assertTrue(report.is_sufficient(current["models"]["m"]))

    def test_a_lost_copy_of_a_removed_model_is_not_waited_for(self) -> None:
        self.world.dead.add("b")
        self.world.spec = spec()
        self.world.steps(20)
        self.assertTrue(status(self.world, "b")["settled"])

    def test_a_move_is_not_settled_before_its_end(self) -> None:
        self.world.memory = replace(self.world.memory, placement={"m": (B, C0)})
        seen = []
        for _ in range(20):
            self.world.step()
            seen.append(status(self.world)["settled"])
        self.assertEqual(seen, sorted(seen))
        self.assertEqual(self.world.table("m") == {B, C0}, seen[-1])

    def test_a_changed_model_is_not_settled_before_its_assignment(self) -> None:
        keys = {"name": "m", "need": {"sms": 8, "memory": "1Gi"}, "slo": "1s"}
        self.world.spec = type(self.world.spec)(
            {"m": replace(self.world.spec.models["m"], keys=keys)}, {"models": [keys]}
        )
        self.assertFalse(status(self.world)["settled"])
        self.world.steps(3)
        self.assertTrue(status(self.world)["settled"])

    def test_a_copy_that_cannot_start_is_reported_and_not_waited_for(self) -> None:
        self.world.broken.add(("m", "c"))
        self.world.memory = replace(self.world.memory, placement={"m": (A, B, C0)})
        self.world.steps(8)
        current = status(self.world)
        self.assertTrue(current["settled"])
        self.assertFalse(report.is_sufficient(current["models"]["m"]))
        table = report.lines(current)
        self.assertIn("m on c: it is broken", table)
        self.assertIn("c                      2/2   0", table, "its GPUs and models")

    def test_an_unknown_state_is_not_settled(self) -> None:
        self.assertTrue(status(self.world)["settled"])
        for more in ({"placed": False}, {"envoy_health": None}, {"envoy_health": {}}):
            self.assertFalse(status(self.world, **more)["settled"], more)
        observed = self.world.hosts["a"]
        elsewhere = replace(observed.copies["m"], gpu=1)
        for other in (replace(observed, busy=True), replace(observed, copies={"m": elsewhere})):
            self.world.hosts["a"] = other
            self.assertFalse(status(self.world)["settled"])

    def test_a_model_without_a_slot_is_not_settled(self) -> None:
        there = world(spec("m"), {})
        there.steps(2)
        self.assertFalse(status(there)["settled"])

    def test_changes_of_a_spec(self) -> None:
        found = PlacementResult({"m": (A, C0), "n": (B,)}, {"n": "1 missing: no room"})
        lines = report.changes(spec("m", "old"), spec("m", "n"), {"m": (A, B)}, found)
        self.assertEqual(
            lines,
            [
                "old: removed",
                "m: added on c:0; removed from b:0",
                "n: added on b:0; 1 missing: no room",
            ],
        )


class Moves(unittest.TestCase):
    def test_moves(self) -> None:
        self.assertEqual(moves.move_copy((A,), B, None), (B,))
        self.assertEqual(moves.move_copy((A, B), C0, "a"), (B, C0))
        self.assertEqual(moves.move_copy((A, C0), C1, None), (A, C1))

    def test_refused_moves(self) -> None:
        for slots, to, source, why in (
            ((A, B), C0, None, "add --from"),
            ((A, B), C0, "c", "host 'c' has no copy"),
            ((A, B), B, "a", "already has a copy"),
        ):
            self.assertRaisesRegex(moves.CommandRefused, why, moves.move_copy, slots, to, source)
        hosts = {"a": host("a"), "c": host("c", 2)}
        for name, gpu in (("x", None), ("a", 1), ("a", None), ("a", 0), ("c", 0)):
            self.assertRaises(
                moves.CommandRefused, moves.find_slot, hosts, frozenset({C1}), name, gpu
            )

    def test_the_first_gpu_that_takes_models_is_the_target(self) -> None:
        hosts, usable = {"c": host("c", 2)}, frozenset({A, C1})
        self.assertEqual(moves.find_slot(hosts, usable, "c", None), C1)
        self.assertEqual(moves.find_slot(hosts, usable | {C0}, "c", None), C0)


if __name__ == "__main__":
    unittest.main()
