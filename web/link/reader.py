"""The thread that takes in what the worker publishes and looks at what is due (a greenlet under gevent).

Owns the receiving half of the socket and the clock of all limits, which counts only time in which this process was
awake: after a SIGSTOP what has piled up is read before anything is judged.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from common.clock import AwakeClock
from common.errors import WireError
from common.wire import decode_to_web
from web.link.registry import Registry

log = logging.getLogger(__name__)

TICK_S = 0.05
"""How often the reader looks at what is due."""

MAX_ROUND_S = 0.25
"""What one round can count at most: a longer one means that this process was frozen, not that time passed."""

ROUND_MESSAGES = 256


class Wire(Protocol):
    """What the link needs of a socket; `WorkerSocket` is the real one and describes it."""

    def send(self, data: bytes) -> bool: ...  # noqa: D102
    def can_send(self) -> bool: ...  # noqa: D102
    def wait(self, timeout_s: float) -> None: ...  # noqa: D102
    def receive(self, limit: int) -> list[bytes]: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class Reader:
    """Feeds the registry. `on_tick` runs every TICK_S, on this thread; `clock` gives monotonic seconds."""

    def __init__(
        self,
        wire: Wire,
        registry: Registry,
        on_tick: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._wire = wire
        self._registry = registry
        self._on_tick = on_tick
        self._stopping = False
        self._clock = AwakeClock(MAX_ROUND_S, clock)
        self._ticked_s = 0.0
        self._thread = threading.Thread(target=self._run, name="link-reader", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.round()
            except Exception:  # the process is deaf without its reader
                log.exception("the reader stumbled")
                time.sleep(TICK_S)

    def round(self) -> None:
        """Wait a little, take what has arrived, do what is due. Runs on the thread; tests call it themselves."""
        self._wire.wait(TICK_S)
        messages = self._wire.receive(ROUND_MESSAGES)
        for data in messages:
            self._take(data)
        now = self._clock.read()
        # A full round may not have been all, and it is too early to judge.
        if len(messages) < ROUND_MESSAGES and now - self._ticked_s >= TICK_S:
            self._ticked_s = now
            self._registry.sweep(now, self._wire.can_send())
            self._on_tick()
        if messages:
            # When messages keep coming, `wait` never waits; under gevent nobody else would ever run.
            time.sleep(0)

    def _take(self, data: bytes) -> None:
        try:
            self._registry.take(decode_to_web(data))
        except WireError as error:
            log.warning("dropped a message of the worker: %s", error)
