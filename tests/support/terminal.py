"""A command in a terminal of its own, as a person runs it: Ctrl-C reaches its whole foreground process group."""

import fcntl
import os
import pty
import subprocess
import termios
import threading
from collections.abc import Sequence

from tests.support.processes import ROOT, alive, end_family, family, wait_for

CTRL_C = b"\x03"


class Terminal:
    """Runs `command` with a pseudo-terminal as its controlling one; `text` is all that was shown."""

    def __init__(self, command: Sequence[str], **variables: str):
        env = {name: value for name, value in os.environ.items() if not name.startswith("TOKENLOOM_")}
        self._screen, terminal = pty.openpty()
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**env, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80", **variables},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(terminal)
        self._shown = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.pids: set[int] = set()

    @property
    def text(self) -> str:
        """Return what was shown so far."""
        return self._shown.decode(errors="replace").replace("\r\n", "\n")

    def wait_text(self, text: str, timeout_s: float) -> None:
        """Wait until `text` is shown; AssertionError when the command ends before."""

        def shown_or_over() -> bool:
            return text in self.text or self.process.poll() is not None

        wait_for(shown_or_over, timeout_s, f"showing {text!r}")
        assert text in self.text, self.text

    def type(self, keys: bytes) -> None:
        """Press keys; remembers the processes that run at this moment."""
        self.pids.update(family(self.process))
        os.write(self._screen, keys)

    def left(self) -> list[int]:
        """Return the remembered processes that still run."""
        return [pid for pid in self.pids if alive(pid)]

    def close(self) -> None:
        """End whatever still runs."""
        end_family(self.process)
        self._reader.join(10)
        os.close(self._screen)

    def _read(self) -> None:
        try:
            while piece := os.read(self._screen, 65536):
                self._shown += piece
        except OSError:  # nobody holds the terminal's other side any more
            pass
