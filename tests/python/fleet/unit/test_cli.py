"""Tests the messages and exit codes of the command line for various replies of the fleet."""

import contextlib
import io
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from shadowslice_fleet import cli
from shadowslice_fleet.moves import CommandRefused
from shadowslice_fleet.observed import CommandReply
from shadowslice_fleet.persisted import StateFault
from shadowslice_fleet.placement import PlaceFailed

UNKNOWN = {"failures": {}, "missing": None, "no_more": None, "extra": 0, "served": 0, "wished": 1}
WISH = "models: [{name: m, need: {sms: 8, memory: 1Gi}}]"


def status(**more: Any) -> dict[str, Any]:
    return {"settled": True, "models": {}, "hosts": {}, "troubles": {}} | more


def host(answers: bool, *models: str) -> dict[str, Any]:
    return {
        "answers": answers,
        "models": list(models),
        "why": None,
        "drained": True,
        "gpus": [],
    }


class Commands(unittest.TestCase):
    def run_cli(self, *arguments: str, answers: Any) -> tuple[int, str]:
        """Runs a command. Returns its exit code and its standard error."""
        errors = io.StringIO()
        fleet = mock.Mock()
        fleet.call.side_effect = answers if callable(answers) else lambda *_: answers
        with (
            mock.patch.object(cli, "_Fleet", lambda _: fleet),
            mock.patch.object(cli, "_own_output", io.StringIO),
            mock.patch("sys.argv", ["shadowslice-fleet", *arguments]),
            contextlib.redirect_stderr(errors),
            self.assertRaises(SystemExit) as ended,
        ):
            cli.main()
        return int(ended.exception.code or 0), errors.getvalue()

    def up(self, answers: Any) -> tuple[int, str]:
        path = Path(self.enterContext(tempfile.TemporaryDirectory())) / "w.yaml"
        path.write_text(WISH)
        return self.run_cli("up", str(path), answers=answers)

    def test_the_spec_of_another_operator_is_reported(self) -> None:
        self.assertEqual(
            self.up(status()),
            (1, "error: these models are not in the desired state: m; see `status`\n"),
        )
        code, message = self.run_cli("move", "m", "a", answers=status())
        self.assertEqual((code, message), (1, "error: model 'm' is no longer in the spec\n"))

    def test_a_drained_host_that_is_away_has_no_models(self) -> None:
        for there in ({}, {"a": host(False, "m")}):
            found = self.run_cli("drain", "a", answers=status(hosts=there))
            self.assertEqual(found, (0, ""))
        code, message = self.run_cli("drain", "a", answers=status(hosts={"a": host(True, "m")}))
        self.assertEqual((code, message), (1, "error: cannot drain host 'a': \n"))

    def test_each_host_of_a_rollout_has_a_line(self) -> None:
        good, bad = CommandReply(True, "version 2 of m: canary"), CommandReply(False, "no rollout")
        for replies, code in (({"a": good}, 0), ({"a": good, "b": bad}, 1)):
            for name in ("promote", "rollback"):
                self.assertEqual(self.run_cli(name, "m", answers=replies)[0], code)
        refused = mock.Mock(side_effect=CommandRefused("model 'm' has no rollout"))
        found = self.run_cli("promote", "m", answers=refused)
        self.assertEqual(found, (1, "error: model 'm' has no rollout\n"))

    def test_up_names_the_host_that_rolled_back(self) -> None:
        models = {"m": {"copies": [], "rolled_back": {"a": "answers differ"}} | UNKNOWN}
        why = "host 'a' rolled the new version of model 'm' back: answers differ"
        self.assertEqual(self.up(status(models=models)), (1, f"error: {why}\n"))

    def test_exceptions_of_the_fleet_are_reported(self) -> None:
        for error in (StateFault("the disk is full"), PlaceFailed("no profile")):
            self.assertEqual(self.up(mock.Mock(side_effect=error)), (1, f"error: {error}\n"))

    def test_an_interrupt_ends_only_the_wait(self) -> None:
        code, message = self.up(mock.Mock(side_effect=KeyboardInterrupt))
        self.assertEqual(code, 130)
        self.assertIn("the fleet continues", message)

    def test_wrong_usage(self) -> None:
        for arguments in (["down", "--within", "nan"], ["down", "--within", "-1"], ["move", "m"]):
            self.assertEqual(self.run_cli(*arguments, answers=status())[0], 64)
        self.assertEqual(self.run_cli("move", "m", "a:²", answers=status())[0], 64)


if __name__ == "__main__":
    unittest.main()
