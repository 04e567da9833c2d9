"""Tests kills of the control plane's processes, and rolling restarts."""

import os
import random
import subprocess
import time
from functools import partial

from common import TABLE_WITHIN, Options, check_none_lost, load, random_move, settled
from rig import GPUS, Rig
from units import wait_until


def control(rig: Rig, options: Options) -> None:
    """Kills Ray's processes and the actors, with and without a move. No request may fail."""
    victims = [
        ("gw", "gcs_server"),
        ("gw", "ray::Fleet"),
        ("b", "raylet/raylet"),
        ("a", "ray::Host"),
        ("gw", "raylet/raylet"),
    ]
    with load(rig, options) as clients:
        for at in range(options.times(2, 5, 15)):
            node, part = victims[at % len(victims)]
            in_move, before = begin_move(rig) if at % 2 else None, places(rig)
            pid = rig.nodes[node].pid_of(part)
            assert pid, f"{part} does not run on {node}"
            os.kill(pid, 9)
            wait_until(partial(runs_again, rig, node, part, pid), TABLE_WITHIN, f"{part} again")
            if in_move:
                in_move.wait(60)
            took = settled(rig)
            assert in_move or places(rig) == before, "copies have moved without need"
            what = f"{part} on {node}{' in a move' if in_move else ''}"
            print(f"  kill -9 of {what}: table after {took:.0f} s", flush=True)
    check_none_lost(clients, "kills of control")


def runs_again(rig: Rig, node: str, part: str, killed: int) -> bool:
    """Checks that the killed process and all Host actors run again."""
    hosts = [rig.nodes[host].pid_of("ray::Host") for host in GPUS]
    return rig.nodes[node].pid_of(part) not in (None, killed) and all(hosts)


def places(rig: Rig) -> dict[str, list[tuple[str, int]]]:
    """Returns the host and the GPU of each copy of each model."""
    return {
        name: sorted((copy["host"], copy["gpu"]) for copy in model["copies"])
        for name, model in rig.status()["models"].items()
    }


def begin_move(rig: Rig) -> "subprocess.Popen[str]":
    """Starts a move in the background, and returns while the move is in progress."""
    model, to, source = random_move(rig.status())
    moving = rig.cli_in_background("move", model, to, "--from", source, "--within", "20")
    time.sleep(random.uniform(1.8, 3.5))
    return moving


def rolling(rig: Rig, options: Options) -> None:
    """Restarts all supervisors, all nodes and Envoy one by one."""
    with load(rig, options) as clients:
        for host in GPUS:
            rig.supervisors[host].restart()
            settled(rig)
        check_none_lost(clients, "supervisors")
        for node in ("a", "b", "c", "gw"):
            rig.nodes[node].restart()
            settled(rig)
        check_none_lost(clients, "supervisors and nodes")
        for _ in range(2):
            rig.reload_gateway()
            time.sleep(1)
            settled(rig)
    check_none_lost(clients, "supervisors, nodes and Envoy")
