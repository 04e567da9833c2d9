"""The Host actor, one a node. It asks the node's supervisor and carries out orders; what it knows
is on disk or in the supervisor, so that it may die at any time. It starts no supervisor: a child of
a raylet ends with it."""

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

from shadowslice_fleet import facts, files, served, settings, unused, values
from shadowslice_fleet.facts import Orders, Refusal
from shadowslice_fleet.supervisor import CommandFailed, Supervisor
from shadowslice_fleet.wish import Document, Files

MOST_FETCHES = 2  # at a time
FETCHED_WITHIN = 3600.0  # seconds; one that hangs is left alone
# Seconds from one look for unused files to the next. By the next one no order is under way that was
# given before they were found.
SWEPT_EVERY = 600.0
AGAIN_AFTER = 60.0  # seconds until an order is repeated by which models have not gone
log = logging.getLogger(__name__)


class BaseFault(Exception):
    """The host's base configuration cannot be used."""


@dataclass
class Work:
    """What the actor's threads share, under `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    applying: bool = False
    refused: dict[str, Refusal] = field(default_factory=dict)  # by an order's digest
    fetching: set[str] = field(default_factory=set)
    unfetched: dict[str, Refusal] = field(default_factory=dict)  # by the files' key
    leaving: set[Path] = field(default_factory=set)  # unused files, which count as not fetched


class Host:
    def __init__(self, address: str) -> None:
        """`address` is Ray's of the node. Raises SettingsFault."""
        self.settings = settings.host()
        self.address = self.settings.address or address
        self.config = Path(self.settings.config)
        self.pending = self.config.with_name(f".{self.config.name}.pending")  # not reloaded yet
        # Not all of the served file is in force: models may be as the ones before it had them.
        self.mixed = self.config.with_name(f".{self.config.name}.mixed")
        self.files = Path(self.settings.files)
        self.supervisor = Supervisor(self.settings.binary, Path(self.settings.run_dir))
        self.work = Work()
        threading.Thread(target=self._sweeps, daemon=True).start()

    def facts(self) -> facts.Host:
        ours = self.settings
        try:
            status: Document | None = self.supervisor.status()
            why = None
        except CommandFailed as failed:
            status, why = None, str(failed)
        emulated_mib = values.size_mib(ours.emulated_memory)
        copies = facts.copies(status) if status else {}
        with self.work.lock:
            ordered = served.ordered(_text(self.config))
            undone = self.pending.exists() or self._overstays(copies.keys() - ordered.keys())
            return facts.Host(
                name=ours.name,
                address=self.address,
                http_port=ours.http_port,
                grpc_port=ours.grpc_port,
                why=why,
                gpus=facts.gpus(status, emulated_mib) if status else (),
                copies=copies,
                ordered=ordered,
                refused=dict(self.work.refused),
                fetched=files.fetched(self.files) - {path.name for path in self.work.leaving},
                unfetched=dict(self.work.unfetched),
                busy=self.work.applying,
                interrupted=undone and not self.work.applying,
            )

    def _overstays(self, models: set[str]) -> bool:
        """Whether these should have gone with an order that failed a while ago."""
        if not models or not self.mixed.exists():
            return False
        return time.time() - self.mixed.stat().st_mtime > AGAIN_AFTER

    def apply(self, orders: Orders) -> bool:
        """Has the supervisor serve these models; the facts tell how it went. False: it is busy."""
        with self.work.lock:
            if self.work.applying:
                return False
            self.work.applying = True
        self._start(self._apply, orders)
        return True

    def fetch(self, wanted: Files) -> bool:
        """Fetches in the background; the facts tell how it went. False: too many are under way."""
        with self.work.lock:
            if wanted.key in self.work.fetching or len(self.work.fetching) >= MOST_FETCHES:
                return False
            self.work.fetching.add(wanted.key)
            self.work.leaving.discard(self.files / wanted.key)
            self.work.unfetched.pop(wanted.key, None)
        self._start(self._fetch, wanted)
        return True

    def drain(self, model: str) -> str | None:
        return self._told(lambda: self.supervisor.drain(model))

    def undrain(self, model: str) -> str | None:
        return self._told(lambda: self.supervisor.undrain(model))

    @staticmethod
    def _told(order: Callable[[], None]) -> str | None:
        """Why it failed, or nothing."""
        try:
            order()
        except CommandFailed as failed:
            return str(failed)
        return None

    @staticmethod
    def _start(work: Callable[..., None], argument: object) -> None:
        threading.Thread(target=work, args=(argument,), daemon=True).start()

    def _fetch(self, wanted: Files) -> None:
        ended: SimpleQueue[str | None] = SimpleQueue()
        self._start(lambda files: ended.put(_unfetched(files, self.files)), wanted)
        try:
            why = ended.get(timeout=FETCHED_WITHIN)
        except Empty:
            why = f"files: they have not come within {FETCHED_WITHIN:g} s; see to where they are"
        with self.work.lock:
            self.work.fetching.discard(wanted.key)
            if why:
                log.warning("%s", why)
                self.work.unfetched[wanted.key] = Refusal(why, time.time_ns())

    def _apply(self, orders: Orders) -> None:
        refused: dict[str, str] = {}
        try:
            refused = self._carry_out(orders)
        except (CommandFailed, BaseFault, OSError) as failed:
            log.warning("an order failed: %s", failed)
            refused = {order.digest: str(failed) for order in orders.new}
        except Exception as error:  # an order that comes to nothing is told, whatever it met
            log.exception("an order failed")
            refused = {order.digest: f"{type(error).__name__}: {error}" for order in orders.new}
        finally:
            with self.work.lock:
                trial = time.time_ns()
                self.work.refused = {of: Refusal(why, trial) for of, why in refused.items()}
                self.work.applying = False

    def _carry_out(self, orders: Orders) -> dict[str, str]:
        """Writes and reloads. Returns by digest why orders are not in force."""
        profiles = self.files / unused.PROFILES
        profiles.mkdir(parents=True, exist_ok=True)
        for order in orders.new:
            if order.model.profile is not None:
                _replace(served.profile(order, profiles), json.dumps(order.model.profile))
        text, refused = self._checked(orders, profiles)
        self.pending.touch()
        _replace(self.config, text)
        self.mixed.touch()
        try:
            late = self.supervisor.reload()
            if not late:
                self.mixed.unlink(missing_ok=True)
        except CommandFailed as failed:
            late = {order.model.name: failed.why for order in orders.new}
        self.pending.unlink(missing_ok=True)
        changed = [order for order in orders.new if order.model.name in late]
        return refused | {order.digest: late[order.model.name] for order in changed}

    def _sweeps(self) -> None:
        while True:
            try:
                self.sweep(time.time())
            except (OSError, UnicodeDecodeError, CommandFailed) as error:
                log.warning("unused files cannot be removed: %s", error)
            time.sleep(SWEPT_EVERY)

    def sweep(self, now: float) -> None:
        """Removes what it found unused the last time, too: since then that counted as not fetched.
        `now` is of the wall clock, in seconds. Raises OSError, UnicodeDecodeError and
        CommandFailed."""
        if not self._in_force(now):
            return
        with self.work.lock:
            if self.work.applying:
                return
            found = unused.find(self.files, _text(self.config), now)
            coming = {path for path in found for key in self.work.fetching if key in path.name}
            due = (found & self.work.leaving) - coming
            self.work.leaving = found
            aside = [unused.set_aside(path) for path in due]
        for path in aside:
            unused.remove(path)

    def _in_force(self, now: float) -> bool:
        """Whether the supervisor goes by its file alone, as one does that began after it."""
        if self.pending.exists():
            return False
        if not self.mixed.exists():
            return True
        age: float = self.supervisor.status()["supervisor"]["age_s"]
        return now - age > self.mixed.stat().st_mtime

    def _checked(self, orders: Orders, profiles: Path) -> tuple[str, dict[str, str]]:
        """A configuration that `check` finds no fault in: a model with faults stays as it is."""
        base, before = self._base(), _text(self.config)
        text = served.render(base, orders, before, self.files, profiles)
        by_model, others = served.blamed(self._faults(text), served.names(text))
        if others:
            raise BaseFault(f"{self.settings.base}: " + "; ".join(others))
        if not by_model:
            return text, {}
        fit = tuple(order for order in orders.new if order.model.name not in by_model)
        orders_fit = Orders(fit, orders.keep + tuple(by_model.keys() - set(orders.keep)))
        faulty = [order for order in orders.new if order.model.name in by_model]
        text = served.render(base, orders_fit, before, self.files, profiles)
        return text, {order.digest: by_model[order.model.name] for order in faulty}

    def _faults(self, text: str) -> list[str]:
        with tempfile.NamedTemporaryFile("w", dir=self.config.parent, suffix=".yaml") as draft:
            draft.write(text)
            draft.flush()
            return self.supervisor.faults(Path(draft.name))

    def _base(self) -> Document:
        try:
            base = yaml.safe_load(Path(self.settings.base).read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise BaseFault(f"{self.settings.base} cannot be read: {error}") from error
        if not isinstance(base, dict):
            raise BaseFault(f"{self.settings.base}: a map is needed")
        return base


def _unfetched(wanted: Files, folder: Path) -> str | None:
    """Why the files cannot be fetched, or nothing."""
    try:
        files.fetch(wanted, folder)
    except files.FetchFailed as failed:
        return str(failed)
    except Exception as error:  # it is told, whatever a fetch meets
        return f"files: {type(error).__name__}: {error}"
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _replace(path: Path, text: str) -> None:
    """Atomically; the mode stays, and the owner where that may be set: the supervisor reads it."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text)
    if path.exists():
        there = path.stat()
        with suppress(PermissionError):
            os.chown(draft, there.st_uid, there.st_gid)
        shutil.copymode(path, draft)
    os.replace(draft, path)
