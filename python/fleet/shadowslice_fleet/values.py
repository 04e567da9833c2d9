"""Parses values in the fleet's files. The formats are those of the supervisor's files."""

import re

SIZES = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
DURATIONS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
MIB = 1 << 20


class ValueFault(ValueError):
    """A value is invalid. The error's text names the valid values."""


def size_mib(value: object) -> int:
    """Parses a size such as `4Gi`. Returns it in MiB, rounded up."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)(Ki|Mi|Gi|Ti|)", str(value))
    if isinstance(value, bool) or not found:
        raise ValueFault(f"invalid size {value!r}; use for example 400Mi or 1.5Gi")
    size = float(found[1]) * SIZES[found[2]]
    return -int(-size // MIB)


def duration_s(value: object) -> float:
    """Parses a duration such as `20ms`. Returns it in seconds."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)(h|ms|us|ns|m|s)", str(value))
    if not found:
        raise ValueFault(f"invalid duration {value!r}; use for example 20ms or 20s")
    return float(found[1]) * DURATIONS[found[2]]


def integer(value: object, minimum: int, maximum: int) -> int:
    """Returns the value if it is an integer from `minimum` to `maximum`. Raises ValueFault."""
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ValueFault(f"{value!r} is not an integer from {minimum} to {maximum}")
    return value


def number(value: object, minimum: float, maximum: float) -> float:
    """Returns the value if it is a number from `minimum` to `maximum`. Raises ValueFault."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not minimum <= value <= maximum
    ):
        raise ValueFault(f"{value!r} is not a number from {minimum} to {maximum}")
    return float(value)


def boolean(value: object) -> bool:
    """Returns the value if it is true or false. Raises ValueFault."""
    if not isinstance(value, bool):
        raise ValueFault(f"{value!r} is not true or false")
    return value


def text(value: object) -> str:
    """Returns the value if it is a string that is not empty. Raises ValueFault."""
    if not isinstance(value, str) or not value:
        raise ValueFault(f"{value!r} is not a string, or is empty; put it in quotes")
    return value
