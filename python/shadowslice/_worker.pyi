"""Types of the extension module in Rust, whose source is worker/python."""

def serve(runner: object, user: int | None = None) -> int:
    """Serves `runner`, a `Runner`, until the supervisor closes the socket.

    Returns the exit code.
    """

def enter_sandbox(writable: list[str]) -> None:
    """Enters a worker's sandbox: from then on this process can write to these folders only."""
