"""The worker, in Rust: worker/python."""

def serve(runner: object, user: int | None = None) -> int:
    """Serves until the supervisor closes the socket; `runner` is a `Runner`. Returns the exit code."""

def enter_sandbox(writable: list[str]) -> None:
    """Enters a worker's sandbox. Afterwards this process writes to these folders only."""
