"""The command line of `shadowslice-fleet`."""

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from shadowslice_fleet import report, settings
from shadowslice_fleet import spec as specs
from shadowslice_fleet.moves import CommandRefused
from shadowslice_fleet.persisted import StateFault
from shadowslice_fleet.placement import PlaceFailed

OK, REFUSED, USAGE, UNAVAILABLE, CONFIG, INTERRUPTED = 0, 1, 64, 69, 78, 130
REPLY_TIMEOUT = 20.0  # seconds within which the Fleet actor must reply
WAIT_TIMEOUT = 600.0  # seconds, the default of --within
POLL_INTERVAL = 0.5  # seconds
# By default, Ray tries for 15 minutes to reach a head that does not reply. These settings reduce
# this time to 15 s.
RAY_TIMEOUTS = {
    "RAY_NUM_REDIS_GET_RETRIES": "1",
    "RAY_py_gcs_connect_timeout_s": "3",
    "RAY_gcs_server_request_timeout_seconds": "5",
}


class NotInDesiredState(Exception):
    """The fleet is not in the desired state. The error's text names the difference."""


class NoFleet(Exception):
    """The Fleet actor does not reply."""


def main() -> None:
    """Runs the command that the command line gives, and exits with the command's exit code."""
    arguments = _parser().parse_args()
    arguments.out = _own_output()
    try:
        sys.exit(arguments.run(arguments))
    except (NotInDesiredState, PlaceFailed, CommandRefused, StateFault) as why:
        print(f"error: {why}", file=sys.stderr)
        sys.exit(REFUSED)
    except (specs.SpecFaults, settings.SettingsFault) as fault:
        print(f"error: {fault}", file=sys.stderr)
        sys.exit(CONFIG)
    except NoFleet as fault:
        print(f"error: {fault}", file=sys.stderr)
        sys.exit(UNAVAILABLE)
    except KeyboardInterrupt:
        print("note: the fleet continues the command without you; see `status`", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _own_output() -> TextIO:
    """Redirects standard output, to which Ray also writes, to stderr. Returns the original."""
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return own


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        self.print_usage(sys.stderr)
        print(f"error: {message}", file=sys.stderr)
        sys.exit(USAGE)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="shadowslice-fleet", description=sys.modules["shadowslice_fleet"].__doc__)
    parser.add_argument(
        "--ray", default="auto", metavar="HOST:PORT", help="Ray's head (default: this node's)"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Any:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    up = command("up", _up, "Serve exactly the models of a spec, and wait until they are ready")
    up.add_argument("spec", type=Path, metavar="SPEC.yaml")
    _bounded(up)
    plan = command("plan", _plan, "Show what `up` would change, without changing it")
    plan.add_argument("spec", type=Path, metavar="SPEC.yaml")
    status = command("status", _status, "Show copies, hosts, GPUs and differences from the spec")
    status.add_argument("--json", action="store_true", help="print JSON")
    move = command("move", _move, "Move a copy of a model to another host or GPU, and wait")
    move.add_argument("model", metavar="MODEL")
    move.add_argument(
        "to", metavar="HOST[:GPU]", help="the new host and GPU (default: the first usable GPU)"
    )
    move.add_argument(
        "--from",
        dest="source",
        metavar="HOST",
        help="the host that the copy leaves, if several have one",
    )
    _bounded(move)
    for name, text in (
        ("drain", "Move all models away from a host, and wait"),
        ("undrain", "Admit models to a host again"),
    ):
        host = command(name, _drain, text)
        host.add_argument("host", metavar="HOST")
        _bounded(host)
        host.set_defaults(drained=name == "drain")
    for name, method, text in (
        ("promote", "promote", "End the current step of a model's rollout on each host"),
        ("rollback", "roll_back", "Make the former version of a model answer all requests again"),
    ):
        rollout = command(name, _command_rollout, text)
        rollout.add_argument("model", metavar="MODEL")
        rollout.set_defaults(method=method)
    down = command("down", _down, "Remove all models from the fleet, and wait")
    _bounded(down)
    node = command("node", _node, "Run Ray on this node until it is stopped (for the node's unit)")
    part = node.add_mutually_exclusive_group(required=True)
    part.add_argument("--head", action="store_true", help="run the fleet's head")
    part.add_argument("--join", metavar="HOST:PORT", help="join the fleet with this head")
    node.add_argument("--port", type=int, default=6379, help="the head's port (%(default)s)")
    node.add_argument("--address", metavar="IP", help="this node's address")
    node.add_argument("--host", action="store_true", help="this head also runs a supervisor")
    node.add_argument(
        "--temp-dir",
        type=Path,
        default=Path("/tmp/ray"),
        metavar="FOLDER",
        help="Ray's folder for temporary files (%(default)s)",
    )
    _with_settings(node)
    controller = command(
        "controller", _controller, "Run the Fleet actor in a Ray cluster that KubeRay started"
    )
    controller.add_argument(
        "--wish",
        dest="spec",
        type=Path,
        metavar="SPEC.yaml",
        help="the spec, applied again after each change",
    )
    gateway = command("gateway", _gateway, "Run Envoy until it is stopped (for the gateway's unit)")
    _with_settings(gateway)
    return parser


def _with_settings(command: argparse.ArgumentParser) -> None:
    text = "the folder of host.yaml and gateway.yaml (%(default)s)"
    default = os.environ.get(settings.FOLDER_VARIABLE) or settings.FOLDER
    command.add_argument("--settings", type=Path, default=default, metavar="FOLDER", help=text)


def _bounded(command: argparse.ArgumentParser) -> None:
    text = "the time to wait, in s (%(default)g); the fleet continues afterwards"
    command.add_argument(
        "--within", type=_seconds, default=WAIT_TIMEOUT, metavar="SECONDS", help=text
    )


def _seconds(text: str) -> float:
    found = float(text)
    if not found >= 0:
        raise ValueError(text)
    return found


def _up(arguments: argparse.Namespace) -> int:
    spec = specs.load(arguments.spec)
    fleet = _Fleet(arguments.ray)
    fleet.call("apply_spec", spec.document)
    status = _wait_until_settled(fleet, arguments)
    current = status["models"]  # Another operator may have changed the spec since.
    missing = [
        name
        for name in spec.models
        if name not in current or not report.is_sufficient(current[name])
    ]
    rolled_back = [
        report.rollback_reason(name, current[name])
        for name in missing
        if name in current and current[name]["rolled_back"]
    ]
    if rolled_back:
        raise NotInDesiredState("; ".join(rolled_back))
    if missing:
        raise NotInDesiredState(
            f"these models are not in the desired state: {', '.join(missing)}; see `status`"
        )
    return OK


def _down(arguments: argparse.Namespace) -> int:
    fleet = _Fleet(arguments.ray)
    fleet.call("apply_spec", {"models": []})
    _wait_until_settled(fleet, arguments)
    return OK


def _wait_until_settled(fleet: "_Fleet", arguments: argparse.Namespace) -> report.Status:
    """Prints the status after each change until the fleet is settled.

    Raises NotInDesiredState if the fleet is not settled in time.
    """
    deadline, shown = time.monotonic() + arguments.within, ""
    while True:
        status: report.Status = fleet.call("status")
        now = "\n".join(report.lines(status))
        if now != shown:
            print(now, end="\n\n", flush=True, file=arguments.out)
            shown = now
        if status["settled"]:
            return status
        if time.monotonic() > deadline:
            raise NotInDesiredState(
                f"not in the desired state after {arguments.within:g} s; see `status`"
            )
        time.sleep(POLL_INTERVAL)


def _plan(arguments: argparse.Namespace) -> int:
    spec = specs.load(arguments.spec)
    changes = _Fleet(arguments.ray).call("plan", spec.document)
    print("\n".join(changes) or "no changes", file=arguments.out)
    return OK


def _status(arguments: argparse.Namespace) -> int:
    status = _Fleet(arguments.ray).call("status")
    text = json.dumps(status) if arguments.json else "\n".join(report.lines(status))
    print(text, file=arguments.out, flush=True)
    return OK


def _move(arguments: argparse.Namespace) -> int:
    host, _, gpu = arguments.to.partition(":")
    if gpu and not gpu.isdecimal():
        print(f"error: invalid GPU '{gpu}'; use for example HOST:0", file=sys.stderr)
        return USAGE
    fleet = _Fleet(arguments.ray)
    fleet.call("move", arguments.model, host, int(gpu) if gpu else None, arguments.source)
    status = _wait_until_settled(fleet, arguments)
    model = status["models"].get(arguments.model)
    if model is None:
        raise NotInDesiredState(f"model '{arguments.model}' is no longer in the spec")
    if host in model["failing"]:
        why = model["failures"][host]
        raise NotInDesiredState(f"model '{arguments.model}' did not move to {arguments.to}: {why}")
    return OK


def _drain(arguments: argparse.Namespace) -> int:
    fleet = _Fleet(arguments.ray)
    fleet.call("drain", arguments.host, arguments.drained)
    status = _wait_until_settled(fleet, arguments)
    host = status["hosts"].get(arguments.host)
    stay = host["models"] if host and host["answers"] else []
    if arguments.drained and stay:
        current = status["models"]
        why = "; ".join(
            f"{name}: {report.reason(current[name])}" for name in stay if name in current
        )
        raise NotInDesiredState(f"cannot drain host '{arguments.host}': {why}")
    return OK


def _command_rollout(arguments: argparse.Namespace) -> int:
    replies = _Fleet(arguments.ray).call(arguments.method, arguments.model)
    for host, reply in replies.items():
        print(f"{host}: {reply.text}", file=arguments.out, flush=True)
    return OK if all(reply.succeeded for reply in replies.values()) else REFUSED


def _node(arguments: argparse.Namespace) -> int:
    from shadowslice_fleet import node

    # The actors that Ray starts on this node read this variable.
    os.environ[settings.FOLDER_VARIABLE] = str(arguments.settings.absolute())
    if arguments.join:
        node.join(arguments.join, arguments.address, arguments.temp_dir)
    try:
        return node.head(arguments.port, arguments.address, arguments.host, arguments.temp_dir)
    except node.HeadFailed as failed:
        print(f"error: {failed}", file=sys.stderr)
        return UNAVAILABLE


def _controller(arguments: argparse.Namespace) -> int:
    from shadowslice_fleet import node

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        node.controller(arguments.ray, arguments.spec)
    except node.HeadFailed as failed:
        print(f"error: {failed}", file=sys.stderr)
    return UNAVAILABLE


def _gateway(arguments: argparse.Namespace) -> int:
    from shadowslice_fleet import gateway_process

    os.environ[settings.FOLDER_VARIABLE] = str(arguments.settings.absolute())
    try:
        return gateway_process.run(settings.gateway())
    except gateway_process.EnvoyMissing as missing:
        print(f"error: {missing}", file=sys.stderr)
        return UNAVAILABLE


class _Fleet:
    """A client of the Fleet actor. Every call has a timeout."""

    def __init__(self, address: str) -> None:
        """Connects to Ray. Raises NoFleet."""
        for variable, value in RAY_TIMEOUTS.items():
            os.environ.setdefault(variable, value)
        import ray

        from shadowslice_fleet.hosts import NAMESPACE
        from shadowslice_fleet.node import FLEET

        self.ray = ray
        try:
            ray.init(
                address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error"
            )
            self.actor = ray.get_actor(FLEET)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            why = f"cannot reach the fleet at {address}; start its head's unit ({error})"
            raise NoFleet(why) from error

    def call(self, method: str, *arguments: object) -> Any:
        """Calls a method of the actor. Raises NoFleet, and the actor's exceptions."""
        try:
            return self.ray.get(
                getattr(self.actor, method).remote(*arguments), timeout=REPLY_TIMEOUT
            )
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause or error from None
        except self.ray.exceptions.RayError as error:
            raise NoFleet(f"the Fleet actor does not reply; try again ({error})") from error


if __name__ == "__main__":
    main()
