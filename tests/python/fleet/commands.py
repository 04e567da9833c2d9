"""Runs commands of `shadowslice-fleet` on the gateway's host.

Importing Ray takes most of a command's time, so this process imports it once, and forks for each
command. Commands of one line run at the same time.

Standard input: lines with a list of commands, each a list of arguments. Standard output: lines with
their results, `{"code", "out", "errors"}`, in the same order.
"""

import json
import os
import sys
import tempfile
from typing import IO, Any

import ray  # noqa: F401
from shadowslice_fleet import cli


def main() -> None:
    for line in sys.stdin:
        children = [start(arguments) for arguments in json.loads(line)]
        print(json.dumps([result(*each) for each in children]), flush=True)


def start(arguments: list[str]) -> tuple[int, IO[str], IO[str]]:
    out, errors = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        sys.argv = ["shadowslice-fleet", *arguments]
        cli.main()
    return pid, out, errors


def result(pid: int, out: IO[str], errors: IO[str]) -> dict[str, Any]:
    _, ended = os.waitpid(pid, 0)
    texts = []
    for file in (out, errors):
        file.seek(0)
        texts.append(file.read())
        file.close()
    return {"code": os.waitstatus_to_exitcode(ended), "out": texts[0], "errors": texts[1]}


if __name__ == "__main__":
    main()
