"""Keep child processes running until told to stop, then end them in order.

Owns the signals and the restarts. One thread, one loop: it sleeps in sigtimedwait, so that a signal and a child's
death both wake it and no handler ever runs in between. Never reads what the children write.
"""

import logging
import signal
import time
from collections.abc import Sequence
from typing import Protocol

from cli.child import Child
from cli.restart import EXIT_CONFIG

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PROBE_INTERVAL_S = 0.2
PROBES_IN_A_ROW = 3
"""One answer is one web process's; another may learn a heartbeat later that the worker is there."""
IDLE_INTERVAL_S = 5.0


class Service(Protocol):
    """What the children make up together, seen from outside."""

    def ready(self) -> bool:
        """Return, in bounded time, whether all of it works."""

    def announce(self) -> None:
        """Tell the user; called each time it has become ready."""

    def close(self) -> None:
        """Take nothing new; called once, before the children are stopped."""


class Supervisor:
    """Starts `children`, restarts the ones that die, and at the end stops them one after another, in their order.

    `settle_s` is how long after a restart the service may still take the dead child for alive.
    """

    def __init__(self, children: Sequence[Child], service: Service, settle_s: float = 0.0):
        self._children = children
        self._service = service
        self._settle_s = settle_s
        self._probe_from_s = 0.0
        self._good_probes = 0
        self._ready = False
        self._hurry = False
        # Under nohup SIGHUP is ignored, and waiting for it would undo that. SIGINT is ignored in a shell script's
        # background jobs, too, but whoever sends it to this very process means it.
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._stop_signals = {*STOP_SIGNALS} - ({signal.SIGHUP} if nohup else set())

    def run(self) -> int:
        """Run until a signal or a child that cannot be kept alive; return the exit code.

        Stopping ends the children in the order they are listed, each within its own time. A second signal kills.
        """
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {*self._stop_signals, signal.SIGCHLD})
        try:
            for child in self._children:
                child.start()
            return self._watch()
        finally:
            self._service.close()
            for child in self._children:
                self._stop(child)
            while signal.sigtimedwait(self._stop_signals, 0):  # pressed once more meanwhile; there is nothing to stop
                pass
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    def _watch(self) -> int:
        while True:
            for child in self._children:
                exit_code = child.reap()
                if exit_code is not None and not self._schedule_restart(child, exit_code):
                    return exit_code if exit_code == EXIT_CONFIG else 1
                if child.restart_at_s is not None and time.monotonic() >= child.restart_at_s:
                    child.start()
                    self._probe_from_s = time.monotonic() + self._settle_s
            if not self._ready and self._probe():
                self._become_ready()
            if self._wait(self._sleep_s()) in self._stop_signals:
                log.info("stopping")
                return 0

    def _schedule_restart(self, child: Child, exit_code: int) -> bool:
        """Plan the next start of a child that died; False gives up."""
        self._ready = False
        self._good_probes = 0
        delay_s = child.policy.died(exit_code, child.ready_for_s())
        if delay_s is not None:
            log.warning("%s %s; starting it again in %g s", child.name, _ending(exit_code), delay_s)
            child.restart_at_s = time.monotonic() + delay_s
            return True
        if exit_code != EXIT_CONFIG:  # with that code the child has named the reason itself
            log.error("%s %s and never became ready; giving up", child.name, _ending(exit_code))
        return False

    def _probe(self) -> bool:
        """Ask once whether the service is ready; True after so many good answers in a row."""
        if time.monotonic() < self._probe_from_s or not all(child.running for child in self._children):
            return False
        self._good_probes = self._good_probes + 1 if self._service.ready() else 0
        return self._good_probes >= PROBES_IN_A_ROW

    def _become_ready(self) -> None:
        self._ready = True
        for child in self._children:
            if child.ready_since_s is None:
                child.ready_since_s = time.monotonic()
        self._service.announce()

    def _sleep_s(self) -> float:
        if not self._ready and all(child.running for child in self._children):
            return PROBE_INTERVAL_S
        due = [child.restart_at_s for child in self._children if child.restart_at_s is not None]
        return min([IDLE_INTERVAL_S, *(max(at - time.monotonic(), 0.0) for at in due)])

    def _wait(self, timeout_s: float) -> int | None:
        """Sleep until a signal (returned), a child's death or the timeout."""
        info = signal.sigtimedwait({*self._stop_signals, signal.SIGCHLD}, timeout_s)
        return None if info is None else info.si_signo

    def _stop(self, child: Child) -> None:
        child.terminate()
        deadline = time.monotonic() + child.stop_timeout_s
        while child.running and not self._hurry and (left_s := deadline - time.monotonic()) > 0:
            if self._wait(left_s) in self._stop_signals:
                log.warning("second signal: killing what still runs")
                self._hurry = True
        if child.running and not self._hurry:
            log.warning("%s did not end within %g s; killing it", child.name, child.stop_timeout_s)
        child.kill()


def _ending(exit_code: int) -> str:
    """Say in words how a process ended."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
