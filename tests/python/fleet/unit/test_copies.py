"""Tests the control loop's actions for a model's copies, and the retries of failed copies."""

import unittest
from dataclasses import replace

from shadowslice_fleet.observed import Refusal, Slot
from shadowslice_fleet.reconcile import READY_TIMEOUT, RETRY_AFTER, RETRY_MAX
from shadowslice_fleet.spec import Files, Model
from world import STEP, World, assignment, spec, world

A, B, C0, C1 = Slot("a", 0), Slot("b", 0), Slot("c", 0), Slot("c", 1)


class Case(unittest.TestCase):
    def there(self, *slots: Slot, copies: int = 1) -> World:
        """Returns a world in which the model serves on these slots."""
        there = world(spec("m", copies=copies), {"m": slots})
        there.steps(10)
        self.assertEqual(there.table("m"), set(slots))
        return there

    def place(self, there: World, *slots: Slot) -> None:
        there.memory = replace(there.memory, placement={"m": slots})

    def change(self, there: World, **more: object) -> Model:
        """Changes the model in the spec."""
        changed = replace(there.spec.models["m"], keys={"name": "m", "slo": "1s"}, **more)  # type: ignore[arg-type]
        there.spec = replace(there.spec, models={"m": changed})
        return changed

    def set_copy(self, there: World, host: str, **more: object) -> None:
        observed = there.hosts[host]
        changed = replace(observed.copies["m"], **more)  # type: ignore[arg-type]
        there.hosts[host] = replace(observed, copies={"m": changed})


class Serving(Case):
    def test_a_drained_copy_does_not_stand_for_another_though_envoy_still_has_it(self) -> None:
        there = self.there(A)
        there.lag = 8
        self.place(there, B)
        while not there.hosts["a"].copies["m"].drained:
            there.step()
        self.place(there, A)
        drain = there._drain
        lost = [("m", "a", False)]  # the lost commands
        there._drain = lambda *args: None if args in lost else drain(*args)  # type: ignore[method-assign]
        for _ in range(8):
            there.step()
            self.assertFalse(there.hosts["b"].copies["m"].drained)
        there._drain = drain  # type: ignore[method-assign]
        there.steps(40)
        self.assertEqual(there.table("m"), {A})

    def test_a_dead_copy_does_not_stand_for_another_though_envoy_still_has_it(self) -> None:
        there = self.there(A)
        there.lag = 8
        self.place(there, B)
        while "b" not in there.published("m") or not there.answers("m", "b"):
            there.step()
        there.step()
        there.dead.add("b")
        there.steps(30)
        self.assertEqual((there.table("m"), there.serving("m")), ({A}, {"a"}))
        self.assertFalse(there.hosts["a"].copies["m"].drained)

    def test_only_copies_that_are_ready_are_published(self) -> None:
        there = world(spec("m"), {"m": (A, B)}, loads=5)
        for _ in range(12):
            there.step()
            copies = [there.hosts[name].copies["m"] for name in there.published("m")]
            self.assertTrue(all(each.ready for each in copies))
        self.assertEqual(there.published("m"), {"a", "b"})

    def test_without_envoy_no_copy_counts_as_idle(self) -> None:
        there = self.there(A)
        self.place(there, B)
        while "a" in there.published("m"):
            there.step()
        there.deaf = True
        there.steps(20)
        self.assertEqual(there.table("m"), {A, B})
        there.deaf = False
        there.steps(10)
        self.assertEqual(there.table("m"), {B})

    def test_without_envoy_no_copy_of_a_removed_model_is_removed(self) -> None:
        there = self.there(A)
        there.spec, there.deaf = spec(), True
        there.steps(20)
        self.assertEqual((there.table("m"), there.published("m")), ({A}, set()))
        there.deaf = False
        there.steps(10)
        self.assertEqual(there.table("m"), set())

    def test_a_copy_stays_while_the_files_of_its_change_are_fetched(self) -> None:
        there = self.there(A)
        changed = self.change(there, files=Files("s3://m/2", None))
        there.steps(10)
        self.assertEqual(there.table("m"), {A})
        self.assertEqual(there.actions.fetch, [("a", changed.files)])

    def test_a_published_copy_that_is_unready_stays_though_its_change_fails(self) -> None:
        there = self.there(A)
        changed = self.change(there)
        refusals = {assignment(there.spec, "m").digest: Refusal("no", 1)}
        there.hosts["a"] = replace(there.hosts["a"], refusals=refusals)
        there.broken.add(("m", "a"))
        there.steps(10)
        self.assertEqual(there.table("m"), {A})
        self.assertEqual(there.memory.failures[("m", "a")].assignment, f"{changed.digest}-0")

    def test_without_a_slot_the_last_endpoint_stays(self) -> None:
        there = self.there(A)
        there.dead.add("a")
        self.place(there)
        there.steps(10)
        self.assertEqual(there.published("m"), {"a"})
        there.dead.clear()
        there.steps(10)
        self.assertEqual(there.serving("m"), {"a"})

    def test_a_removed_model_leaves_nothing_behind(self) -> None:
        there = self.there(A, B, copies=2)
        there.dead.add("a")
        there.spec = spec()
        there.steps(10)
        self.assertEqual((there.table("m"), there.published("m")), (set(), set()))
        there.dead.clear()
        there.steps(10)
        self.assertEqual(there.table("m"), set())


class Commands(Case):
    def test_further_copies_of_a_serving_model_start_one_at_a_time(self) -> None:
        there = self.there(A)
        there.spec = spec("m", copies=3)
        self.place(there, A, B, C0)
        for _ in range(20):
            there.step()
            copies = [host.copies["m"] for host in there.hosts.values() if "m" in host.copies]
            self.assertLessEqual(sum(each.state == "loading" for each in copies), 1)
        self.assertEqual(there.table("m"), {A, B, C0})

    def test_an_assignment_is_repeated_until_the_supervisor_has_read_it(self) -> None:
        there = self.there(A)
        observed = there.hosts["a"]
        for unread in (replace(observed, interrupted=True), replace(observed, copies={})):
            there.hosts["a"] = unread
            there.step()
            self.assertEqual(there.actions.apply.keys(), {"a"})
            there.hosts["a"] = replace(unread, busy=True)
            there.step()
            self.assertEqual(there.actions.apply, {})

    def test_a_host_in_the_desired_state_gets_no_assignments(self) -> None:
        there = self.there(A)
        there.step()
        self.assertEqual(there.actions, replace(there.actions, apply={}, fetch=[], drain=[]))


class Failures(Case):
    def test_waits_double_up_to_a_maximum(self) -> None:
        there = world(spec("m", copies=1), {"m": (A,)})
        there.broken.add(("m", "a"))
        waits, last = [], 0.0
        while len(waits) < 8:
            there.step()
            failure = there.memory.failures.get(("m", "a"))
            if failure and failure.until != last:
                last = failure.until
                waits.append(last - there.now)
        self.assertEqual(waits[:4], [RETRY_AFTER * 2**at for at in range(4)])
        self.assertEqual(waits[-1], RETRY_MAX)

    def test_a_failure_counts_once_however_long_the_host_is_busy(self) -> None:
        there = world(spec("m", copies=1), {"m": (A,)})
        there.broken.add(("m", "a"))
        there.steps(3)
        there.hosts["a"] = replace(there.hosts["a"], busy=True)
        there.steps(int(RETRY_AFTER / STEP) - 4)
        self.assertEqual(there.memory.failures[("m", "a")].times, 1)

    def test_a_published_copy_that_is_unready_for_a_while_has_not_failed(self) -> None:
        there = self.there(A)
        there.broken.add(("m", "a"))
        there.steps(10)
        self.assertEqual((there.table("m"), there.memory.failures), ({A}, {}))
        there.broken.clear()
        there.steps(10)
        self.assertEqual(there.serving("m"), {"a"})

    def test_a_failed_move_can_be_commanded_again(self) -> None:
        there = self.there(A)
        there.broken.add(("m", "b"))
        self.place(there, B)
        there.steps(10)
        self.assertEqual(there.memory.placement["m"], (A,))
        there.broken.clear()
        self.place(there, B)
        failures = {at: replace(each, until=0.0) for at, each in there.memory.failures.items()}
        there.memory = replace(there.memory, failures=failures)
        there.steps(20)
        self.assertEqual((there.table("m"), there.memory.failures), ({B}, {}))

    def test_a_copy_with_an_old_assignment_has_not_recovered(self) -> None:
        there = self.there(A)
        self.change(there)
        digest = assignment(there.spec, "m").digest
        there.hosts["a"] = replace(there.hosts["a"], refusals={digest: Refusal("no", 1)})
        there.steps(3)
        self.assertIn(("m", "a"), there.memory.failures)
        for assigned, refusals in ((digest, {digest: Refusal("no", 1)}), ("older", {})):
            there.hosts["a"] = replace(
                there.hosts["a"], assigned={"m": assigned}, refusals=refusals, busy=True
            )
            there.step()
            self.assertIn(("m", "a"), there.memory.failures)
        there.hosts["a"] = replace(there.hosts["a"], assigned={"m": digest}, refusals={})
        there.step()
        self.assertEqual(there.memory.failures, {})

    def test_a_changed_spec_is_tried_at_once(self) -> None:
        there = world(spec("m", copies=1), {"m": (A,)})
        there.broken.add(("m", "a"))
        there.steps(5)
        self.assertEqual(there.table("m"), set())
        there.broken.clear()
        self.change(there)
        there.steps(2)
        self.assertEqual(there.table("m"), {A})
        self.assertEqual(there.memory.failures, {})

    def test_failed_fetches_are_reported_and_retried(self) -> None:
        there = world(spec("m", copies=1), {"m": (A,)})
        files = self.change(there, files=Files("s3://m/2", None)).files
        assert files
        there.step()
        there.hosts["a"] = replace(there.hosts["a"], fetch_failures={files.key: Refusal("no", 1)})
        there.step()
        self.assertEqual(there.memory.failures[("m", "a")].why, "no")
        self.assertEqual(there.actions.fetch, [])
        there.steps(int(RETRY_AFTER / STEP))
        self.assertEqual(there.actions.fetch, [("a", files)])

    def test_a_copy_that_loads_forever_fails(self) -> None:
        there = world(spec("m", copies=1), {"m": (A,)}, loads=9999)
        there.steps(int(READY_TIMEOUT / STEP))
        self.assertEqual((there.table("m"), there.memory.failures), ({A}, {}))
        there.steps(4)
        self.assertIn("not ready within", there.memory.failures[("m", "a")].why)
        self.assertEqual(there.table("m"), set())

    def test_a_failed_move_between_gpus_of_a_host_keeps_the_old_slot(self) -> None:
        there = self.there(C0)
        self.place(there, C1)
        refusals = {assignment(there.spec, "m", 1).digest: Refusal("no", 1)}
        there.hosts["c"] = replace(there.hosts["c"], refusals=refusals)
        there.steps(5)
        self.assertEqual(there.memory.placement["m"], (C0,))
        self.assertEqual(there.table("m"), {C0})


if __name__ == "__main__":
    unittest.main()
