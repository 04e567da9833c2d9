"""Fetches each model's files to a host once, into a folder with the name `Files.key`."""

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
PARTIAL = ".coming-"  # the prefix of folders that are being fetched or removed


class FetchFailed(Exception):
    """Files could not be fetched, or the digest of the fetched files is wrong."""


def fetch(files: Files, folder: Path) -> Path:
    """Fetches the file or folder at the URL. Returns the folder that contains the fetched files.

    Raises FetchFailed.
    """
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
    except Exception as error:  # Each file system of fsspec raises different errors.
        raise FetchFailed(_redact(f"files: cannot fetch {files.url}: {error}")) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def fetched(folder: Path) -> frozenset[str]:
    """Returns the keys of the files that have been fetched."""
    target = folder.iterdir() if folder.is_dir() else ()
    return frozenset(path.name for path in target if SHA256.fullmatch(path.name))


def mark_used(path: Path) -> None:
    """Sets the modification time, which records the last use even if the actor dies.

    Ignores read-only files, because another program provides these files and the fleet cannot
    remove them.
    """
    with suppress(OSError):
        os.utime(path)


def _copy(url: str, into: Path) -> None:
    system, path = fsspec.core.url_to_fs(url)
    if not system.isdir(path):
        system.get_file(path, str(into / Path(path).name))
        return
    names = system.find(path)
    if not names:
        raise FetchFailed("no files found there")
    for name in names:
        below = Path(name).relative_to(path)
        if ".." in below.parts:
            raise FetchFailed(f"'{name}' leads out of the folder")
        target = into / below
        target.parent.mkdir(parents=True, exist_ok=True)
        system.get_file(name, str(target))


def _verify(files: Files, folder: Path) -> None:
    if files.sha256 is None:
        return
    found = digest(folder)
    if found != files.sha256:
        raise FetchFailed(f"the digest is {found}, but the spec has sha256 {files.sha256}")


def _flush(folder: Path) -> None:
    """Flushes all files to disk, so that a folder with its final name survives a power loss."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _redact(text: str) -> str:
    """Removes users, passwords and signatures from URLs, because anyone can read the status."""
    return re.sub(r"\?[^\s'\"]+", "?...", re.sub(r"://[^/@\s]*@", "://...@", text))


def digest(folder: Path) -> str:
    """Returns the SHA-256 of a file. For a folder, hashes the sorted output of `sha256sum`."""
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
