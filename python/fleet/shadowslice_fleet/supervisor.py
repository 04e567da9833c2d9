"""The commands of the `shadowslice` binary that ask one supervisor."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from shadowslice_fleet.wish import Document

STATUS_WITHIN = 2.0  # seconds
DRAIN_WITHIN = 5.0
CHECK_WITHIN = 20.0
# A reload returns when all models are in force; loading and proving one may take 5 minutes.
RELOAD_WITHIN = 900.0

REFUSED, FAULTY = 1, 78  # exit codes


class CommandFailed(Exception):
    """A command of the binary did not do what was asked; the text has its reason."""

    def __init__(self, command: str, code: int | None, why: str, said: str = "") -> None:
        super().__init__(f"`shadowslice {command}` failed: {why}")
        self.code = code  # None: it could not be run, or took too long
        self.why = why
        self.said = said  # on the standard output


@dataclass(frozen=True)
class Supervisor:
    binary: str
    run_dir: Path

    def status(self) -> Document:
        return self._json("status", STATUS_WITHIN)

    def reload(self) -> dict[str, str]:
        """Returns when all is in force, but for models that it returns, with the reasons."""
        try:
            report = self._json("reload", RELOAD_WITHIN)
        except CommandFailed as failed:
            if failed.code != REFUSED or not failed.said:
                raise
            report = json.loads(failed.said)
        return {each["name"]: each["why"] for each in report["models"] if each["why"]}

    def drain(self, model: str) -> None:
        self._asked(["drain", model], DRAIN_WITHIN)

    def undrain(self, model: str) -> None:
        self._asked(["undrain", model], DRAIN_WITHIN)

    def faults(self, file: Path) -> list[str]:
        """What `check` finds in a configuration; it asks no supervisor."""
        try:
            run(self.binary, ["check", "--no-import", str(file)], CHECK_WITHIN)
        except CommandFailed as failed:
            if failed.code != FAULTY:
                raise
            return failed.why.splitlines()
        return []

    def _asked(self, arguments: list[str], within: float) -> str:
        return run(self.binary, [*arguments, "--run-dir", str(self.run_dir)], within)

    def _json(self, command: str, within: float) -> Document:
        said = self._asked([command, "--json"], within)
        try:
            document: Document = json.loads(said)
        except ValueError as error:
            raise CommandFailed(command, None, f"it printed no JSON: {said[:200]}") from error
        return document


def run(binary: str, arguments: list[str], within: float, given: str | None = None) -> str:
    """Its standard output. Raises CommandFailed. `within` is in seconds."""
    try:
        done = subprocess.run(
            [binary, *arguments],
            input=given,
            capture_output=True,
            text=True,
            timeout=within,
            check=False,
            stdin=subprocess.DEVNULL if given is None else None,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(arguments[0], None, f"no end within {within:g} s") from error
    except OSError as error:
        raise CommandFailed(arguments[0], None, f"{binary}: {error.strerror}") from error
    if done.returncode != 0:
        why = (done.stderr.strip() or done.stdout.strip()) or f"exit code {done.returncode}"
        raise CommandFailed(arguments[0], done.returncode, why, done.stdout)
    return done.stdout
