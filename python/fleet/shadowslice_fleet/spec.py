"""The spec: the models that the operator wants, with their copies and configuration."""

import difflib
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import yaml

from shadowslice_fleet import values

Document = dict[str, Any]
Value = TypeVar("Value")

NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,128}")
SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_MODELS = 256
MAX_COPIES = 64
MIN_TIMEOUT, MAX_TIMEOUT = 1e-3, 86400.0  # the range of a request's timeout in seconds
# The last three occur for YAML that JSON cannot express, such as binary keys or recursive anchors.
READ_ERRORS = (OSError, yaml.YAMLError, ValueError, TypeError, RecursionError)
FLEET_KEYS = {"name", "copies", "most", "rate", "files", "retry", "timeout", "need", "profile"}
# The keys that are passed to the supervisor. A test compares them with its JSON Schema.
SUPERVISOR_KEYS = {
    "engine",
    "path",
    "versions",
    "rollout",
    "threads",
    "step_timeout",
    "providers",
    "python",
    "tensors",
    "gpu",
    "share",
    "slo",
    "batch",
    "queue",
    "cache",
    "openai",
    "priority",
    "handover",
    "isolation",
    "worker",
    "sleep",
    "standby",
    "cpus",
    "memory",
    "warmup",
}


class SpecFaults(Exception):
    """The spec is invalid. `faults` lists all faults in the form `FILE: models[0].copies: ...`."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__(faults)
        self.faults = faults

    def __str__(self) -> str:
        return "\n".join(self.faults)


@dataclass(frozen=True)
class Files:
    """The files that a host fetches before it starts a copy of the model."""

    url: str
    sha256: str | None

    @property
    def key(self) -> str:
        """The name of the folder with the files: `sha256` if it is given, or the URL's digest."""
        return self.sha256 or hashlib.sha256(self.url.encode()).hexdigest()


@dataclass(frozen=True)
class Need:
    """The resources that the operator states for each copy, for use in placement."""

    sms: int
    memory_mib: int


@dataclass(frozen=True)
class Model:
    """One model of the spec."""

    name: str
    copies: int
    max_copies: int | None  # the limit under load; None for the number of hosts
    priority: int
    rate: float | None  # rows per second
    files: Files | None
    retry: bool
    timeout_s: float
    need: Need | None
    profile: Document | None
    keys: Document  # the model's keys in the supervisor's configuration

    @cached_property
    def digest(self) -> str:
        """The digest of all settings that a copy depends on. If it changes, copies are replaced."""
        files = (self.files.key, self.files.url) if self.files else None
        written = json.dumps([self.keys, files, self.profile], sort_keys=True)
        return hashlib.sha256(written.encode()).hexdigest()[:16]

    @cached_property
    def version_path(self) -> str | None:
        """The path of the model's version. A path in `files` starts with `Files.key`."""
        path = self.keys.get("path")
        if not isinstance(path, str):
            return None
        return str(Path(self.files.key, path)) if self.files else path


@dataclass(frozen=True)
class Spec:
    """The desired state of the fleet."""

    models: dict[str, Model]
    document: Document  # the parsed spec file, including the models' profiles

    @cached_property
    def digest(self) -> str:
        """The digest of the document."""
        return hashlib.sha256(json.dumps(self.document, sort_keys=True).encode()).hexdigest()[:16]


def load(path: Path) -> Spec:
    """Reads the operator's file, and the profiles that this file names. Raises SpecFaults."""
    try:
        document = _read(path)
    except READ_ERRORS as error:
        raise SpecFaults([f"{path}: cannot read this file as YAML: {error}"]) from error
    faults: list[str] = []
    models = document.get("models") if isinstance(document, dict) else None
    for at, model in enumerate(models if isinstance(models, list) else []):
        if isinstance(model, dict) and isinstance(model.get("profile"), str):
            named = path.parent / model["profile"]
            try:
                model["profile"] = _read(named)
            except READ_ERRORS as error:
                faults.append(f"{path}: models[{at}].profile: cannot read {named}: {error}")
                del model["profile"]
    try:
        spec = parse(document, str(path))
    except SpecFaults as found:
        raise SpecFaults(faults + found.faults) from found
    if faults:
        raise SpecFaults(faults)
    return spec


def _read(path: Path) -> Any:
    """Reads YAML and converts it to JSON types, so that all keys are strings."""
    return json.loads(json.dumps(yaml.safe_load(path.read_text()), default=str))


def parse(document: object, file: str) -> Spec:
    """Parses a document that contains its profiles. Raises SpecFaults with all faults."""
    if not isinstance(document, dict):
        raise SpecFaults([f"{file}: expected a map with the key `models`"])
    faults = [f"{file}: {_unknown(key, {'models'})}" for key in document if key != "models"]
    entries = document.get("models")
    if not isinstance(entries, list):
        raise SpecFaults([*faults, f"{file}: models: expected a list of models"])
    if len(entries) > MAX_MODELS:
        faults.append(f"{file}: models: the list has more than {MAX_MODELS} models")
    models: dict[str, Model] = {}
    for at, entry in enumerate(entries):
        reader = _Reader(f"{file}: models[{at}]", entry, faults)
        model = reader.model()
        if model and model.name in models:
            faults.append(f"{file}: models[{at}].name: '{model.name}' occurs twice")
        elif model:
            models[model.name] = model
    if faults:
        raise SpecFaults(faults)
    return Spec(models, document)


def of_entries(entries: list[Document]) -> Spec:
    """Returns the spec with these entries of models, which an earlier spec contained."""
    return parse({"models": entries}, "the former models")


def entry(spec: Spec, name: str) -> Document:
    """Returns a model's entry in the document."""
    found: Document = next(each for each in spec.document["models"] if each["name"] == name)
    return found


def _unknown(key: str, known: set[str]) -> str:
    """Returns the fault of an unknown key, with the most similar known key."""
    close = difflib.get_close_matches(key.lower(), known, n=1)
    return f"{key}: unknown key" + (f"; did you mean `{close[0]}`?" if close else "")


class _Reader:
    """A parser of one model, which continues after each fault."""

    def __init__(self, where: str, entry: object, faults: list[str]) -> None:
        self.where, self.entry, self.faults = where, entry, faults

    def model(self) -> Model | None:
        if not isinstance(self.entry, dict):
            self.fault("", "expected a map, as `{name: NAME, ...}`")
            return None
        before = len(self.faults)
        keys = {key: value for key, value in self.entry.items() if key not in FLEET_KEYS}
        for key in keys.keys() - SUPERVISOR_KEYS:
            self.faults.append(f"{self.where}.{_unknown(key, FLEET_KEYS | SUPERVISOR_KEYS)}")
        if "gpu" in keys:
            self.fault(".gpu", "the fleet places models; remove this key")
        files = self.files()
        path = keys.get("path")
        if isinstance(path, str) and not path.startswith("/") and not files:
            self.fault(
                ".path", "a relative path needs `files`; add `files`, or use an absolute path"
            )
        if isinstance(path, str) and files and ".." in Path(path).parts:
            self.fault(".path", "the path leads out of `files`; remove `..`")
        need, profile = self.need(), self.entry.get("profile")
        if profile is not None and not isinstance(profile, dict):
            self.fault(".profile", "expected a path, or a map as in a profile's file")
        name = self.value("name", self.name, "")
        copies = self.value("copies", lambda x: values.integer(x, 1, MAX_COPIES), 2)
        model = Model(
            name=name or "",
            copies=copies,
            max_copies=self.value("most", lambda x: values.integer(x, copies, MAX_COPIES), None),
            priority=self.value("priority", lambda x: values.integer(x, 1, 1000), 1),
            rate=self.value("rate", lambda x: values.number(x, 0, 1e9), None),
            files=files,
            retry=self.value("retry", values.boolean, True),
            timeout_s=self.value("timeout", self.timeout, 60.0),
            need=need,
            profile=profile,
            keys={"name": name} | keys,
        )
        return model if len(self.faults) == before else None

    def fault(self, key: str, why: str) -> None:
        self.faults.append(f"{self.where}{key}: {why}")

    def value(self, key: str, read: Callable[[object], Value], default: Any) -> Any:
        if key not in self.entry:  # type: ignore[operator]
            if key == "name":
                self.fault(".name", "missing")
            return default
        try:
            return read(self.entry[key])  # type: ignore[index]
        except values.ValueFault as fault:
            self.fault(f".{key}", str(fault))
            return default

    @staticmethod
    def name(value: object) -> str:
        if not isinstance(value, str):
            raise values.ValueFault(f"{value!r} is not a string; put it in quotes")
        if not NAME.fullmatch(value):
            raise values.ValueFault(
                f"invalid name {value!r}; use at most 128 letters, digits, '.', '_' and '-'"
            )
        return value

    @staticmethod
    def timeout(value: object) -> float:
        found = values.duration_s(value)
        if not MIN_TIMEOUT <= found <= MAX_TIMEOUT:
            raise values.ValueFault(f"{value!r} is not a duration from 1ms to 24h")
        return found

    def files(self) -> Files | None:
        value = self.entry.get("files")  # type: ignore[attr-defined]
        if value is None:
            return None
        given = value if isinstance(value, dict) else {"url": value}
        url, digest = given.get("url"), given.get("sha256")
        if not isinstance(url, str) or not (url.startswith("/") or "://" in url):
            self.fault(".files", "expected an absolute path, a URL or {url: URL, sha256: DIGEST}")
        if digest is not None and not (isinstance(digest, str) and SHA256.fullmatch(digest)):
            self.fault(".files.sha256", "expected 64 hexadecimal digits, in quotes")
        for key in given.keys() - {"url", "sha256"}:
            self.fault(f".files.{key}", "unknown key")
        return Files(str(url), digest)

    def need(self) -> Need | None:
        value = self.entry.get("need")  # type: ignore[attr-defined]
        if value is None:
            return None
        if not isinstance(value, dict) or value.keys() != {"sms", "memory"}:
            self.fault(".need", "expected `sms` and `memory`, as {sms: 24, memory: 4Gi}")
            return None
        read: dict[str, int] = {}
        for key, reader in (
            ("sms", lambda x: values.integer(x, 1, 1024)),
            ("memory", values.size_mib),
        ):
            try:
                read[key] = reader(value[key])
            except values.ValueFault as fault:
                self.fault(f".need.{key}", str(fault))
        return Need(read["sms"], read["memory"]) if len(read) == 2 else None


EMPTY = parse({"models": []}, "no spec")
