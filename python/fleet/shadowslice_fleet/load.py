"""The load of copies over the last one or two minutes, as their supervisors report it.

This module does no I/O.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowslice_fleet.spec import Document

if TYPE_CHECKING:
    from shadowslice_fleet.loop_state import Placement
    from shadowslice_fleet.observed import ObservedHost

MIN_SMS = 8  # the assumed need of a copy that ran no batch; equals the supervisor's value


@dataclass(frozen=True)
class Load:
    """The load of one copy."""

    sms: int | None  # the minimum that meets the SLO; None: unknown or above a whole GPU
    overloaded: bool  # the rate exceeds the capacity of one copy
    rate: float  # rows per second that are offered to the copy
    busy: float  # the fraction of the time in which the copy would execute on `sms` SMs
    memory_mib: int  # with weights; 0 if the driver does not report the memory
    shadow_mib: int
    bandwidth: float  # the required fraction of the GPU's memory bandwidth
    attainment: float | None  # None if no requests arrive
    objective: float  # the fraction of requests that must meet the SLO
    slack: float | None


def read(model: Document) -> Load:
    """Reads the load from an entry of `models` in `shadowslice status --json`."""
    need, slo = model["need"], model["slo"]
    return Load(
        sms=need["sms"],
        overloaded=need["most"] is not None,
        rate=need["rate"],
        busy=need["busy"] or 0.0,
        memory_mib=need["memory_mib"] or 0,
        shadow_mib=need["shadow_mib"] or 0,
        bandwidth=need["bandwidth"],
        attainment=slo["attainment"],
        objective=slo["percentile"] / 100,
        slack=slo["slack"],
    )


def sms_needed(load: Load, total: int) -> int:
    """Returns the number of SMs that a copy needs on a GPU with `total` SMs."""
    if load.sms is None:
        return total if load.overloaded else min(MIN_SMS, total)
    return load.sms


def copy_loads(
    name: str, placement: "Placement", hosts: "dict[str, ObservedHost]"
) -> "dict[str, Load]":
    """Returns the loads of a model's copies in their slots, by host."""
    copies = {
        slot.host: hosts[slot.host].copies.get(name)
        for slot in placement.get(name, ())
        if slot.host in hosts
    }
    return {host: copy.load for host, copy in copies.items() if copy and copy.load}


def offered_rate(name: str, placement: "Placement", hosts: "dict[str, ObservedHost]") -> float:
    """Returns the rows per second that are offered to all copies together."""
    return sum(load.rate for load in copy_loads(name, placement, hosts).values())


def violates_slo(loads: list[Load]) -> bool:
    """Checks whether a model violates its SLO, counting the requests of all copies."""
    known = [(load.rate, load.attainment) for load in loads if load.attainment is not None]
    rate = sum(each for each, _ in known)
    in_time = sum(each * attainment for each, attainment in known)
    return rate > 0 and in_time < rate * max(load.objective for load in loads)
