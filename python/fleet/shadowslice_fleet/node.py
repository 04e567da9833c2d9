"""Runs Ray on a node. On the head, also runs the Fleet actor.

The process ends when Ray ends, and systemd restarts the process. A node therefore joins the head
again after the head was lost. If KubeRay runs Ray, `controller` starts the Fleet actor.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

import ray

from shadowslice_fleet import spec as specs
from shadowslice_fleet.fleet import Fleet
from shadowslice_fleet.hosts import HOST_RESOURCE, NAMESPACE

FLEET = "fleet"
GATEWAY_RESOURCE = "shadowslice_gateway"
HEAD_TIMEOUT = 60.0  # seconds from the start of Ray's head until it replies
CONNECT_TIMEOUT = 2.0
CHECK_INTERVAL = 2.0  # seconds between two checks of Ray and the Fleet actor
FLEET_TIMEOUT = 5.0  # seconds within which the Fleet actor must reply
FLEET_THREADS = 16  # the number of concurrent calls in the Fleet actor
OBJECT_STORE_BYTES = 80 << 20  # the minimum that Ray accepts, because observations are small
STOP_TIMEOUT = 20.0
# With these settings, Ray considers a node dead after 3 s. Other nodes exit 5 s after the head.
RAY_SETTINGS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_gcs_server_request_timeout_seconds": "5",
    # A stopping node has no work to finish, so it need not wait for the default of 30 s.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_enable_metrics_collection": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}
log = logging.getLogger(__name__)


class HeadFailed(Exception):
    """Ray's head or the Fleet actor does not reply."""


def join(address: str, own_address: str | None, temp_dir: Path) -> None:
    """Replaces this process with Ray, which joins the head at this address."""
    _remove_cluster_file(temp_dir)
    os.environ.update(RAY_SETTINGS)
    command = [*_start(own_address, {HOST_RESOURCE: 1}, temp_dir), f"--address={address}"]
    os.execv(command[0], command)


def head(port: int, own_address: str | None, host: bool, temp_dir: Path) -> int:
    """Runs Ray's head and the Fleet actor until Ray ends or SIGTERM arrives.

    Returns the exit code. Raises HeadFailed.
    """
    _remove_cluster_file(temp_dir)
    os.environ.update(RAY_SETTINGS)
    resources = {GATEWAY_RESOURCE: 1} | ({HOST_RESOURCE: 1} if host else {})
    command = [*_start(own_address, resources, temp_dir), "--head", f"--port={port}"]
    command += ["--include-dashboard=false", "--no-monitor"]
    ray_process = subprocess.Popen(command)

    def stop(_signal: int, _frame: FrameType | None) -> None:
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        _connect(f"{own_address or '127.0.0.1'}:{port}", ray_process)
        signal.signal(signal.SIGTERM, stop)  # Ray's handler would abort this process.
        while ray_process.poll() is None:
            _ensure_fleet()
            try:
                ray_process.wait(CHECK_INTERVAL)
            except subprocess.TimeoutExpired:
                continue
        return ray_process.returncode
    finally:
        ray.shutdown()  # Otherwise the client would report the end of Ray as a failure.
        _stop_ray(ray_process)


def controller(address: str, spec_file: Path | None) -> NoReturn:
    """Runs the Fleet actor in the Ray cluster at this address, and applies changes to the spec.

    Raises HeadFailed if the actor has not replied for `HEAD_TIMEOUT`.
    """
    _connect(address, None)
    applied: str | None = None
    answered = time.monotonic()
    while True:
        if _ensure_fleet():
            answered = time.monotonic()
            applied = _apply_spec(spec_file, applied) if spec_file else None
        elif time.monotonic() - answered > HEAD_TIMEOUT:
            raise HeadFailed(f"the Fleet actor has not replied for {HEAD_TIMEOUT:g} s")
        time.sleep(CHECK_INTERVAL)


def _apply_spec(file: Path, applied: str | None) -> str | None:
    """Applies the spec if the file has changed. Returns the last text, applied or faulty."""
    try:
        text = file.read_text()
        if text == applied:
            return applied
        document = specs.load(file).document
        ray.get(ray.get_actor(FLEET).apply_spec.remote(document), timeout=FLEET_TIMEOUT)
    except (OSError, UnicodeDecodeError) as error:
        log.error("cannot read the spec %s; trying again: %s", file, error)
        return applied
    except specs.SpecFaults as faults:
        log.error("the spec has faults, so the fleet keeps the previous spec: %s", faults)
    except (ray.exceptions.RayError, ValueError) as error:
        log.error("cannot send the spec %s to the Fleet actor; trying again: %s", file, error)
        return applied
    else:
        log.info("applied the spec %s", file)
    return text


def _remove_cluster_file(temp_dir: Path) -> None:
    """Removes the file that a killed head left, because Ray could not start with this file."""
    (temp_dir / "ray_current_cluster").unlink(missing_ok=True)


def _start(own_address: str | None, resources: dict[str, int], temp_dir: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        "--num-cpus=0",
        "--num-gpus=0",
        "--include-log-monitor=false",
        f"--temp-dir={temp_dir}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--disable-usage-stats",
        f"--resources={json.dumps(resources)}",
        *([f"--node-ip-address={own_address}"] if own_address else []),
    ]


def _connect(address: str, ray_process: subprocess.Popen[bytes] | None) -> None:
    deadline = time.monotonic() + HEAD_TIMEOUT
    while True:
        try:
            _check_reachable(address)
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
            return
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            ended = ray_process is not None and ray_process.poll() is not None
            if ended or time.monotonic() > deadline:
                why = f"Ray's head at {address} did not reply within {HEAD_TIMEOUT:g} s"
                raise HeadFailed(why) from error
        time.sleep(0.5)


def _check_reachable(address: str) -> None:
    """Checks that the head accepts connections. Without this check, Ray retries for 15 minutes.

    Raises OSError.
    """
    host, _, port = address.rpartition(":")
    if host:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()


def _ensure_fleet() -> bool:
    """Creates the Fleet actor if it does not exist. Returns whether the actor replies.

    Ray itself restarts the actor after most deaths.
    """
    try:
        actor = (
            ray.remote(Fleet)
            .options(
                name=FLEET,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                max_concurrency=FLEET_THREADS,
                num_cpus=0,
                resources={GATEWAY_RESOURCE: 0.001},
            )
            .remote()
        )
        ray.get(actor.status.remote(), timeout=FLEET_TIMEOUT)
        return True
    except ray.exceptions.GetTimeoutError:
        log.info("the Fleet actor has not replied yet; trying again")
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
        log.error("the Fleet actor cannot run; trying again: %s", error)
    return False


def _stop_ray(ray_process: subprocess.Popen[bytes]) -> None:
    ray_process.terminate()
    try:
        ray_process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        ray_process.kill()
        ray_process.wait()
