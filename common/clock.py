"""A clock that stands still while its process does.

After a SIGSTOP, or a long pause of the machine, both sides read what has piled up before they judge who was silent.
No threads: one clock belongs to one loop, which reads it in every round.
"""

import time
from collections.abc import Callable


class AwakeClock:
    """Seconds during which this process was awake, from 0 at the start.

    max_gap_s: what the time between two readings counts at most; more means that the process was frozen. clock: gives
    monotonic seconds.
    """

    def __init__(self, max_gap_s: float, clock: Callable[[], float] = time.monotonic):
        self._max_gap_s = max_gap_s
        self._clock = clock
        self._read_s = clock()
        self._now = 0.0

    def read(self) -> float:
        """Return the time."""
        read_s = self._clock()
        self._now += min(read_s - self._read_s, self._max_gap_s)
        self._read_s = read_s
        return self._now
