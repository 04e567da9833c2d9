"""The worker, in Rust: worker/python."""

def serve(runner: object, user: int | None = None) -> int:
    """Serves until there is no more work; `runner` is a `Runner`. Returns the exit code."""

def enter_sandbox(writable: list[str]) -> None:
    """Raises a worker's walls around this process, which then writes to these folders alone."""
