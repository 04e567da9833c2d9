"""Tests the Host actor. A program replaces the supervisor's commands."""

import hashlib
import json
import os
import tempfile
import threading
import time
import unittest
from pathlib import Path
from unittest import mock

from shadowslice_fleet import settings
from shadowslice_fleet import spec as specs
from shadowslice_fleet.gc import EXPIRE_AFTER
from shadowslice_fleet.host import REPEAT_AFTER, Host
from shadowslice_fleet.observed import Assignment, Assignments
from shadowslice_fleet.spec import Files

# The program always succeeds for `check`. For `reload` and `status`, it prints files next to it.
PROGRAM = """#!/bin/sh
case $1 in
  reload) cat "$0.reload"; exit "$(cat "$0.code")" ;;
  status) cat "$0.status" ;;
  promote) echo "version 2 of $2: canary" ;;
  rollback) echo "model $2 has no rollout" >&2; exit 1 ;;
esac
"""
MINUTE = 60.0


class Rig(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.program = self.folder / "program"
        self.program.write_text(PROGRAM)
        self.program.chmod(0o755)
        self.reloads()
        self.began(0.0)
        (self.folder / "base.yaml").write_text("models: []")
        given = {"binary": "program", "base": "base.yaml", "config": "served.yaml"}
        paths = {key: str(self.folder / name) for key, name in (given | {"files": "f"}).items()}
        (self.folder / "host.yaml").write_text(json.dumps(paths))
        variables = {settings.HOST_VARIABLE: str(self.folder / "host.yaml")}
        self.enterContext(mock.patch.dict(os.environ, variables))
        self.enterContext(mock.patch.object(Host, "_run_gc"))  # explicit in tests
        self.host = Host("10.0.0.1")

    def reloads(self, code: int = 0, late: str | None = None) -> None:
        models = [{"name": "m", "why": late}]
        Path(f"{self.program}.reload").write_text(json.dumps({"models": models}))
        Path(f"{self.program}.code").write_text(str(code))

    def began(self, ago: float) -> None:
        status = {"supervisor": {"age_s": ago}, "gpus": [], "models": []}
        Path(f"{self.program}.status").write_text(json.dumps(status))

    def serves(self, *names: str) -> None:
        counted = {"drained": False, "gpu": 0, "queue": 0, "in_flight": 0, "state": "ready"}
        given = {"why": None, "requests": {"accepted": 0}}
        models = [{"name": name} | counted | given for name in names]
        status = {"supervisor": {"age_s": 0.0}, "gpus": [], "models": models}
        Path(f"{self.program}.status").write_text(json.dumps(status))

    def loads(self, loaded: object) -> None:
        models = [{"name": "m", "loaded": loaded}]
        status = {"supervisor": {"age_s": 0.0}, "gpus": [], "models": models}
        Path(f"{self.program}.status").write_text(json.dumps(status))

    def assignment(self, version: str, **more: object) -> Assignment:
        """Returns an assignment of a model whose files have been fetched."""
        source = self.folder / version
        source.write_text(version)
        digest = hashlib.sha256(version.encode()).hexdigest()
        entry = {"name": "m", "path": version, "files": {"url": str(source), "sha256": digest}}
        entry |= more  # type: ignore[arg-type]
        model = specs.parse({"models": [entry | {"profile": {"of": version}}]}, "w").models["m"]
        assert model.files
        self.fetch(model.files)
        return Assignment(model, 0)

    def fetch(self, files: Files) -> None:
        self.assertTrue(self.host.fetch(files))
        self.until(lambda: not self.host.work.fetching)

    def apply(self, *new: Assignment, keep: tuple[str, ...] = ()) -> None:
        self.assertTrue(self.host.apply(Assignments(new, keep)))
        self.until(lambda: not self.host.work.applying)

    def until(self, done: object) -> None:
        deadline = time.monotonic() + 10
        while not done():  # type: ignore[operator]
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.005)

    def later(self, *ages: float) -> None:
        """Collects garbage as if it were these numbers of seconds later."""
        for age in ages:
            self.host.collect_garbage(time.time() + age)

    def there(self) -> set[str]:
        """Returns the contents of all fetched files."""
        found = (self.folder / "f").glob("*/*")
        return {path.read_text() for path in found if path.parent.name != ".profiles"}


class GarbageCollection(Rig):
    def test_files_and_profiles_go_after_a_day_without_their_model(self) -> None:
        old, new = self.assignment("1"), self.assignment("2")
        self.apply(old)
        self.apply(new)
        self.later(EXPIRE_AFTER - MINUTE, EXPIRE_AFTER - MINUTE)
        self.assertEqual(self.there(), {"1", "2"})
        self.later(EXPIRE_AFTER + MINUTE, EXPIRE_AFTER + 2 * MINUTE)
        self.assertEqual(self.there(), {"2"})
        profiles = [path.name for path in (self.folder / "f" / ".profiles").iterdir()]
        self.assertEqual(profiles, [f"m-{new.model.digest}.json"])
        self.assertEqual(self.host.observe().fetched, {new.model.files.key})  # type: ignore[union-attr]

    def test_expiring_files_count_as_not_fetched_and_stay_if_fetched(self) -> None:
        files = self.assignment("1").model.files
        assert files
        self.later(EXPIRE_AFTER + MINUTE)
        self.assertEqual((self.there(), self.host.observe().fetched), ({"1"}, frozenset()))
        (self.folder / "1").unlink()
        self.fetch(files)
        self.assertEqual(self.host.observe().fetched, {files.key})
        self.later(EXPIRE_AFTER + MINUTE)
        self.assertEqual(self.there(), {"1"})

    def test_files_of_loaded_versions_stay_though_the_file_has_another_version(self) -> None:
        old, new = (self.assignment(version, rollout={}) for version in "12")
        self.apply(old)
        self.apply(new)
        assert old.model.files and new.model.files
        paths = [self.folder / "f" / each.key for each in (old.model.files, new.model.files)]
        for loaded, left in (
            ({"path": f"{paths[0]}/1"}, {"1", "2"}),
            (None, {"1", "2"}),  # The version is unknown.
            ({"path": f"{paths[1]}/2"}, {"2"}),
        ):
            self.loads(loaded)
            self.later(2 * EXPIRE_AFTER, 2 * EXPIRE_AFTER + MINUTE)
            self.assertEqual(self.there(), left)

    def test_files_that_are_fetched_again_are_used_again(self) -> None:
        files = self.assignment("1").model.files
        assert files
        os.utime(self.folder / "f" / files.key, (0.0, 0.0))
        self.fetch(files)
        self.later(0.0, 0.0)
        self.assertEqual(self.there(), {"1"})

    def test_a_restarted_actor_knows_when_files_were_used(self) -> None:
        self.assignment("1")
        self.later(EXPIRE_AFTER + MINUTE)
        self.host = Host("10.0.0.1")
        self.later(EXPIRE_AFTER + MINUTE)
        self.assertEqual(self.there(), {"1"})
        self.later(EXPIRE_AFTER + MINUTE)
        self.assertEqual(self.there(), set())

    def test_served_files_stay_at_any_time_of_the_clock(self) -> None:
        self.apply(self.assignment("1"))
        for days in (1000, 1000, -1000, 2000, 2000):
            self.later(days * EXPIRE_AFTER)
        self.assertEqual(self.there(), {"1"})

    def test_a_clock_that_was_ahead_keeps_no_files_forever(self) -> None:
        key = self.assignment("1").model.files.key  # type: ignore[union-attr]
        os.utime(self.folder / "f" / key, (time.time() + 1000 * EXPIRE_AFTER,) * 2)
        self.later(0.0, EXPIRE_AFTER + MINUTE, EXPIRE_AFTER + MINUTE)
        self.assertEqual(self.there(), set())

    def test_a_configuration_that_is_not_in_force_keeps_older_files(self) -> None:
        refusals = ((1, "it does not load"), (78, None))
        for code, late in refusals:
            self.reloads()
            old, new = self.assignment(f"{code} old"), self.assignment(f"{code} new")
            self.apply(old)
            self.reloads(code, late)
            self.apply(new)
            self.began(9 * EXPIRE_AFTER)
            self.later(3 * EXPIRE_AFTER, 3 * EXPIRE_AFTER, 3 * EXPIRE_AFTER)
            self.assertLessEqual({f"{code} old", f"{code} new"}, self.there())
            self.assertIn(new.digest, self.host.observe().refusals)
            self.began(EXPIRE_AFTER)  # The supervisor has restarted since.
            self.later(3 * EXPIRE_AFTER, 3 * EXPIRE_AFTER)
            self.assertEqual(self.there(), {f"{code} new"})

    def test_a_change_cut_short_by_an_actor_s_death_keeps_older_files(self) -> None:
        self.apply(self.assignment("1"))
        self.apply(self.assignment("2"))
        self.host.pending.touch()
        self.later(EXPIRE_AFTER + MINUTE, EXPIRE_AFTER + MINUTE)
        self.assertEqual(self.there(), {"1", "2"})

    def test_during_a_change_no_files_are_removed(self) -> None:
        self.assignment("1")
        self.later(EXPIRE_AFTER + MINUTE)
        self.host.work.applying = True
        self.later(EXPIRE_AFTER + MINUTE)
        self.assertEqual(self.there(), {"1"})

    def test_partial_fetches_of_a_dead_actor_are_removed(self) -> None:
        left, coming = "a" * 64, "b" * 64
        for key in (left, coming):
            half = self.folder / "f" / f".coming-{key}-x"
            half.mkdir(parents=True)
            (half / "part").write_text(key)
        self.host.work.fetching = {coming}
        self.later(EXPIRE_AFTER + MINUTE, EXPIRE_AFTER + MINUTE)
        self.assertEqual(self.there(), {coming})

    def test_files_of_others_stay(self) -> None:
        (self.folder / "f" / "lost+found").mkdir(parents=True)
        self.later(EXPIRE_AFTER + MINUTE, EXPIRE_AFTER + MINUTE)
        self.assertTrue((self.folder / "f" / "lost+found").exists())


class Written(Rig):
    def test_the_served_file_keeps_its_owner_and_mode(self) -> None:
        config_file = self.folder / "served.yaml"
        config_file.write_text("models: []")
        config_file.chmod(0o640)
        with mock.patch("os.chown") as chown:
            self.apply(self.assignment("1"))
        there = config_file.stat()
        self.assertEqual(there.st_mode & 0o777, 0o640)
        self.assertIn((there.st_uid, there.st_gid), [call.args[1:] for call in chown.mock_calls])
        with mock.patch("os.chown", side_effect=PermissionError):
            self.apply(self.assignment("2"))
        self.assertEqual(self.host.observe().refusals, {})


class Repeated(Rig):
    def setUp(self) -> None:
        super().setUp()
        self.enterContext(mock.patch("shadowslice_fleet.load.read", return_value=None))

    def test_a_failed_removal_of_a_model_is_repeated_after_a_while(self) -> None:
        self.apply(self.assignment("1"))
        self.serves("m")
        self.reloads(code=78)
        self.apply()
        self.assertFalse(self.host.observe().interrupted, "at once it would fail again")
        os.utime(self.host.mixed, (0, time.time() - REPEAT_AFTER - 1))
        self.assertTrue(self.host.observe().interrupted)
        self.serves()
        self.assertFalse(self.host.observe().interrupted)

    def test_a_failed_change_of_a_model_is_not_repeated(self) -> None:
        self.apply(self.assignment("1"))
        self.serves("m")
        self.reloads(code=1, late="no")
        self.apply(self.assignment("2"))
        os.utime(self.host.mixed, (0, time.time() - REPEAT_AFTER - 1))
        self.assertFalse(self.host.observe().interrupted)


class Told(Rig):
    def test_a_fetch_that_hangs_is_reported_and_delays_no_others(self) -> None:
        hung = threading.Event()
        self.addCleanup(hung.set)
        wanted = Files("/never", None)
        fetches = mock.patch("shadowslice_fleet.files.fetch", side_effect=lambda *_: hung.wait())
        bound = mock.patch("shadowslice_fleet.host.FETCH_TIMEOUT", 0.05)
        with fetches, bound, self.assertLogs("shadowslice_fleet.host"):
            self.assertTrue(self.host.fetch(wanted))
            self.until(lambda: not self.host.work.fetching)
        self.assertIn("timed out after 0.05 s", self.host.observe().fetch_failures[wanted.key].why)

    def test_rollout_commands_return_the_supervisor_s_reply(self) -> None:
        promoted, rolled_back = self.host.promote("m"), self.host.roll_back("m")
        self.assertEqual((promoted.succeeded, promoted.text), (True, "version 2 of m: canary"))
        self.assertEqual(
            (rolled_back.succeeded, rolled_back.text), (False, "model m has no rollout")
        )

    def test_a_change_that_cannot_read_a_file_is_reported(self) -> None:
        assignment = self.assignment("1")
        (self.folder / "served.yaml").write_text('# shadowslice-fleet {"m": "x"}\n{broken')
        with self.assertLogs("shadowslice_fleet.host"):
            self.apply(assignment)
        self.assertIn("Error", self.host.observe().refusals[assignment.digest].why)


if __name__ == "__main__":
    unittest.main()
