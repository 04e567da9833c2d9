"""Tests that an overloaded model gets another copy, which is removed after the overload."""

import http.client
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from common import Options, check_none_lost, emulated, settled, spec_models, up_all
from load import Load, echo
from rig import GRPC, HTTP, Rig
from units import kill, wait_until

SLO = 0.1  # seconds
# A batch of 4 requests takes 26 ms on any number of SMs, so a copy can serve 154 requests/s.
PROFILE = {
    "source": {"kind": "illustrative"},
    "memory": {"weights": "1Gi"},
    "execution_ms": {"sms": [8, 132], "1": [20, 20], "2": [22, 22], "4": [26, 26]},
}
MUCH, LITTLE = 220.0, 40.0  # requests/s
CLIENTS = 64
GROWN_WITHIN = 60.0  # seconds
# A supervisor's statistics cover two minutes, so a copy is removed only after that time.
BACK_WITHIN = 180.0
WATCHED = 8.0


@dataclass
class Paced:
    """An open-loop load at a fixed rate, with at most CLIENTS requests in flight."""

    rig: Rig
    rate: float
    answers: list[tuple[float, int, float]] = field(default_factory=list)  # time, status, seconds
    sent: int = 0
    began: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.began = time.monotonic()
        for _ in range(CLIENTS):
            self.threads.append(threading.Thread(target=self._ask, daemon=True))
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
            thread.join(10)

    def statuses(self) -> Counter[int]:
        return Counter(status for _, status, _ in self.answers)

    def in_time(self, seconds: float) -> float:
        """Returns the fraction of the requests in the last `seconds` that met the SLO."""
        since = time.monotonic() - seconds
        recent = [(status, took) for at, status, took in list(self.answers) if at > since]
        return sum(status == 200 and took <= SLO for status, took in recent) / max(1, len(recent))

    def _ask(self) -> None:
        connection = http.client.HTTPConnection(self.rig.address("gw"), HTTP, timeout=10)
        body = json.dumps({"inputs": echo("hot", "FP32", 4).cases().inputs})
        while True:
            with self.lock:
                due = self.began + self.sent / self.rate
                self.sent += 1
            if self.ended.wait(max(0.0, due - time.monotonic())):
                connection.close()
                return
            began = time.monotonic()
            try:
                connection.request("POST", "/v2/models/hot/infer", body)
                answer = connection.getresponse()
                answer.read()
                status = answer.status
            except (OSError, http.client.HTTPException):
                connection.close()
                status = 0
            self.answers.append((began, status, time.monotonic() - began))


def scale(rig: Rig, options: Options) -> None:
    """Checks that overload adds a copy until the overload ends, and that no request is lost."""
    hot = emulated(
        "hot", "FP32", 4, copies=1, most=2, profile=PROFILE, slo="100ms", batch={"max": 4}
    )
    rig.cli("up", str(rig.write_spec([*spec_models(options), hot])), "--within", "60")
    with Load(rig.address("gw"), HTTP, GRPC, [echo("echo", "FP32", 4)]) as others:
        with Paced(rig, MUCH) as much:
            took = wait_until(lambda: copies(rig) == 2, GROWN_WITHIN, "a copy more")
            before = much.in_time(WATCHED)
            settled(rig)
            time.sleep(WATCHED)
            after = much.in_time(WATCHED)
            kill_fleet(rig)
        check_all_answered(
            much, f"a copy more after {took:.0f} s, {before:.1%} then {after:.1%} in time"
        )
        assert before < 0.9 < after, (before, after)
        assert model(rig)["extra"] == 1
        with Paced(rig, LITTLE) as little:
            took = wait_until(lambda: copies(rig) == 1, BACK_WITHIN, "a copy less")
            settled(rig)
        check_all_answered(
            little, f"a copy less after {took:.0f} s, {little.in_time(WATCHED):.1%} in time"
        )
        assert little.statuses().keys() == {200}, little.statuses()
    check_none_lost(others, "of another model")
    up_all(rig, options)


def kill_fleet(rig: Rig) -> None:
    """Kills the Fleet actor, and checks that the restarted actor keeps the extra copy."""
    pid = rig.nodes["gw"].pid_of("ray::Fleet")
    assert pid, "no Fleet actor runs"
    kill(pid)
    settled(rig)
    assert copies(rig) == 2


def model(rig: Rig) -> dict[str, Any]:
    found: dict[str, Any] = rig.status()["models"]["hot"]
    return found


def copies(rig: Rig) -> int:
    """Returns the number of copies that serve requests."""
    return int(model(rig)["served"])


def check_all_answered(paced: Paced, what: str) -> None:
    """Checks that each request got a response, which has the status 200 or 503."""
    summary = ", ".join(f"{count} of {status}" for status, count in paced.statuses().items())
    print(f"  {what}: {summary}", flush=True)
    assert paced.statuses().keys() <= {200, 503}, paced.statuses()
