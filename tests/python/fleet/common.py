"""Helpers for the scenarios: models, clients, and a function that waits for the desired state."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from load import Load, Served, echo, recorded
from rig import GPUS, GRPC, HTTP, Rig
from units import wait_until

REPOSITORY = Path(__file__).resolve().parents[3]
TABLE_WITHIN = 60.0


@dataclass(frozen=True)
class Options:
    rounds: Literal["short", "usual", "long"]
    models: Path | None  # the folder with ONNX models

    def times(self, short: int, usual: int, long: int) -> int:
        return {"short": short, "usual": usual, "long": long}[self.rounds]


def need(sms: int, memory: str = "2Gi") -> dict[str, Any]:
    return {"sms": sms, "memory": memory}


def emulated(name: str, datatype: str, size: int, **more: Any) -> dict[str, Any]:
    tensors = [{"input": "x", "output": "y", "datatype": datatype, "shape": [size]}]
    return {"name": name, "engine": "emulated", "tensors": tensors, "slo": "200ms"} | more


def spec_models(options: Options) -> list[dict[str, Any]]:
    """Returns seven models, which fit on two GPUs. Clients send requests to six of the models."""
    models = [
        emulated("echo", "FP32", 4, need=need(16)),
        emulated("wide", "FP32", 4096, need=need(16), priority=2),
        emulated("large", "FP32", -1, need=need(8), queue={"memory": "128Mi"}),
        emulated("ids", "INT64", 128, need=need(16)),
        emulated(
            "paced", "FP32", 16, profile=str(REPOSITORY / "configs/profiles/resnet50.yaml"), rate=50
        ),
    ]
    if options.models:
        for name in ("digits", "encoder"):
            files = str(options.models / f"{name}.onnx")
            models.append(
                {
                    "name": name,
                    "path": f"{name}.onnx",
                    "files": files,
                    "slo": "200ms",
                    "need": need(16),
                }
            )
    else:
        models += [
            emulated("one", "FP32", 1, need=need(16)),
            emulated("more", "INT64", 64, need=need(16)),
        ]
    return models


def served(options: Options) -> list[Served]:
    models = [
        echo("echo", "FP32", 4),
        echo("wide", "FP32", 4096),
        echo("ids", "INT64", 128),
        echo("paced", "FP32", 16),
    ]
    if options.models:
        return models + [
            recorded(name, options.models / f"{name}.json") for name in ("digits", "encoder")
        ]
    return [*models, echo("one", "FP32", 1), echo("more", "INT64", 64)]


def load(rig: Rig, options: Options, streams: bool = False, more: Sequence[Served] = ()) -> Load:
    return Load(rig.address("gw"), HTTP, GRPC, [*served(options), *more], streams)


def up_all(rig: Rig, options: Options) -> None:
    rig.cli("up", str(rig.write_spec(spec_models(options))), "--within", "90")


def settled(rig: Rig, within: float = TABLE_WITHIN) -> float:
    """Waits until all hosts reply and are in the desired state. Returns the seconds waited."""

    said = ""

    def is_settled() -> bool:
        nonlocal said
        done = rig.cli("status", "--json", check=False)
        said = done.stdout or done.stderr
        if done.returncode != 0:
            return False
        status = json.loads(done.stdout)
        replying = {name for name, host in status["hosts"].items() if host["answers"]}
        return replying >= GPUS.keys() and status["settled"] and matches_hosts(rig, status)

    try:
        return wait_until(is_settled, within, "the fleet is in the desired state")
    except TimeoutError as late:
        raise TimeoutError(f"{late}; the fleet said: {said}") from late


def matches_hosts(rig: Rig, status: dict[str, Any]) -> bool:
    table = {
        (name, copy["host"], copy["gpu"])
        for name, model in status["models"].items()
        for copy in model["copies"]
    }
    found = {
        (model["name"], host, model["gpu"])
        for host in GPUS
        for model in rig.supervisor_status(host)["models"]
        if model["state"] == "ready" and not model["drained"]
    }
    return table == found


def check_none_lost(clients: Load, what: str) -> None:
    print(f"  {what}: {clients.summary()}", flush=True)
    assert clients.results, "no requests were sent"
    assert not clients.faults(), clients.explain()


def random_move(status: dict[str, Any], name: str | None = None) -> tuple[str, str, str]:
    """Returns the model, the target and the source host of a random move."""
    name = name or random.choice(sorted(status["models"]))
    copies = {copy["host"]: copy["gpu"] for copy in status["models"][name]["copies"]}
    slots = [(host, gpu) for host, gpus in GPUS.items() for gpu in range(gpus)]
    targets = [(host, gpu) for host, gpu in slots if host not in copies]
    if "c" in copies:
        targets.append(("c", 1 - copies["c"]))
    host, gpu = random.choice(targets)
    return name, f"{host}:{gpu}", host if host in copies else random.choice(sorted(copies))
