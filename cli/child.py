"""One child process: started in a process group of its own, ended whole, never left behind.

Runs on the supervisor's only thread. The child's output goes where the supervisor's goes. Knows nothing of what the
child does.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cli.restart import RestartPolicy

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal this process gets when its parent dies, whatever killed the parent."""


@dataclass
class Child:
    """A process to keep alive. `stop_timeout_s` is what it gets to end by itself before it is killed."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    stop_timeout_s: float
    orphan_signal: signal.Signals = signal.SIGKILL
    pass_fds: Sequence[int] = ()
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    process: subprocess.Popen[bytes] | None = None
    ready_since_s: float | None = None
    restart_at_s: float | None = None

    def start(self) -> None:
        """Start the process. Raises OSError when its program cannot be run."""
        self.restart_at_s = None
        self.ready_since_s = None
        # A session of its own keeps the terminal's Ctrl-C from it: the supervisor decides who ends first.
        self.process = subprocess.Popen(
            self.command,
            env=dict(self.env),
            stdin=subprocess.DEVNULL,
            pass_fds=self.pass_fds,
            start_new_session=True,
            preexec_fn=_child_setup(self.orphan_signal),
        )

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self.process is not None and self.process.poll() is None

    def reap(self) -> int | None:
        """Return the exit code once, right after the process died, and clear what it left; else None."""
        if self.process is None or self.process.poll() is None:
            return None
        exit_code = self.process.returncode
        self._kill_group()
        self.process = None
        return exit_code

    def ready_for_s(self) -> float:
        """Return for how long the process has been (or had been) ready, 0 if it never was."""
        return 0.0 if self.ready_since_s is None else max(time.monotonic() - self.ready_since_s, 1e-9)

    def terminate(self) -> None:
        """Ask the process to end."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def kill(self) -> None:
        """End the process and everything in its group now."""
        if self.process is not None:
            self._kill_group()
            self.process.wait()

    def _kill_group(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(self.process.pid, signal.SIGKILL)


def _child_setup(orphan_signal: signal.Signals) -> Callable[[], None]:
    """Return what the child does between fork and exec. Whatever allocates or loads is done here, before the fork."""
    supervisor = os.getpid()
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

    def setup() -> None:
        # A Ctrl-C since the fork hit this process too, for it had no session yet; it is the supervisor's. Ignoring it
        # drops it: once it is unblocked it would raise here.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, int(orphan_signal))
        if os.getppid() != supervisor:  # it died before the line above
            os._exit(1)

    return setup
