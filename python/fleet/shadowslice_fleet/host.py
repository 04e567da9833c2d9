"""The Host actor, which observes a node's supervisor and changes the supervisor's configuration.

Each node has one Host actor. Its whole state is on disk or in the supervisor, so the actor may die
at any time. It does not start the supervisor, because a raylet's child process ends with the
raylet.
"""

import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

import yaml

from shadowslice_fleet import config_file, files, gc, observed, settings, values
from shadowslice_fleet.observed import Assignments, CommandReply, Refusal
from shadowslice_fleet.spec import Document, Files
from shadowslice_fleet.supervisor import CommandFailed, Supervisor

MAX_FETCHES = 2  # concurrent fetches
FETCH_TIMEOUT = 3600.0  # seconds; the thread of a fetch that hangs does not end
# The seconds between two garbage collections. Every command that was sent before the first of them
# ends before the second.
GC_INTERVAL = 600.0
REPEAT_AFTER = 60.0  # seconds after which a failed removal of models is repeated
log = logging.getLogger(__name__)


class BaseFault(Exception):
    """The host's base configuration is invalid."""


@dataclass
class SharedWork:
    """The state that the actor's threads share. `lock` guards this state."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    applying: bool = False
    applied: int = 0  # the number of changes that have ended
    refusals: dict[str, Refusal] = field(default_factory=dict)  # keyed by the assignment's digest
    fetching: set[str] = field(default_factory=set)
    fetch_failures: dict[str, Refusal] = field(default_factory=dict)  # keyed by `Files.key`
    expiring: set[Path] = field(default_factory=set)  # unused files, reported as not fetched


class Host:
    """The Host actor."""

    def __init__(self, address: str) -> None:
        """Starts the garbage collection. `address` is the node's address in Ray.

        Raises SettingsFault.
        """
        self.settings = settings.host()
        self.address = self.settings.address or address
        self.config = Path(self.settings.config)
        self.pending = self.config.with_name(f".{self.config.name}.pending")  # until the reload
        # This file exists while the supervisor has not applied the whole configuration file. Some
        # models may then run with an earlier configuration.
        self.mixed = self.config.with_name(f".{self.config.name}.mixed")
        self.files = Path(self.settings.files)
        self.supervisor = Supervisor(self.settings.binary, Path(self.settings.run_dir))
        self.work = SharedWork()
        threading.Thread(target=self._run_gc, daemon=True).start()

    def observe(self) -> observed.ObservedHost:
        """Returns the state of the host and of its supervisor."""
        ours = self.settings
        with self.work.lock:
            applied = self.work.applied
        try:
            status: Document | None = self.supervisor.status()
            why = None
        except CommandFailed as failed:
            status, why = None, str(failed)
        emulated_mib = values.size_mib(ours.emulated_memory)
        copies = observed.copies(status, self.files) if status else {}
        with self.work.lock:
            text = _read_text(self.config)
            assigned = config_file.assigned(text)
            # A status from before the end of a change does not match the file.
            busy = self.work.applying or self.work.applied != applied
            undone = self.pending.exists() or self._has_leftovers(copies.keys() - assigned.keys())
            return observed.ObservedHost(
                name=ours.name,
                address=self.address,
                http_port=ours.http_port,
                grpc_port=ours.grpc_port,
                why=why,
                gpus=observed.gpus(status, emulated_mib) if status else (),
                copies=copies,
                assigned=assigned,
                paths=config_file.paths(text, self.files),
                refusals=dict(self.work.refusals),
                fetched=files.fetched(self.files) - {path.name for path in self.work.expiring},
                fetch_failures=dict(self.work.fetch_failures),
                busy=busy,
                interrupted=undone and not busy,
            )

    def _has_leftovers(self, models: set[str]) -> bool:
        """Checks whether these models remain although a change should have removed them."""
        if not models or not self.mixed.exists():
            return False
        return time.time() - self.mixed.stat().st_mtime > REPEAT_AFTER

    def apply(self, assignments: Assignments) -> bool:
        """Starts to apply these assignments. Returns False if another change is in progress.

        `observe` reports the result.
        """
        with self.work.lock:
            if self.work.applying:
                return False
            self.work.applying = True
        self._start(self._apply, assignments)
        return True

    def fetch(self, wanted: Files) -> bool:
        """Starts to fetch files. Returns False if they are being fetched or too many fetches run.

        `observe` reports the result.
        """
        with self.work.lock:
            if wanted.key in self.work.fetching or len(self.work.fetching) >= MAX_FETCHES:
                return False
            self.work.fetching.add(wanted.key)
            self.work.expiring.discard(self.files / wanted.key)
            self.work.fetch_failures.pop(wanted.key, None)
        self._start(self._fetch, wanted)
        return True

    def drain(self, model: str) -> str | None:
        """Drains a model. Returns the error, or None."""
        return self._run_command(lambda: self.supervisor.drain(model))

    def undrain(self, model: str) -> str | None:
        """Ends the draining of a model. Returns the error, or None."""
        return self._run_command(lambda: self.supervisor.undrain(model))

    def promote(self, model: str) -> CommandReply:
        """Ends the current step of a model's rollout."""
        return self._reply_of(lambda: self.supervisor.promote(model))

    def roll_back(self, model: str) -> CommandReply:
        """Rolls a new version of a model back."""
        return self._reply_of(lambda: self.supervisor.roll_back(model))

    @staticmethod
    def _reply_of(command: Callable[[], str]) -> CommandReply:
        try:
            return CommandReply(True, command())
        except CommandFailed as failed:
            return CommandReply(False, failed.why)

    @staticmethod
    def _run_command(assignment: Callable[[], None]) -> str | None:
        """Runs a command. Returns the error, or None."""
        try:
            assignment()
        except CommandFailed as failed:
            return str(failed)
        return None

    @staticmethod
    def _start(work: Callable[..., None], argument: object) -> None:
        threading.Thread(target=work, args=(argument,), daemon=True).start()

    def _fetch(self, wanted: Files) -> None:
        ended: SimpleQueue[str | None] = SimpleQueue()
        self._start(lambda files: ended.put(_fetch_error(files, self.files)), wanted)
        try:
            why = ended.get(timeout=FETCH_TIMEOUT)
        except Empty:
            # The URL may contain a password, so the text omits it.
            why = f"files: the fetch timed out after {FETCH_TIMEOUT:g} s; check the URL in the spec"
        with self.work.lock:
            self.work.fetching.discard(wanted.key)
            if why:
                log.warning("cannot fetch the files of a model: %s", why)
                self.work.fetch_failures[wanted.key] = Refusal(why, time.time_ns())

    def _apply(self, assignments: Assignments) -> None:
        refused: dict[str, str] = {}
        try:
            refused = self._put_in_force(assignments)
        except (CommandFailed, BaseFault, OSError) as failed:
            log.warning("cannot apply the new configuration to this host's supervisor: %s", failed)
            refused = {assignment.digest: str(failed) for assignment in assignments.new}
        except Exception as error:  # `observe` must report every error.
            log.exception("cannot apply the new configuration because of a bug in shadowslice")
            refused = {
                assignment.digest: f"{type(error).__name__}: {error}"
                for assignment in assignments.new
            }
        finally:
            with self.work.lock:
                attempt = time.time_ns()
                self.work.refusals = {of: Refusal(why, attempt) for of, why in refused.items()}
                self.work.applying = False
                self.work.applied += 1

    def _put_in_force(self, assignments: Assignments) -> dict[str, str]:
        """Writes the configuration and reloads it.

        Returns the reasons why assignments could not be applied, keyed by their digests.
        """
        profiles = self.files / gc.PROFILES
        profiles.mkdir(parents=True, exist_ok=True)
        for assignment in assignments.new:
            if assignment.model.profile is not None:
                _write_atomically(
                    config_file.profile(assignment, profiles), json.dumps(assignment.model.profile)
                )
        text, refused = self._valid_config(assignments, profiles)
        self.pending.touch()
        _write_atomically(self.config, text)
        self.mixed.touch()
        try:
            not_in_force = self.supervisor.reload()
            if not not_in_force:
                self.mixed.unlink(missing_ok=True)
        except CommandFailed as failed:
            not_in_force = {assignment.model.name: failed.why for assignment in assignments.new}
        self.pending.unlink(missing_ok=True)
        changed = [
            assignment for assignment in assignments.new if assignment.model.name in not_in_force
        ]
        return refused | {
            assignment.digest: not_in_force[assignment.model.name] for assignment in changed
        }

    def _run_gc(self) -> None:
        while True:
            try:
                self.collect_garbage(time.time())
            except (OSError, UnicodeDecodeError, CommandFailed) as error:
                log.warning("cannot remove unused files of models; trying again later: %s", error)
            time.sleep(GC_INTERVAL)

    def collect_garbage(self, now: float) -> None:
        """Removes the files that both this and the previous garbage collection found unused.

        Between these two collections, `observe` reports the files as not fetched. `now` is the
        wall-clock time in seconds. Raises OSError, UnicodeDecodeError and CommandFailed.
        """
        if not self._is_config_in_force(now):
            return
        # After a rollback, and while a former version is kept, the file does not name all versions.
        status = self.supervisor.status()
        loaded = "\n".join(observed.loaded_paths(status))
        with self.work.lock:
            if self.work.applying:
                return
            text = _read_text(self.config)
            if not config_file.models_with_rollout(text) <= observed.loaded_models(status):
                return
            found = gc.find_unused(self.files, f"{text}\n{loaded}", now)
            coming = {path for path in found for key in self.work.fetching if key in path.name}
            due = (found & self.work.expiring) - coming
            self.work.expiring = found
            aside = [gc.move_aside(path) for path in due]
        for path in aside:
            gc.remove(path)

    def _is_config_in_force(self, now: float) -> bool:
        """Checks whether the supervisor has applied the whole file, by a reload or at its start."""
        if self.pending.exists():
            return False
        if not self.mixed.exists():
            return True
        age: float = self.supervisor.status()["supervisor"]["age_s"]
        return now - age > self.mixed.stat().st_mtime

    def _valid_config(self, assignments: Assignments, profiles: Path) -> tuple[str, dict[str, str]]:
        """Returns a valid configuration. Models with faults keep their previous configuration.

        Also returns the faults, keyed by the assignments' digests.
        """
        base, before = self._base(), _read_text(self.config)
        text = config_file.render(base, assignments, before, self.files, profiles)
        by_model, others = config_file.faults_by_model(
            self._faults(text), config_file.model_names(text)
        )
        if others:
            raise BaseFault(f"{self.settings.base}: " + "; ".join(others))
        if not by_model:
            return text, {}
        fit = tuple(
            assignment for assignment in assignments.new if assignment.model.name not in by_model
        )
        valid = Assignments(fit, assignments.keep + tuple(by_model.keys() - set(assignments.keep)))
        faulty = [assignment for assignment in assignments.new if assignment.model.name in by_model]
        text = config_file.render(base, valid, before, self.files, profiles)
        return text, {assignment.digest: by_model[assignment.model.name] for assignment in faulty}

    def _faults(self, text: str) -> list[str]:
        with tempfile.NamedTemporaryFile("w", dir=self.config.parent, suffix=".yaml") as draft:
            draft.write(text)
            draft.flush()
            return self.supervisor.faults(Path(draft.name))

    def _base(self) -> Document:
        try:
            base = yaml.safe_load(Path(self.settings.base).read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise BaseFault(f"cannot read {self.settings.base}: {error}") from error
        if not isinstance(base, dict):
            raise BaseFault(f"{self.settings.base}: expected a map, as `key: value`")
        return base


def _fetch_error(wanted: Files, folder: Path) -> str | None:
    """Fetches files. Returns the error, or None."""
    try:
        files.fetch(wanted, folder)
    except files.FetchFailed as failed:
        return str(failed)
    except Exception as error:  # `observe` must report every error.
        return f"files: {type(error).__name__}: {error}"
    return None


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _write_atomically(path: Path, text: str) -> None:
    """Replaces a file atomically. Preserves the file's mode and, if possible, the owner.

    The supervisor, which may run as another user, must be able to read the file.
    """
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text)
    if path.exists():
        there = path.stat()
        with suppress(PermissionError):  # Only root may change the owner.
            os.chown(draft, there.st_uid, there.st_gid)
        shutil.copymode(path, draft)
    os.replace(draft, path)
