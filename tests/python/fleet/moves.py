"""Tests moves, changes and drains under load."""

import statistics
import time

from common import Options, check_none_lost, emulated, load, need, random_move, spec_models, up_all
from load import echo
from rig import GPUS, Rig


def moves(rig: Rig, options: Options) -> None:
    """Checks that moves lose no request, and that the old copy keeps serving if a move fails."""
    single = emulated("single", "FP32", 8, copies=1, need=need(8))
    rig.cli("up", str(rig.write_spec([*spec_models(options), single])), "--within", "60")
    moved, took = 0, []
    with load(rig, options, streams=True, more=[echo("single", "FP32", 8)]) as clients:
        while moved < options.times(16, 100, 100):
            began = time.monotonic()
            moved += many_moves(rig)
            took.append(time.monotonic() - began)
    check_none_lost(
        clients, f"{moved} moves, of all models at once in {statistics.median(took):.1f} s"
    )
    changed_spec(rig, options)
    aborted_move(rig, options)
    drained_host(rig, options)


def many_moves(rig: Rig) -> int:
    """Moves one copy of each model at the same time."""
    status = rig.status()
    requested = [random_move(status, name) for name in status["models"]]
    rig.cli_at_once(
        [["move", model, to, "--from", source, "--within", "60"] for model, to, source in requested]
    )
    after = rig.status()["models"]
    for model, to, _ in requested:
        table = [f"{copy['host']}:{copy['gpu']}" for copy in after[model]["copies"]]
        assert to in table, (model, to, table)
    return len(requested)


def changed_spec(rig: Rig, options: Options) -> None:
    """Applies a spec that replaces one model and changes another model in place."""
    models = spec_models(options)
    models[0] |= {"batch": {"max": 4}}
    models[1] |= {"slo": "300ms"}
    with load(rig, options, streams=True) as clients:
        rig.cli("up", str(rig.write_spec(models)), "--within", "60")
        time.sleep(1)
    check_none_lost(clients, "a changed spec")
    slos = {
        model["name"]: model["slo"]["latency_ms"]
        for host in GPUS
        for model in rig.supervisor_status(host)["models"]
    }
    assert slos["wide"] == 300 and "single" not in slos, slos
    up_all(rig, options)


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
    with load(rig, options) as clients:
        source = min(copies)
        done = rig.cli("move", "digits", target, "--from", source, "--within", "60", check=False)
        assert done.returncode == 1 and "did not move" in done.stderr, done
        time.sleep(1)
    check_none_lost(clients, f"an aborted move ({done.stderr.strip()[:150]})")
    assert {copy["host"] for copy in rig.status()["models"]["digits"]["copies"]} == copies
    (fetched / key / "digits.onnx").unlink()
    (fetched / key).rmdir()


def drained_host(rig: Rig, options: Options) -> None:
    """Drains a host, and then allows models on the host again."""
    host = max(GPUS, key=lambda host: len(rig.status()["hosts"][host]["models"]))
    with load(rig, options, streams=True) as clients:
        began = time.monotonic()
        rig.cli("drain", host, "--within", "90")
        took = time.monotonic() - began
        assert not rig.supervisor_status(host)["models"]
    check_none_lost(clients, f"a drained host, after {took:.0f} s")
    rig.cli("undrain", host)
