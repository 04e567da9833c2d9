"""What copies take and are offered, as their supervisors say; over the last minute or two. Pure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowslice_fleet.spec import Document

if TYPE_CHECKING:
    from shadowslice_fleet.loop_state import Placement
    from shadowslice_fleet.observed import ObservedHost

MIN_SMS = 8  # of a copy whose batches were not seen yet, as the supervisor has it


@dataclass(frozen=True)
class Load:
    sms: int | None  # the fewest for the SLO at this rate; None: not known, or no GPU has as many
    overloaded: bool  # more is offered than one copy serves
    rate: float  # rows offered each second
    busy: float  # the part of the time for which it executes on `sms`, 0 to 1
    memory_mib: int  # with weights; 0 where the driver does not say
    shadow_mib: int
    bandwidth: float  # the part of the GPU's, 0 to 1
    attainment: float | None  # None: it takes no requests
    objective: float  # the part that is to be in time
    slack: float | None


def read(model: Document) -> Load:
    """From an entry of `models` in `shadowslice status --json`."""
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
    """SMs of a GPU that has `whole` ones."""
    if load.sms is None:
        return total if load.overloaded else min(MIN_SMS, total)
    return load.sms


def copy_loads(
    name: str, placement: "Placement", hosts: "dict[str, ObservedHost]"
) -> "dict[str, Load]":
    """Of a model's copies in their places, by host."""
    copies = {
        slot.host: hosts[slot.host].copies.get(name)
        for slot in placement.get(name, ())
        if slot.host in hosts
    }
    return {host: copy.load for host, copy in copies.items() if copy and copy.load}


def offered_rate(name: str, placement: "Placement", hosts: "dict[str, ObservedHost]") -> float:
    """Rows a second to all copies together."""
    return sum(load.rate for load in copy_loads(name, placement, hosts).values())


def violates_slo(loads: list[Load]) -> bool:
    """Whether fewer of a model's requests are in time than should be, all copies together."""
    known = [(load.rate, load.attainment) for load in loads if load.attainment is not None]
    rate = sum(each for each, _ in known)
    in_time = sum(each * attainment for each, attainment in known)
    return rate > 0 and in_time < rate * max(load.objective for load in loads)
