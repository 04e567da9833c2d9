#!/usr/bin/env python3
"""Tests a fleet of a gateway and three hosts.

If root runs the tests, the hosts are network namespaces. Otherwise, the hosts are loopback
addresses. The Python interpreter needs the package shadowslice_fleet.
"""

import argparse
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from common import Options, up_all
from network import Loopback, Namespaces
from rig import Rig, left_behind
from scenarios import ALL, USUAL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binary", help="the program shadowslice")
    parser.add_argument(
        "--only", action="append", choices=ALL, help="run this scenario; may be repeated"
    )
    parser.add_argument(
        "--all", action="store_true", help="also run scenarios that wait for the load to change"
    )
    parser.add_argument("--rounds", choices=["short", "usual", "long"], default="usual")
    parser.add_argument(
        "--models", type=Path, help="a folder with digits.onnx, encoder.onnx and their answers"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16))
    parser.add_argument("--keep", type=Path, help="copy logs to this folder")
    parser.add_argument("--loopback", action="store_true", help="use no network namespaces")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"seed {arguments.seed}", flush=True)
    random.seed(arguments.seed)
    models = arguments.models.resolve() if arguments.models else None
    options = Options(arguments.rounds, models)
    tag = f"ssf{os.getpid() % 100000}"
    spaces = Namespaces(tag)
    network = spaces if not arguments.loopback and spaces.possible() else Loopback()
    print(f"on {type(network).__name__.lower()}", flush=True)
    rig = Rig(os.path.abspath(arguments.binary), tag, network)
    try:
        began = time.monotonic()
        rig.start()
        up_all(rig, options)
        print(f"up: all models after {time.monotonic() - began:.0f} s from nothing", flush=True)
        for name in arguments.only or (ALL if arguments.all else USUAL):
            began = time.monotonic()
            print(f"{name}: {ALL[name].__doc__}", flush=True)
            ALL[name](rig, options)
            print(f"{name}: ok after {time.monotonic() - began:.0f} s", flush=True)
    finally:
        if arguments.keep:
            rig.keep_logs(arguments.keep)
        rig.stop()
    left = left_behind(rig)
    assert not left, f"left behind: {left}"
    print("nothing is left behind")


if __name__ == "__main__":
    main()
