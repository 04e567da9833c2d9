"""What is tested. Each scenario gets a fleet that serves all models, and leaves one."""

import http.client
import json
import os
import random
import re
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from load import Load, Served, echo, inputs, recorded
from rig import GPUS, GRPC, HTTP, Rig
from units import wait_until

REPOSITORY = Path(__file__).resolve().parents[3]
# Seconds a request may take when a host dies. That a link is cut while a host has a request is told
# by TCP's keepalive, after 2 s at the least.
LONGEST, LONGEST_CUT = 2.0, 2.5
BACK_WITHIN = 5.0  # seconds from a host's death, and the load time
LOAD_TIME = 10.0  # of these models, where the host is busy with tests
TABLE_WITHIN = 60.0


@dataclass(frozen=True)
class Options:
    short: bool
    rounds: int
    models: Path | None  # the folder with ONNX models

    def times(self, full: int, short: int) -> int:
        return short if self.short else full * self.rounds


def need(sms: int, memory: str = "2Gi") -> dict[str, Any]:
    return {"sms": sms, "memory": memory}


def emulated(name: str, datatype: str, size: int, **more: Any) -> dict[str, Any]:
    tensors = [{"input": "x", "output": "y", "datatype": datatype, "shape": [size]}]
    return {"name": name, "engine": "emulated", "tensors": tensors, "slo": "200ms"} | more


def wished(options: Options) -> list[dict[str, Any]]:
    """Seven models, of which clients ask six all the time; they all fit on two GPUs."""
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


def load(rig: Rig, options: Options, streams: bool = False) -> Load:
    return Load(rig.address("gw"), HTTP, GRPC, served(options), streams)


def up_all(rig: Rig, options: Options) -> None:
    rig.cli("up", str(rig.wish(wished(options))), "--within", "90")


def settled(rig: Rig, within: float = TABLE_WITHIN) -> float:
    """Seconds until the table equals the wish, as the supervisors have it."""

    def is_so() -> bool:
        done = rig.cli("status", "--json", check=False)
        if done.returncode != 0:
            return False
        status = json.loads(done.stdout)
        return bool(status["settled"]) and as_the_hosts_say(rig, status)

    return wait_until(is_so, within, "the table equals the wish")


def as_the_hosts_say(rig: Rig, status: dict[str, Any]) -> bool:
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


def none_lost(told: Load, what: str) -> None:
    print(f"  {what}: {told.said()}", flush=True)
    assert told.results, "no requests were sent"
    assert not told.faults(), told.explain()


def up(rig: Rig, options: Options) -> None:
    """From nothing to seven models; faults are told all at once; `plan` changes nothing."""
    faulty = rig.wish(
        [{"name": "a b", "gpu": 1}, {"name": "x", "copies": 0, "slo": "1ms", "need": {}}],
        "bad.yaml",
    )
    done = rig.cli("up", str(faulty), check=False)
    assert done.returncode == 78, done
    for part in ("models[0].name:", "models[0].gpu:", "models[1].copies:", "models[1].need:"):
        assert part in done.stderr, done.stderr
    wish = rig.wish([*wished(options), emulated("planned", "FP32", 2, need=need(16))], "plan.yaml")
    planned = rig.cli("plan", str(wish)).stdout
    assert "planned: comes to" in planned and "planned" not in rig.status()["models"], planned
    status = rig.status()
    assert status["settled"] and all(model["served"] == 2 for model in status["models"].values()), (
        status
    )
    with load(rig, options, streams=True) as told:
        time.sleep(2)
    none_lost(told, "models through one address")
    large_requests(rig)
    url = f"http://{rig.address('gw')}:{HTTP}/v2/models"
    with urllib.request.urlopen(f"{url}/e%63ho/ready") as answer:
        assert answer.status == 200
    broken_models(rig, options)
    up_all(rig, options)


def broken_models(rig: Rig, options: Options) -> None:
    """The reason is told, and the others serve."""
    (rig.folder / "fails.py").write_text("raise RuntimeError('it fails')")
    fails = {
        "files": str(rig.folder / "fails.py"),
        "path": "fails.py",
        "slo": "1s",
        "need": need(8),
    }
    changed = {"url": str(rig.folder / "fails.py"), "sha256": "0" * 64}
    models = {
        "faulty": emulated("faulty", "FP32", 2, need=need(8)) | {"tensors": []},
        "fails": fails | {"name": "fails"},
        "changed": fails | {"name": "changed", "files": changed},
    }
    wish = rig.wish([*wished(options), *models.values()])
    with load(rig, options) as told:
        done = rig.cli("up", str(wish), "--within", "30", check=False)
    none_lost(told, "models that cannot be served")
    assert done.returncode == 1, done
    for line in ("faulty on [abc]: tensors: ", "fails on [abc]: ", "changed on [abc]: .* digest"):
        assert re.search(line, done.stdout), (line, done.stdout)


def large_requests(rig: Rig) -> None:
    """Of 40 MB, more than Envoy's usual buffers, by both protocols."""
    rows = np.random.default_rng(1).random((10, 1_000_000), np.float32)
    for client in (
        httpclient.InferenceServerClient(f"{rig.address('gw')}:{HTTP}", network_timeout=60),
        grpcclient.InferenceServerClient(f"{rig.address('gw')}:{GRPC}"),
    ):
        kind = httpclient if isinstance(client, httpclient.InferenceServerClient) else grpcclient
        given = kind.InferInput("x", rows.shape, "FP32")
        given.set_data_from_numpy(rows)
        assert np.array_equal(client.infer("large", [given]).as_numpy("y"), rows)
        client.close()


def moves(rig: Rig, options: Options) -> None:
    """Host to host, GPU to GPU; none lost. A copy that cannot start leaves the old one serving."""
    took = []
    with load(rig, options, streams=True) as told:
        for _ in range(options.times(8, 3)):
            model, to, source = a_move(rig.status())
            began = time.monotonic()
            rig.cli("move", model, to, "--from", source, "--within", "60")
            took.append(time.monotonic() - began)
            table = rig.status()["models"][model]["copies"]
            assert to in [f"{copy['host']}:{copy['gpu']}" for copy in table], (model, to, table)
    none_lost(told, f"{len(took)} moves, median {statistics.median(took):.1f} s")
    aborted_move(rig, options)
    drained_host(rig, options)


def a_move(status: dict[str, Any]) -> tuple[str, str, str]:
    """Model, target, source host."""
    name = random.choice(sorted(status["models"]))
    copies = {copy["host"]: copy["gpu"] for copy in status["models"][name]["copies"]}
    slots = [(host, gpu) for host, gpus in GPUS.items() for gpu in range(gpus)]
    targets = [(host, gpu) for host, gpu in slots if host not in copies]
    if "c" in copies:
        targets.append(("c", 1 - copies["c"]))
    host, gpu = random.choice(targets)
    return name, f"{host}:{gpu}", host if host in copies else random.choice(sorted(copies))


def aborted_move(rig: Rig, options: Options) -> None:
    if not options.models:
        return
    copies = {copy["host"] for copy in rig.status()["models"]["digits"]["copies"]}
    target = next(host for host in GPUS if host not in copies)
    fetched = rig.folder / target / "files"
    for file in fetched.glob("*/digits.onnx"):
        file.unlink()
    key = next((rig.folder / min(copies) / "files").glob("*/digits.onnx")).parent.name
    (fetched / key).mkdir(parents=True, exist_ok=True)
    (fetched / key / "digits.onnx").write_bytes(b"no model")
    with load(rig, options) as told:
        source = min(copies)
        done = rig.cli("move", "digits", target, "--from", source, "--within", "60", check=False)
        assert done.returncode == 1 and "did not move" in done.stderr, done
        time.sleep(1)
    none_lost(told, f"an aborted move ({done.stderr.strip()[:150]})")
    assert {copy["host"] for copy in rig.status()["models"]["digits"]["copies"]} == copies
    (fetched / key / "digits.onnx").unlink()
    (fetched / key).rmdir()


def drained_host(rig: Rig, options: Options) -> None:
    """All copies leave a host, and may come again."""
    host = max(GPUS, key=lambda host: len(rig.status()["hosts"][host]["models"]))
    with load(rig, options, streams=True) as told:
        began = time.monotonic()
        rig.cli("drain", host, "--within", "90")
        took = time.monotonic() - began
        assert not rig.supervisor_status(host)["models"]
    none_lost(told, f"a drained host, after {took:.0f} s")
    rig.cli("undrain", host)


def deaths(rig: Rig, options: Options) -> None:
    """kill -9 of whole hosts, and cut links; of the host with copies that was hit longest ago."""
    hit = dict.fromkeys(GPUS, 0)
    for at in range(options.times(6, 2)):
        host = min(with_copies(rig), key=lambda host: hit[host])
        hit[host] = at + 1
        death(rig, options, host, cut=at % 2 == 1)
    assert options.short or all(hit.values()), f"not every host was hit: {hit}"


def with_copies(rig: Rig) -> set[str]:
    return {copy["host"] for model in rig.status()["models"].values() for copy in model["copies"]}


def death(rig: Rig, options: Options, host: str, cut: bool) -> None:
    with load(rig, options) as told:
        time.sleep(1)
        if cut:
            rig.link(host, up=False)
        else:
            rig.supervisors[host].wanted = rig.nodes[host].wanted = False
            rig.kill_host(host)
        back = wait_until(lambda: restored(rig, host), BACK_WITHIN + LOAD_TIME, "copies are back")
        time.sleep(1)
        if cut:
            rig.link(host, up=True)
        else:
            rig.supervisors[host].start()
            rig.nodes[host].start()
        table = settled(rig)
    what = f"{'link of' if cut else 'kill -9 of'} {host}"
    none_lost(told, f"{what}, copies back after {back:.1f} s, table after {table:.0f} s")
    bound = LONGEST_CUT if cut else LONGEST
    assert told.longest() < bound, f"{told.longest():.2f} s"


def restored(rig: Rig, without: str) -> bool:
    """Each model has two ready copies on hosts other than this one."""
    found = [
        model["name"]
        for host in GPUS
        if host != without
        for model in rig.supervisor_status(host)["models"]
        if model["state"] == "ready"
    ]
    return len(found) >= 14 and all(found.count(name) == 2 for name in found)


def control(rig: Rig, options: Options) -> None:
    """kill -9 of Ray's parts and of the actors, at rest and in mid-move: requests do not notice."""
    victims = [
        ("gw", "gcs_server"),
        ("gw", "ray::Fleet"),
        ("a", "ray::Host"),
        ("b", "raylet/raylet"),
        ("gw", "raylet/raylet"),
    ]
    with load(rig, options) as told:
        for at in range(options.times(5, 2)):
            node, part = victims[at % len(victims)]
            in_move = begin_move(rig) if at % 2 else None
            pid = rig.nodes[node].pid_of(part)
            assert pid, f"{part} does not run on {node}"
            os.kill(pid, 9)
            if in_move:
                in_move.wait(60)
            took = settled(rig)
            what = f"{part} on {node}{' in a move' if in_move else ''}"
            print(f"  kill -9 of {what}: table after {took:.0f} s", flush=True)
    none_lost(told, "kills of control")


def begin_move(rig: Rig) -> "subprocess.Popen[str]":
    """Returns once the move has begun."""
    model, to, source = a_move(rig.status())
    moving = rig.cli_in_background("move", model, to, "--from", source, "--within", "20")
    time.sleep(random.uniform(1.8, 3.5))
    return moving


def rolling(rig: Rig, options: Options) -> None:
    """Restarts of all supervisors, all nodes and Envoy, one after the other."""
    with load(rig, options) as told:
        for host in GPUS:
            rig.supervisors[host].restart()
            settled(rig)
        none_lost(told, "supervisors")
        for node in ("a", "b", "c", "gw"):
            rig.nodes[node].restart()
            settled(rig)
        none_lost(told, "supervisors and nodes")
        for _ in range(2):
            rig.reload_gateway()
            time.sleep(1)
            settled(rig)
    none_lost(told, "supervisors, nodes and Envoy")


def overhead(rig: Rig, options: Options) -> None:
    """p50 direct and through Envoy, side by side; told, not judged."""
    host = rig.status()["models"]["echo"]["copies"][0]["host"]
    asked = options.times(3000, 1000)
    for kind, ask in (("HTTP", asks_http), ("gRPC", asks_grpc)):
        direct, gateway = ask(rig.address(host)), ask(rig.address("gw"))
        took: dict[str, list[float]] = {"direct": [], "through Envoy": []}
        for _ in range(asked):
            for name, one in (("direct", direct), ("through Envoy", gateway)):
                began = time.perf_counter()
                one()
                took[name].append(time.perf_counter() - began)
        medians = ", ".join(
            f"{statistics.median(times) * 1e6:.0f} us {name}" for name, times in took.items()
        )
        print(f"  {kind}, one connection: p50 {medians}", flush=True)


def asks_http(address: str) -> Callable[[], None]:
    connection = http.client.HTTPConnection(address, HTTP, timeout=10)
    body = json.dumps({"inputs": echo("echo", "FP32", 4).cases().inputs})

    def ask() -> None:
        connection.request("POST", "/v2/models/echo/infer", body)
        answer = connection.getresponse()
        assert answer.status == 200 and answer.read()

    return ask


def asks_grpc(address: str) -> Callable[[], None]:
    client = grpcclient.InferenceServerClient(f"{address}:{GRPC}")
    given = inputs(echo("echo", "FP32", 4).cases())
    return lambda: client.infer("echo", given)


ALL = {each.__name__: each for each in (up, moves, deaths, control, rolling, overhead)}
