"""Tests that moves keep enough endpoints despite lost messages, restarts and failures."""

import random
import unittest
from dataclasses import replace

from shadowslice_fleet.loop_state import desired_copies
from shadowslice_fleet.observed import Refusal, Slot
from world import World, spec, world

A, B, C0, C1 = Slot("a", 0), Slot("b", 0), Slot("c", 0), Slot("c", 1)


def place(there: World, model: str, *slots: Slot) -> None:
    there.memory = replace(there.memory, placement=there.memory.placement | {model: slots})


class Moves(unittest.TestCase):
    def setUp(self) -> None:
        self.world = world(spec("m"), {"m": (A, B)})
        self.world.steps(10)
        self.assertEqual(self.world.table("m"), {A, B})
        self.assertEqual(self.world.published("m"), {"a", "b"})

    def watched(self, steps: int, least: int = 2) -> None:
        for _ in range(steps):
            self.world.step()
            self.assertGreaterEqual(len(self.world.serving("m")), least)
            self.assertEqual(self.world.astray("m"), set())

    def test_the_old_copy_serves_until_the_new_one_does(self) -> None:
        place(self.world, "m", B, C0)
        self.watched(20)
        self.assertEqual(self.world.table("m"), {B, C0})
        self.assertEqual(self.world.published("m"), {"b", "c"})

    def test_a_copy_that_is_wanted_again_is_undrained(self) -> None:
        place(self.world, "m", B, C0)
        while not any(
            observed.copies["m"].drained
            for observed in self.world.hosts.values()
            if "m" in observed.copies
        ):
            self.world.step()
        place(self.world, "m", A, B)
        self.watched(20, least=1)
        self.assertEqual(self.world.table("m"), {A, B})
        self.assertFalse(self.world.hosts["a"].copies["m"].drained)

    def test_a_copy_that_cannot_start_leaves_the_old_one_and_its_place(self) -> None:
        self.world.broken.add(("m", "c"))
        place(self.world, "m", B, C0)
        self.watched(20)
        self.assertEqual(self.world.table("m"), {A, B})
        self.assertEqual(set(self.world.memory.placement["m"]), {A, B})
        self.assertEqual(self.world.memory.failures[("m", "c")].why, "it is broken")

    def test_a_move_between_gpus_of_a_host_changes_in_place(self) -> None:
        place(self.world, "m", B, C0)
        self.watched(20)
        place(self.world, "m", B, C1)
        self.watched(5)
        self.assertEqual(self.world.table("m"), {B, C1})

    def test_requests_under_way_hold_up_the_end_of_a_copy(self) -> None:
        busy = replace(self.world.hosts["a"].copies["m"], in_flight=1)
        self.world.hosts["a"] = replace(self.world.hosts["a"], copies={"m": busy})
        place(self.world, "m", B, C0)
        self.watched(20)
        self.assertEqual(self.world.table("m"), {A, B, C0})
        self.assertEqual(self.world.published("m"), {"b", "c"})
        self.world.steps(140)
        self.assertEqual(self.world.table("m"), {B, C0})

    def test_without_envoy_no_copy_is_removed(self) -> None:
        place(self.world, "m", B, C0)
        answers = self.world.answers
        self.world.answers = lambda model, name: False  # type: ignore[method-assign]
        self.watched(20)
        self.assertEqual(self.world.published("m"), {"a", "b", "c"})
        self.world.answers = answers  # type: ignore[method-assign]
        self.watched(20)
        self.assertEqual(self.world.table("m"), {B, C0})

    def test_a_copy_stays_until_a_slow_envoy_has_released_it(self) -> None:
        self.world.lag = 8
        place(self.world, "m", B, C0)
        self.watched(60)
        self.assertEqual(self.world.table("m"), {B, C0})

    def test_losses_and_restarts_delay_moves_and_keep_endpoints(self) -> None:
        for seed in range(200):
            chance = random.Random(seed)
            self.world.chance, self.world.lossy = chance, 0.5
            place(self.world, "m", *chance.choice([(A, B), (B, C0), (A, C1), (A, C0), (B, C1)]))
            for _ in range(chance.randrange(12)):
                self.watched(1)
                if chance.random() < 0.3:
                    self.world.restart_fleet()
            self.world.lossy = 0.0
        self.watched(60)
        self.assertEqual(self.world.table("m"), set(self.world.memory.placement["m"]))
        self.assertEqual(
            self.world.published("m"), {slot.host for slot in self.world.memory.placement["m"]}
        )


class Hosts(unittest.TestCase):
    def test_an_endpoint_of_a_dead_host_stays_until_another_serves(self) -> None:
        there = world(spec("m", copies=1), {"m": (A,)})
        there.steps(10)
        there.dead.add("a")
        there.steps(20)
        self.assertEqual(there.published("m"), {"a"})
        place(there, "m", B)
        there.steps(20)
        self.assertEqual(there.published("m"), {"b"})
        there.dead.clear()
        there.steps(20)
        self.assertEqual(there.table("m"), {B})

    def test_a_model_that_left_the_spec_is_removed(self) -> None:
        there = world(spec("m", "n"), {"m": (A, B), "n": (A, B)})
        there.steps(10)
        there.spec = spec("n")
        there.steps(10)
        self.assertEqual(there.table("m"), set())
        self.assertEqual(there.published("m"), set())
        self.assertEqual(there.table("n"), {A, B})

    def test_copies_that_are_not_published_are_adopted_after_a_restart(self) -> None:
        there = world(spec("m"), {"m": (A, B)})
        there.steps(10)
        before = [observed.copies for observed in there.hosts.values()]
        there.memory = replace(there.memory, published={})
        there.steps(5)
        self.assertEqual(there.published("m"), {"a", "b"})
        self.assertEqual([observed.copies for observed in there.hosts.values()], before)

    def test_a_failed_copy_is_retried_after_its_wait(self) -> None:
        there = world(spec("m", copies=1), {"m": (A,)})
        there.broken.add(("m", "a"))
        there.steps(10)
        self.assertEqual(there.table("m"), set())
        there.broken.clear()
        there.steps(40)
        self.assertEqual(there.table("m"), {A})

    def test_a_copy_that_serves_stays_though_its_change_fails_and_its_endpoint_was_lost(
        self,
    ) -> None:
        there = world(spec("m", copies=1), {"m": (A,)})
        there.steps(10)
        changed = replace(there.spec.models["m"], keys={"name": "m", "slo": "1s"})
        there.spec = replace(there.spec, models={"m": changed})
        assignment = desired_copies(there.spec, there.memory.placement)[("m", "a")]
        refusing = {assignment.digest: Refusal("no", 1)}
        there.hosts["a"] = replace(there.hosts["a"], refusals=refusing)
        there.memory = replace(there.memory, published={})
        there.steps(5)
        self.assertEqual(there.table("m"), {A})
        self.assertEqual(there.published("m"), {"a"})

    def test_a_host_lost_during_a_failure_does_not_stop_others(self) -> None:
        there = world(spec("m", "n", copies=1), {"m": (A,), "n": (B,)})
        there.broken.add(("m", "a"))
        there.steps(5)
        self.assertIn(("m", "a"), there.memory.failures)
        there.dead.add("a")
        place(there, "n", C0)
        there.steps(20)
        self.assertEqual(there.table("n"), {C0})

    def test_a_refusal_counts_once_and_is_tried_again(self) -> None:
        there = world(spec("m", copies=1), {"m": (A,)})
        assignment = desired_copies(there.spec, there.memory.placement)[("m", "a")]
        refusing = {assignment.digest: Refusal("no", 1)}
        there.hosts["a"] = replace(there.hosts["a"], refusals=refusing)
        there.steps(5)
        self.assertEqual(there.memory.failures[("m", "a")].why, "no")
        self.assertEqual(there.table("m"), set())
        there.steps(40)
        self.assertEqual(there.table("m"), {A})
        there.hosts["a"] = replace(there.hosts["a"], refusals={})
        there.step()
        self.assertEqual(there.memory.failures, {})

    def test_many_copies_start_in_turns(self) -> None:
        names = [f"m{at}" for at in range(40)]
        there = world(spec(*names), {name: (A, B) for name in names}, loads=4)
        for _ in range(120):
            there.step()
            loading = sum(
                each.state == "loading"
                for observed in there.hosts.values()
                for each in observed.copies.values()
            )
            self.assertLessEqual(loading, 8)
        self.assertTrue(all(there.table(name) == {A, B} for name in names))


if __name__ == "__main__":
    unittest.main()
