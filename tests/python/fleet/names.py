"""Tests gRPC calls with invalid model names."""

import grpc

from common import Options
from rig import GRPC, Rig

METADATA = "/inference.GRPCInferenceService/ModelMetadata"
SECONDS = 10.0
# The last two names are longer than the headers that a host accepts.
UNKNOWN = (b"", b"nobody", b"echo\r\nx: y", b"a\x7f", b"e" * 129, b"n" * (64 << 10), b"n" * 200_000)


def names(rig: Rig, _options: Options) -> None:
    """Checks that each invalid name results in NOT_FOUND and closes no connection to a host."""
    with grpc.insecure_channel(f"{rig.address('gw')}:{GRPC}") as channel:
        ask = channel.unary_unary(METADATA)
        for name in UNKNOWN:
            try:
                ask(message(name), timeout=SECONDS)
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.NOT_FOUND, (name[:20], error)
            else:
                raise AssertionError(f"a model has the name {name[:20]!r}")
        assert b"emulated" in ask(message(b"echo"), timeout=SECONDS)


def message(name: bytes) -> bytes:
    """Returns a Protobuf message whose field 1 contains the name."""
    size, left = b"", len(name)
    while left > 127:
        size, left = size + bytes([left & 127 | 128]), left >> 7
    return b"\x0a" + size + bytes([left]) + name
