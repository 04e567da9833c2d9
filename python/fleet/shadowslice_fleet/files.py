"""Fetches models' files to a host, once, into a folder named by their digest."""

import hashlib
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import fsspec

from shadowslice_fleet.spec import SHA256, Files

CHUNK = 1 << 20  # bytes
PARTIAL = ".coming-"  # what is not whole: it is being fetched, or removed


class FetchFailed(Exception):
    """Files could not be fetched, or are not those that were wished."""


def fetch(files: Files, folder: Path) -> Path:
    """The folder that has the file, or all that lies under the URL. Raises FetchFailed."""
    target = folder / files.key
    if target.is_dir():
        mark_used(target)
        return target
    folder.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{PARTIAL}{files.key}-", dir=folder))
    try:
        _copy(files.url, partial)
        _verify(files, partial)
        _flush(partial)
        partial.chmod(0o755)
        os.replace(partial, target)
    except Exception as error:  # each file system of fsspec has errors of its own
        raise FetchFailed(_redact(f"files: {files.url} cannot be fetched: {error}")) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def fetched(folder: Path) -> frozenset[str]:
    """Keys of the files that are there."""
    target = folder.iterdir() if folder.is_dir() else ()
    return frozenset(path.name for path in target if SHA256.fullmatch(path.name))


def mark_used(path: Path) -> None:
    """When it was used last is its time of change, which outlives the actor. Read-only files, which
    others provide, have no such time; nor can they be removed."""
    with suppress(OSError):
        os.utime(path)


def _copy(url: str, into: Path) -> None:
    system, path = fsspec.core.url_to_fs(url)
    if not system.isdir(path):
        system.get_file(path, str(into / Path(path).name))
        return
    names = system.find(path)
    if not names:
        raise FetchFailed("there are no files")
    for name in names:
        below = Path(name).relative_to(path)
        if ".." in below.parts:
            raise FetchFailed(f"'{name}' would lie elsewhere")
        target = into / below
        target.parent.mkdir(parents=True, exist_ok=True)
        system.get_file(name, str(target))


def _verify(files: Files, folder: Path) -> None:
    if files.sha256 is None:
        return
    found = digest(folder)
    if found != files.sha256:
        raise FetchFailed(f"it has the digest {found}, not the one wished")


def _flush(folder: Path) -> None:
    """What has its name is whole after a loss of power, too."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _redact(text: str) -> str:
    """Without what URLs have of users, passwords and signatures: all may read why it failed."""
    return re.sub(r"\?[^\s'\"]+", "?...", re.sub(r"://[^/@\s]*@", "://...@", text))


def digest(folder: Path) -> str:
    """SHA-256 of a single file; of several, of sorted lines `DIGEST  PATH` as of `sha256sum`."""
    digests = {
        str(path.relative_to(folder)): _sha256(path) for path in folder.rglob("*") if path.is_file()
    }
    if len(digests) == 1:
        return next(iter(digests.values()))
    lines = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
    return found.hexdigest()
