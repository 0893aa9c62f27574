"""What long work on models says while it runs: one value, one callback."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one stage is.

    `stage` is a word such as "download", "join", "convert"; `done` and `total` are bytes (total 0: not known);
    `message` is one line for people.
    """

    stage: str
    done: int
    total: int
    message: str

    def __str__(self) -> str:
        if self.total <= 0:
            return self.message
        return f"{self.message} ({min(100, 100 * self.done // self.total)}%)"


Report = Callable[[Progress], None]
"""Called from the thread that does the work, often; it must be quick and must not raise."""
