"""What long work on models says while it runs: one value, one callback, and the lines that come of it.

Nothing here reads a clock or prints: who shows progress brings the time and the place.
"""

from collections.abc import Callable
from dataclasses import dataclass

LINE_INTERVAL_S = 4.0


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
        done = min(self.done, self.total)
        return f"{self.message}: {done / 1e6:.0f} of {self.total / 1e6:.0f} MB ({100 * done // self.total}%)"


Report = Callable[[Progress], None]
"""Called from the thread that does the work, often; it must be quick and must not raise."""


class ProgressLines:
    """Chooses the lines worth a place in a log: every new stage or message, else one each LINE_INTERVAL_S.

    Times are seconds of any one clock.
    """

    def __init__(self) -> None:
        self._latest: Progress | None = None
        self._since_s = 0.0
        self._line_at_s = 0.0

    def take(self, progress: Progress, now_s: float) -> str | None:
        """Return the line to write for a report, or None for none."""
        previous, self._latest = self._latest, progress
        if previous is None or (previous.stage, previous.message) != (progress.stage, progress.message):
            self._since_s = now_s
        elif now_s < self._line_at_s + LINE_INTERVAL_S:
            return None
        self._line_at_s = now_s
        return str(progress)

    def still(self, now_s: float) -> str | None:
        """Return the line that says what goes on, when nothing was written for LINE_INTERVAL_S; else None."""
        if self._latest is None or now_s < self._line_at_s + LINE_INTERVAL_S:
            return None
        self._line_at_s = now_s
        return f"{self._latest} — {now_s - self._since_s:.0f} s so far"
