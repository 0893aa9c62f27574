"""When a dead child process is started again: a pure rule over exit codes and times, with no clock of its own."""

from dataclasses import dataclass

EXIT_CONFIG = 2
"""Exit code of a process that cannot run as it is configured or find its model; starting it again would not help."""


@dataclass
class RestartPolicy:
    """Back-off for one child: `first_delay_s`, doubling up to `max_delay_s`, from the start after a healthy while.

    A child that dies `max_false_starts` times without ever having been ready is given up: it will not get better.
    """

    first_delay_s: float = 1.0
    max_delay_s: float = 30.0
    max_false_starts: int = 3
    _delay_s: float = 0.0
    _false_starts: int = 0
    _ever_ready: bool = False

    def died(self, exit_code: int, ready_for_s: float) -> float | None:
        """Note a death and return the seconds to wait before the next start, or None to give up.

        `ready_for_s` is how long the child had been ready, 0 if it never was.
        """
        if exit_code == EXIT_CONFIG:
            return None
        if ready_for_s > 0:
            self._ever_ready = True
        self._false_starts += 1
        if not self._ever_ready and self._false_starts >= self.max_false_starts:
            return None
        healthy = ready_for_s >= self.max_delay_s
        self._delay_s = self.first_delay_s if healthy or not self._delay_s else 2 * self._delay_s
        self._delay_s = min(self._delay_s, self.max_delay_s)
        return self._delay_s
