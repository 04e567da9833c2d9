"""Tests the start of a fleet."""

import re
import time
import urllib.request

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from common import Options, check_none_lost, emulated, load, need, spec_models, up_all
from rig import GRPC, HTTP, Rig


def up(rig: Rig, options: Options) -> None:
    """Starts seven models. Checks that `up` reports all faults and `plan` changes nothing."""
    faulty = rig.write_spec(
        [{"name": "a b", "gpu": 1}, {"name": "x", "copies": 0, "slo": "1ms", "need": {}}],
        "bad.yaml",
    )
    done = rig.cli("up", str(faulty), check=False)
    assert done.returncode == 78, done
    for part in ("models[0].name:", "models[0].gpu:", "models[1].copies:", "models[1].need:"):
        assert part in done.stderr, done.stderr
    spec = rig.write_spec(
        [*spec_models(options), emulated("planned", "FP32", 2, need=need(16))], "plan.yaml"
    )
    planned = rig.cli("plan", str(spec)).stdout
    assert "planned: added on" in planned and "planned" not in rig.status()["models"], planned
    status = rig.status()
    assert status["settled"] and all(model["served"] == 2 for model in status["models"].values()), (
        status
    )
    with load(rig, options, streams=True) as clients:
        time.sleep(2)
    check_none_lost(clients, "models through one address")
    large_requests(rig)
    refused_loads(rig)
    url = f"http://{rig.address('gw')}:{HTTP}/v2/models"
    with urllib.request.urlopen(f"{url}/e%63ho/ready") as answer:
        assert answer.status == 200
    broken_models(rig, options)
    up_all(rig, options)


def broken_models(rig: Rig, options: Options) -> None:
    """Applies faulty models. The status must show the reasons. Other models must serve."""
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
    spec = rig.write_spec([*spec_models(options), *models.values()])
    with load(rig, options) as clients:
        done = rig.cli("up", str(spec), "--within", "30", check=False)
    check_none_lost(clients, "models that cannot be served")
    assert done.returncode == 1, done
    for line in ("faulty on [abc]: tensors: ", "fails on [abc]: ", "changed on [abc]: .* digest"):
        assert re.search(line, done.stdout), (line, done.stdout)


def refused_loads(rig: Rig) -> None:
    for client in (
        httpclient.InferenceServerClient(f"{rig.address('gw')}:{HTTP}"),
        grpcclient.InferenceServerClient(f"{rig.address('gw')}:{GRPC}"),
    ):
        for ask in (client.load_model, client.unload_model):
            try:
                ask("echo")
            except InferenceServerException as refused:
                assert str(refused.status()) in ("403", "StatusCode.PERMISSION_DENIED"), refused
            else:
                raise AssertionError("a load by a client was not refused")
        assert client.is_model_ready("echo") and not client.is_model_ready("unknown")


def large_requests(rig: Rig) -> None:
    """Sends requests of 40 MB over both protocols. Envoy's default buffers are smaller."""
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
