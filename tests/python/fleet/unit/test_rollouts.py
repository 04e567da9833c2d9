"""Tests that a new version of a model reaches one host after the other."""

import tempfile
import unittest
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shadowslice_fleet import observed, persisted, report, rollouts
from shadowslice_fleet import spec as specs
from shadowslice_fleet.moves import CommandRefused
from shadowslice_fleet.observed import Assignments, Copy, Refusal, Rollout, Slot
from shadowslice_fleet.persisted import PersistedState
from shadowslice_fleet.spec import Spec
from test_report import status
from world import World, copy, world

A, B, C0 = Slot("a", 0), Slot("b", 0), Slot("c", 0)


def version(path: str, **more: Any) -> Spec:
    need = {"sms": 8, "memory": "1Gi"}
    entry = {"name": "m", "path": path, "need": need, "rollout": {}} | more
    return specs.parse({"models": [entry]}, "spec")


def rollout(phase: str, why: str | None = None) -> Rollout:
    return Rollout(2, 1, phase, 0.0, 0.1, None, why)


@dataclass
class RolloutWorld(World):
    """A world whose hosts roll new paths out, until the test ends the rollouts."""

    def _apply(self, name: str, assignments: Assignments) -> None:
        before = self.hosts[name]
        super()._apply(name, assignments)
        after = self.hosts[name]
        paths = {model: before.paths[model] for model in assignments.keep if model in before.paths}
        copies = dict(after.copies)
        for new in assignments.new:
            model, path = new.model.name, new.model.version_path
            if path is None:
                continue
            paths[model] = path
            old = before.copies.get(model)
            if old is None:
                copies[model] = replace(copies[model], loaded=path, version=1)
            elif old.loaded != path and before.paths.get(model) != path:
                assert not (old.rollout and old.rollout.is_active), "the host would refuse this"
                copies[model] = replace(copies[model], rollout=rollout("canary"))
        self.hosts[name] = replace(after, paths=paths, copies=copies)

    def end_rollout(self, name: str, phase: str, why: str | None = None) -> None:
        there = self.hosts[name]
        changed = replace(there.copies["m"], rollout=rollout(phase, why))
        if phase in ("released", "completed"):
            changed = replace(changed, loaded=there.paths["m"])
        self.hosts[name] = replace(there, copies={"m": changed})


class Rollouts(unittest.TestCase):
    def setUp(self) -> None:
        there = world(version("/1"), {"m": (A, B)})
        self.world = RolloutWorld(there.spec, there.memory, there.hosts)
        self.world.steps(10)
        self.assertEqual(self.world.table("m"), {A, B})

    def up(self, new: Spec) -> None:
        """Replaces the spec as the Fleet actor does."""
        kept = specs.of_entries([specs.entry(version("/1"), name) for name in self.former()])
        found = rollouts.former(self.world.spec, kept, new, self.world.hosts)
        former = specs.of_entries(found).models
        self.world.spec = new
        self.world.memory = replace(self.world.memory, former=former)

    def former(self) -> set[str]:
        memory = self.world.memory
        slots = memory.placement
        return rollouts.unfinished(self.world.spec, memory.former, self.world.hosts, slots)

    def paths(self) -> dict[str, str]:
        """Returns the path in each host's file."""
        hosts = self.world.hosts.items()
        return {name: each.paths["m"] for name, each in hosts if "m" in each.paths}

    def loaded(self) -> dict[str, str | None]:
        """Returns the path that each host serves."""
        hosts = self.world.hosts.items()
        return {name: each.copies["m"].loaded for name, each in hosts if "m" in each.copies}

    def current(self) -> report.ModelStatus:
        return status(self.world)["models"]["m"]

    def test_the_second_host_begins_when_the_first_has_released_the_version(self) -> None:
        self.up(version("/2"))
        self.world.steps(20)
        self.assertEqual(self.paths(), {"a": "/2", "b": "/1"})
        self.assertFalse(self.current()["settled"])
        text = "\n".join(report.lines(status(self.world)))
        self.assertIn("a:0 (canary 10%), b:0 (former version)", text)
        self.assertIn("m on b: waits for the rollout on host 'a'", text)
        self.world.end_rollout("a", "released")
        self.assertEqual(self.former(), {"m"})
        self.world.steps(20)
        self.assertEqual(self.paths(), {"a": "/2", "b": "/2"})
        self.world.end_rollout("b", "completed")
        self.assertEqual(self.former(), set())
        self.world.step()
        self.assertTrue(self.current()["settled"] and report.is_sufficient(self.current()))

    def test_the_fleet_stops_after_a_rollback_and_says_why(self) -> None:
        self.up(version("/2"))
        self.world.steps(5)
        self.world.end_rollout("a", "rolled_back", "answers differ")
        self.world.steps(20)
        self.assertEqual(self.paths(), {"a": "/2", "b": "/1"})
        self.assertEqual(self.loaded(), {"a": "/1", "b": "/1"})
        current = self.current()
        self.assertEqual(current["rolled_back"], {"a": "answers differ"})
        self.assertTrue(current["settled"] and not report.is_sufficient(current))
        self.assertIn("host 'a'", report.rollback_reason("m", current))
        self.assertIn("m on a: rolled back: ", "\n".join(report.lines(status(self.world))))

    def test_another_version_replaces_one_that_was_rolled_back(self) -> None:
        self.test_the_fleet_stops_after_a_rollback_and_says_why()
        self.up(version("/3"))
        self.world.steps(20)
        self.assertEqual(self.paths(), {"a": "/3", "b": "/1"})
        for name in "ab":
            self.world.end_rollout(name, "released")
            self.world.steps(10)
        self.assertEqual(self.loaded(), {"a": "/3", "b": "/3"})

    def test_new_copies_start_with_the_released_version(self) -> None:
        self.up(version("/2"))
        self.world.steps(5)
        self.world.memory = replace(self.world.memory, placement={"m": (A, C0)})
        self.world.steps(20)
        self.assertEqual(self.loaded(), {"a": "/1", "c": "/1"})
        self.world.end_rollout("a", "rolled_back", "answers differ")
        self.world.memory = replace(self.world.memory, placement={"m": (B, C0)})
        self.world.steps(20)
        self.assertEqual(self.paths(), {"b": "/2", "c": "/1"})
        self.assertEqual(self.loaded(), {"b": "/1", "c": "/1"})

    def test_no_host_begins_while_a_copy_is_missing_or_not_ready(self) -> None:
        self.world.dead.add("b")
        self.up(version("/2"))
        self.world.steps(10)
        self.assertEqual(self.paths()["a"], "/1")
        self.world.dead.clear()
        self.world.steps(3)
        self.assertEqual(self.paths()["a"], "/2")

    def test_a_third_version_waits_for_the_end_of_a_rollout(self) -> None:
        self.up(version("/2"))
        self.world.steps(5)
        for phase in ("canary", "released"):
            self.world.end_rollout("a", phase)
            self.up(version("/3"))
            self.world.steps(10)
            self.assertEqual(self.paths()["a"], "/2")
            self.assertIn("shadowslice-fleet promote m", self.current()["copies"][0]["held"] or "")
        self.world.end_rollout("a", "completed")
        self.world.steps(5)
        self.assertEqual(self.paths()["a"], "/3")

    def test_the_spec_can_return_to_the_released_version(self) -> None:
        self.up(version("/2"))
        self.world.steps(5)
        self.world.end_rollout("a", "rolled_back", "answers differ")
        self.up(version("/1"))
        self.world.steps(5)
        self.assertEqual(self.paths(), {"a": "/1", "b": "/1"})
        self.assertTrue(self.current()["settled"] and report.is_sufficient(self.current()))
        self.assertEqual(self.former(), set())

    def test_a_refused_start_counts_as_a_rollback(self) -> None:
        self.up(version("/2"))
        self.world.steps(5)
        there = self.world.hosts["a"]
        refusals = {there.assigned["m"]: Refusal("no memory", 1)}
        copies = {"m": replace(there.copies["m"], rollout=None)}
        self.world.hosts["a"] = replace(there, refusals=refusals, copies=copies)
        self.world.steps(5)
        self.assertEqual(self.current()["rolled_back"], {"a": "no memory"})
        self.assertEqual(self.paths()["b"], "/1")

    def test_without_a_rollout_section_all_hosts_change_at_once(self) -> None:
        new = version("/2").document["models"][0]
        del new["rollout"]
        self.up(specs.parse({"models": [new]}, "spec"))
        self.assertEqual(self.world.memory.former, {})
        self.world.steps(2)
        self.assertEqual(self.paths(), {"a": "/2", "b": "/2"})

    def test_commands_reach_the_hosts_with_two_loaded_versions(self) -> None:
        self.assertRaisesRegex(CommandRefused, "no rollout", rollouts.active, "m", self.world.hosts)
        self.assertRaisesRegex(CommandRefused, "not found", rollouts.active, "n", self.world.hosts)
        for phase, expected in (("canary", ["a"]), ("released", ["a"])):
            self.world.end_rollout("a", "completed")
            self.world.hosts["a"] = replace(self.world.hosts["a"], paths={"m": "/1"})
            self.world.end_rollout("a", phase)
            self.assertEqual(list(rollouts.active("m", self.world.hosts)), expected)

    def test_the_former_versions_survive_a_restart(self) -> None:
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        persisted.save(folder, PersistedState(version("/2"), {}, former=version("/1")))
        self.assertEqual(persisted.load(folder).former.models, version("/1").models)


class Statuses(unittest.TestCase):
    def row(self, name: str, queue: int, **more: Any) -> dict[str, Any]:
        need = dict.fromkeys(("sms", "most", "busy", "memory_mib", "shadow_mib"))
        slo = {"attainment": None, "percentile": 99, "slack": None}
        return {
            "name": name,
            "state": "ready",
            "why": None,
            "drained": False,
            "gpu": 0,
            "queue": queue,
            "in_flight": 0,
            "requests": {"accepted": queue},
            "need": need | {"rate": float(queue), "bandwidth": 0.0},
            "slo": slo,
        } | more

    def test_only_released_versions_are_copies(self) -> None:
        given = {"phase": "mirror", "mirror": 0.05, "canary": 0.0, "kept_s": None, "why": None}
        going = {"candidate": 2, "former": 1} | given
        loaded = {"path": "/f/abc/m.py", "sha256": None, "at_s": 0.0}
        rows = [
            self.row("m", 3, model="m", version=1, role="released", rollout=going, loaded=loaded),
            self.row("m:2", 4, model="m", version=2, role="candidate", rollout=going, loaded=None),
        ]
        found = observed.copies({"models": rows}, Path("/f"))
        self.assertEqual(found.keys(), {"m"})
        load = found["m"].load
        assert load
        self.assertEqual((load.rate, found["m"].accepted, found["m"].in_flight), (3.0, 3, 7))
        self.assertEqual((found["m"].version, found["m"].loaded), (1, "abc/m.py"))
        self.assertEqual(found["m"].rollout, Rollout(2, 1, "mirror", 0.05, 0.0, None, None))
        self.assertEqual(observed.loaded_models({"models": rows}), {"m"})
        self.assertEqual(observed.loaded_paths({"models": rows}), ["/f/abc/m.py"])

    def test_a_supervisor_without_versions_is_understood(self) -> None:
        rows = {"models": [self.row("m", 3)]}
        found = observed.copies(rows, Path("/f"))
        self.assertEqual(
            found["m"], replace(copy(0), in_flight=3, accepted=3, load=found["m"].load)
        )
        self.assertFalse(observed.loaded_models(rows) or observed.loaded_paths(rows))

    def test_a_version_in_a_folder_of_versions_is_the_one_in_the_spec(self) -> None:
        model = version("/models").models["m"]
        at = {path: replace(copy(0), loaded=path) for path in ("/models/3/model.onnx", "/models2")}
        self.assertEqual([rollouts.serves(each, model) for each in at.values()], [True, False])
        self.assertTrue(rollouts.serves(Copy("ready", None, False, 0, 0, 0), model))


if __name__ == "__main__":
    unittest.main()
