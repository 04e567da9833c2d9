"""Tests hosts that die and network links that are cut, under load."""

import time

from common import Options, check_none_lost, load, settled
from load import echo
from rig import GPUS, Rig
from units import wait_until

# The maximum latency of a request, in seconds, when a host dies and when a link is cut. If a link
# is cut while the host has a request, TCP keepalive detects that after 2 s at the earliest.
LONGEST, LONGEST_CUT = 2.0, 2.5
BACK_WITHIN = 5.0  # seconds from a host's death until its copies load on other hosts
# These clients keep requests in flight to all live copies. A dead copy has no requests in flight.
# If Envoy still used this copy, it would get the next requests as the least loaded copy.
BUSY = [echo("paced", "FP32", 16)] * 8
LOAD_TIME = 10.0  # seconds to load these models while the machine is busy with tests


def deaths(rig: Rig, options: Options) -> None:
    """Kills a host or cuts its link, repeatedly. Chooses the host that was hit longest ago."""
    hit, deaths = dict.fromkeys(GPUS, 0), options.times(2, 6, 18)
    for at in range(deaths):
        host = min(with_copies(rig), key=lambda host: hit[host])
        hit[host] = at + 1
        death(rig, options, host, cut=rig.network.links and at % 2 == 1)
    assert deaths < 6 or all(hit.values()), f"not every host was hit: {hit}"


def with_copies(rig: Rig) -> set[str]:
    return {copy["host"] for model in rig.status()["models"].values() for copy in model["copies"]}


def death(rig: Rig, options: Options, host: str, cut: bool) -> None:
    with load(rig, options, more=BUSY) as clients:
        time.sleep(1)
        if cut:
            rig.network.link(host, up=False)
        else:
            rig.supervisors[host].wanted = rig.nodes[host].wanted = False
            rig.kill_host(host)
        back = wait_until(lambda: restored(rig, host), BACK_WITHIN + LOAD_TIME, "copies are back")
        time.sleep(1)
        if cut:
            rig.network.link(host, up=True)
        else:
            rig.supervisors[host].start()
            rig.nodes[host].start()
        table = settled(rig)
    what = f"{'link of' if cut else 'kill -9 of'} {host}"
    check_none_lost(clients, f"{what}, copies back after {back:.1f} s, table after {table:.0f} s")
    bound = LONGEST_CUT if cut else LONGEST
    assert clients.longest() < bound, f"{clients.longest():.2f} s"


def restored(rig: Rig, without: str) -> bool:
    """Checks that each model has two ready copies on hosts other than `without`."""
    found = [
        model["name"]
        for host in GPUS
        if host != without
        for model in rig.supervisor_status(host)["models"]
        if model["state"] == "ready"
    ]
    return len(found) >= 14 and all(found.count(name) == 2 for name in found)
