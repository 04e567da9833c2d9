"""Tests rollouts of new versions over the fleet, with requests through the gateway."""

import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from common import Options, need, settled, spec_models, up_all
from rig import GRPC, HTTP, Rig
from units import wait_until

# A version multiplies its input by `FACTOR`. A faulty version also reverses the outputs.
VERSION = """
import numpy as np
from shadowslice import Tensor

class Version:
    inputs = {{"x": Tensor("FP32", [-1, 4])}}
    outputs = {{"y": Tensor("FP32", [-1, 4])}}

    def infer(self, batch):
        y = batch["x"] * {factor}
        return {{"y": np.ascontiguousarray(y[:, ::-1]) if {faulty} else y}}
"""
CLIENTS = 4
WITHIN = 60.0  # seconds for one step of a rollout
MANUAL = {"mirror": "0%", "canary": ["10%"], "for": "manual"}
# The part of requests that the canary may answer in a sample of `SAMPLE` requests.
SAMPLE, LEAST, MOST = 1500, 0.06, 0.15


def rollouts(rig: Rig, options: Options) -> None:
    """Rolls versions out on one host and on two, by hand and automatically. Loses no request."""
    canary_through_the_gateway(rig, options)
    host_after_host(rig, options)
    faulty_version(rig, options)
    up_all(rig, options)


@dataclass
class Requests:
    """Clients of model `m`, which count the versions that answer. Outputs must fit the version."""

    rig: Rig
    counts: Counter[tuple[str, float]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Self:
        for at in range(CLIENTS):
            run = self._grpc if at % 2 else self._http
            self.threads.append(threading.Thread(target=run, args=(at,), daemon=True))
            self.threads[-1].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join(30)

    def factors(self) -> dict[float, int]:
        """Returns the number of answers by the factor of the version that gave them."""
        with self.lock:
            found: Counter[float] = Counter()
            for (_, factor), count in self.counts.items():
                found[factor] += count
            return dict(found)

    def sample(self) -> dict[float, float]:
        """Returns the fractions of the next `SAMPLE` answers by the version's factor."""
        before = self.factors()
        total = sum(before.values()) + SAMPLE
        wait_until(lambda: self.faults or sum(self.factors().values()) >= total, 120, "requests")
        now = self.factors()
        more = {factor: count - before.get(factor, 0) for factor, count in now.items()}
        answered = sum(more.values())
        return {factor: count / answered for factor, count in more.items() if count}

    def check(self, what: str) -> None:
        versions = Counter(
            {
                f"version {version}, factor {factor}": n
                for (version, factor), n in self.counts.items()
            }
        )
        total = sum(versions.values())
        print(
            f"  {what}: {total} requests, {len(self.faults)} failed, {dict(versions)}", flush=True
        )
        assert total and not self.faults, self.faults[:10]

    def _grpc(self, seed: int) -> None:
        client = grpcclient.InferenceServerClient(f"{self.rig.address('gw')}:{GRPC}")
        self._send(client, grpcclient, seed)

    def _http(self, seed: int) -> None:
        client = httpclient.InferenceServerClient(f"{self.rig.address('gw')}:{HTTP}")
        self._send(client, httpclient, seed)

    def _send(self, client: Any, kind: Any, seed: int) -> None:
        random = np.random.default_rng(seed)
        while not self.ended.is_set():
            x = random.uniform(1, 2, (1, 4)).astype(np.float32)
            try:
                answered = infer(client, kind, x)
                with self.lock:
                    self.counts[answered] += 1
            except Exception as error:
                with self.lock:
                    self.faults.append(f"{time.monotonic():.1f} {type(error).__name__}: {error}")
            time.sleep(0.002)
        client.close()


def infer(client: Any, kind: Any, x: np.ndarray, version: str = "") -> tuple[str, float]:
    """Returns the version in the response, and the factor by which the version multiplied."""
    given = kind.InferInput("x", list(x.shape), "FP32")
    given.set_data_from_numpy(x)
    response = client.infer("m", [given], model_version=version)
    factors = response.as_numpy("y") / x
    if np.ptp(factors) > 1e-3:
        raise ValueError(f"an output is wrong: {factors} times the input")
    found = response.get_response()
    number = found["model_version"] if isinstance(found, dict) else found.model_version
    return str(number), round(float(factors.mean()), 3)


def spec(rig: Rig, options: Options, version: str, copies: int, rollout: dict[str, Any]) -> str:
    """Writes a spec whose model `m` has the files of a version. Returns the spec's path."""
    model = {
        "name": "m",
        "files": str(rig.folder / "versions" / version),
        "path": "model.py",
        "engine": "python",
        "python": {"executable": sys.executable},
        "slo": "200ms",
        "batch": {"max": 8},
        "need": need(16),
        "copies": copies,
        "most": copies,
        "rollout": rollout,
    }
    return str(rig.write_spec([*spec_models(options), model], f"{version}.yaml"))


def write(rig: Rig, version: str, factor: float, faulty: bool = False) -> None:
    folder = rig.folder / "versions" / version
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(VERSION.format(factor=factor, faulty=faulty))


def copies(rig: Rig) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = rig.status()["models"]["m"]["copies"]
    return found


def phases(rig: Rig) -> list[str | None]:
    """Returns the phase of each copy's rollout."""
    return [each["rollout"] and each["rollout"]["phase"] for each in copies(rig)]


def wait_for(rig: Rig, *expected: str | None) -> None:
    try:
        wait_until(lambda: sorted(phases(rig), key=str) == sorted(expected, key=str), WITHIN, "")
    except TimeoutError as late:
        raise TimeoutError(f"{expected}: {rig.status()['models']['m']}") from late


def canary_through_the_gateway(rig: Rig, options: Options) -> None:
    """Goes through KServe's canary flow with one copy: 10 %, 100 %, and back to 0 %."""
    write(rig, "v1", 2.0)
    write(rig, "v2", 3.0)
    rig.cli("up", spec(rig, options, "v1", 1, MANUAL), "--within", "60")
    with Requests(rig) as requests:
        assert requests.sample().keys() == {2.0}
        up = rig.cli_in_background("up", spec(rig, options, "v2", 1, MANUAL), "--within", "120")
        wait_for(rig, "canary")
        time.sleep(1)
        parts = requests.sample()
        print(f"  canary 10%: {parts}", flush=True)
        assert LEAST < parts[3.0] < MOST and parts[2.0] + parts[3.0] == 1, parts
        assert "canary 10%" in rig.cli("status").stdout
        explicit_versions(rig)
        print(f"  {rig.cli('promote', 'm').stdout.strip()}", flush=True)
        wait_for(rig, "released")
        assert up.wait(60) == 0, up.communicate()
        time.sleep(0.5)
        assert requests.sample().keys() == {3.0}
        print(f"  {rig.cli('rollback', 'm').stdout.strip()}", flush=True)
        wait_for(rig, "rolled_back")
        time.sleep(0.5)
        assert requests.sample().keys() == {2.0}
        status = rig.status()["models"]["m"]
        assert status["rolled_back"] and not copies(rig)[0]["as_wished"], status
        done = rig.cli("rollback", "m", check=False)
        assert done.returncode == 1 and "no rollout" in done.stderr, done
        again = rig.cli("up", spec(rig, options, "v2", 1, MANUAL), "--within", "60", check=False)
        assert again.returncode == 1 and "rolled the new version" in again.stderr, again
    requests.check("a canary by hand, promoted and rolled back")


def explicit_versions(rig: Rig) -> None:
    """Sends requests with a version over both protocols, while two versions are loaded."""
    x = np.ones((1, 4), np.float32)
    for client, kind in (
        (httpclient.InferenceServerClient(f"{rig.address('gw')}:{HTTP}"), httpclient),
        (grpcclient.InferenceServerClient(f"{rig.address('gw')}:{GRPC}"), grpcclient),
    ):
        for version, factor in (("1", 2.0), ("2", 3.0)):
            for _ in range(20):
                assert infer(client, kind, x, version) == (version, factor)
            assert client.is_model_ready("m", version)
            assert client.get_model_metadata("m", version)
        client.close()


def host_after_host(rig: Rig, options: Options) -> None:
    """Rolls a version out on two hosts. The second begins when the first has released it."""
    write(rig, "v3", 4.0)
    write(rig, "v4", 5.0)
    rig.cli("down")
    rig.cli("up", spec(rig, options, "v3", 2, MANUAL), "--within", "60")
    with Requests(rig) as requests:
        up = rig.cli_in_background("up", spec(rig, options, "v4", 2, MANUAL), "--within", "120")
        wait_for(rig, None, "canary")
        time.sleep(2)
        assert sorted(phases(rig), key=str) == sorted([None, "canary"], key=str)
        assert any(each["held"] for each in copies(rig)), copies(rig)
        parts = requests.sample()
        print(f"  canary on one of two hosts: {parts}", flush=True)
        rig.cli("promote", "m")
        wait_for(rig, "released", "canary")
        assert requests.sample().keys() == {4.0, 5.0}
        rig.cli("promote", "m")
        wait_for(rig, "released", "released")
        assert up.wait(60) == 0, up.communicate()
        assert requests.sample().keys() == {5.0}
        out = rig.cli("promote", "m").stdout
        assert len(out.splitlines()) == 2, out
        wait_for(rig, "completed", "completed")
        assert rig.status()["settled"]
    requests.check("a rollout on two hosts")


def faulty_version(rig: Rig, options: Options) -> None:
    """Rolls out a version with wrong answers. The fleet must stop after the first host."""
    write(rig, "v5", 5.0, faulty=True)
    rollout = {"mirror": "50%", "for": "2s", "keep": "1s"}
    with Requests(rig) as requests:
        done = rig.cli("up", spec(rig, options, "v5", 2, rollout), "--within", "90", check=False)
        assert done.returncode == 1 and "answers differ" in done.stderr, done
        status = rig.status()["models"]["m"]
        assert len(status["rolled_back"]) == 1, status
        assert [bool(each["held"]) for each in status["copies"]].count(True) == 1, status
        # After a restart, the host still serves the former version, and the fleet still shows it.
        rig.supervisors[next(iter(status["rolled_back"]))].restart()
        settled(rig)
        requests.sample()
        after = rig.status()["models"]["m"]
        assert after["rolled_back"].keys() == status["rolled_back"].keys(), after
        print(f"  after a restart: {after['rolled_back']}", flush=True)
        # A new copy starts with the version that is released.
        host = next(each["host"] for each in status["copies"] if each["held"])
        rig.cli("drain", host, "--within", "60")
        requests.sample()
        rig.cli("undrain", host)
        # A good version replaces both.
        write(rig, "v6", 5.0)
        rig.cli("up", spec(rig, options, "v6", 2, rollout), "--within", "90")
        assert not rig.status()["models"]["m"]["rolled_back"]
    requests.check("a faulty version on the first of two hosts, and a good one on both")
