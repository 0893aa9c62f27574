"""Starting a child process while signals arrive."""

import subprocess
import sys

from tests.support.processes import ROOT

TIMEOUT_S = 60

INTERRUPTED_AT_FORK = """
import os, signal, sys
from cli.child import Child
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGINT))
child = Child("child", [sys.executable, "-c", "print('ran', flush=True)"], os.environ, stop_timeout_s=5.0)
child.start()
print("ended with", child.process.wait())
"""


def test_ctrl_c_between_fork_and_session_is_the_supervisors_alone():
    """A terminal's Ctrl-C that hits a child before it has its own session once raised in it, and the start failed."""
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT_FORK], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert result.stdout == "ran\nended with 0\n", result.stderr
