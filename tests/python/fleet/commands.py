"""Runs commands of `shadowslice-fleet` on the gateway's host.

The import of Ray takes most of the time of a command. This process therefore imports Ray once, and
forks for each command.

Each line of standard input is a list of commands, which run at the same time. A command is a list
of arguments. For each line, standard output gets a list of results, `{"code", "out", "errors"}`, in
the same order.
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
