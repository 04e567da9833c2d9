"""How values are written in the fleet's files: sizes and durations, as in the supervisor's."""

import re

SIZES = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
DURATIONS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
MIB = 1 << 20


class ValueFault(ValueError):
    """A value that is not written as it must be; the text says how."""


def size_mib(value: object) -> int:
    """A size such as `4Gi`, in MiB, rounded up."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)(Ki|Mi|Gi|Ti|)", str(value))
    if isinstance(value, bool) or not found:
        raise ValueFault(f"{value!r} is no size; write 400Mi or 1.5Gi, say")
    size = float(found[1]) * SIZES[found[2]]
    return -int(-size // MIB)


def duration_s(value: object) -> float:
    """A duration such as `20ms`, in seconds."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)(h|ms|us|ns|m|s)", str(value))
    if not found:
        raise ValueFault(f"{value!r} is no duration; write 20ms or 20s, say")
    return float(found[1]) * DURATIONS[found[2]]


def integer(value: object, minimum: int, maximum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ValueFault(f"{value!r} is no whole number from {minimum} to {maximum}")
    return value


def number(value: object, minimum: float, maximum: float) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not minimum <= value <= maximum
    ):
        raise ValueFault(f"{value!r} is no number from {minimum} to {maximum}")
    return float(value)


def boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueFault(f"{value!r} is neither true nor false")
    return value


def text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueFault(f"{value!r} is no text")
    return value
