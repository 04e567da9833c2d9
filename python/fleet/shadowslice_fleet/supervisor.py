"""Runs commands of the `shadowslice` binary. Most commands address one supervisor."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from shadowslice_fleet.spec import Document

STATUS_TIMEOUT = 2.0  # seconds
DRAIN_TIMEOUT = 5.0
# A promotion returns after the next step has begun, which needs another share of the GPU.
ROLLOUT_TIMEOUT = 15.0
CHECK_TIMEOUT = 20.0
# A reload returns after all changes are applied. Loading and proving a model may take 5 minutes.
RELOAD_TIMEOUT = 900.0

EXIT_REFUSED, EXIT_FAULTY = 1, 78  # exit codes


class CommandFailed(Exception):
    """A command of the `shadowslice` binary failed. The error's text has the reason."""

    def __init__(self, command: str, code: int | None, why: str, output: str = "") -> None:
        super().__init__(f"`shadowslice {command}` failed: {why}")
        self.code = code  # None if the command did not start or timed out
        self.why = why
        self.output = output  # standard output


@dataclass(frozen=True)
class Supervisor:
    """The supervisor of a host."""

    binary: str
    run_dir: Path

    def status(self) -> Document:
        """Returns the reply of `shadowslice status --json`."""
        return self._json("status", STATUS_TIMEOUT)

    def reload(self) -> dict[str, str]:
        """Reloads the configuration, and waits until all changes are applied.

        Returns the models whose change could not be applied, and the reasons.
        """
        try:
            report = self._json("reload", RELOAD_TIMEOUT)
        except CommandFailed as failed:
            if failed.code != EXIT_REFUSED or not failed.output:
                raise
            report = json.loads(failed.output)
        return {each["name"]: each["why"] for each in report["models"] if each["why"]}

    def drain(self, model: str) -> None:
        """Drains a model. Raises CommandFailed."""
        self._run(["drain", model], DRAIN_TIMEOUT)

    def undrain(self, model: str) -> None:
        """Ends the drain of a model. Raises CommandFailed."""
        self._run(["undrain", model], DRAIN_TIMEOUT)

    def promote(self, model: str) -> str:
        """Ends the current step of a model's rollout.

        Returns the supervisor's reply. Raises CommandFailed.
        """
        return self._run(["promote", model], ROLLOUT_TIMEOUT).strip()

    def roll_back(self, model: str) -> str:
        """Rolls a new version back. Returns the supervisor's reply. Raises CommandFailed."""
        return self._run(["rollback", model], ROLLOUT_TIMEOUT).strip()

    def faults(self, file: Path) -> list[str]:
        """Returns the faults that `check` finds in a configuration. Does not need a supervisor."""
        try:
            run(self.binary, ["check", "--no-import", str(file)], CHECK_TIMEOUT)
        except CommandFailed as failed:
            if failed.code != EXIT_FAULTY:
                raise
            return failed.why.splitlines()
        return []

    def _run(self, arguments: list[str], timeout: float) -> str:
        return run(self.binary, [*arguments, "--run-dir", str(self.run_dir)], timeout)

    def _json(self, command: str, timeout: float) -> Document:
        output = self._run([command, "--json"], timeout)
        try:
            document: Document = json.loads(output)
        except ValueError as error:
            raise CommandFailed(command, None, f"invalid JSON: {output[:200]}") from error
        return document


def run(binary: str, arguments: list[str], timeout: float, given: str | None = None) -> str:
    """Runs a command. Returns its standard output.

    `timeout` is in seconds. The command reads `given` from standard input. Raises CommandFailed.
    """
    try:
        done = subprocess.run(
            [binary, *arguments],
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL if given is None else None,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(arguments[0], None, f"timed out after {timeout:g} s") from error
    except OSError as error:
        raise CommandFailed(arguments[0], None, f"{binary}: {error.strerror}") from error
    if done.returncode != 0:
        why = (done.stderr.strip() or done.stdout.strip()) or f"exit code {done.returncode}"
        raise CommandFailed(arguments[0], done.returncode, why, done.stdout)
    return done.stdout
