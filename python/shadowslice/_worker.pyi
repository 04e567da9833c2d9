"""Types of the Rust extension module. Its source is in worker/python."""

def serve(runner: object, user: int | None = None) -> int:
    """Serves `runner`, a `Runner`, until the supervisor closes the socket.

    Returns the exit code.
    """

def enter_sandbox(writable: list[str]) -> None:
    """Enters a worker's sandbox. Afterwards this process can write only to these folders."""
