"""The thread that runs the engine, and the only doors through which other threads reach it.

`submit` and `cancel` may be called from any thread; they leave a command that the engine thread takes up between two
steps. Events go to `on_events`, which runs on the engine thread and must not block.
"""

import logging
import threading
import time
from collections.abc import Callable

from common.errors import ErrorCode, RequestError
from common.wire import Event, Submit
from worker.engine import Engine, EngineStats

log = logging.getLogger(__name__)

Command = Callable[[], None]


class EngineThread:
    """Runs steps while there is work and sleeps while there is none."""

    def __init__(self, engine: Engine, on_events: Callable[[list[Event]], None]):
        self._engine = engine
        self._on_events = on_events
        self._commands: list[Command] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._last_words: RequestError | None = None
        self._step_started_s = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.stats: EngineStats = engine.stats
        """The last snapshot; replaced as a whole after each step, so any thread may read it."""
        self.failure: BaseException | None = None
        """What ended the thread, if it did not end by `stop`."""

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    @property
    def step_age_s(self) -> float:
        """Seconds that the step in flight has been running; 0 when idle."""
        started = self._step_started_s
        return time.monotonic() - started if started else 0.0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, submit: Submit) -> None:
        """Hand a request to the engine. Raises RuntimeError after `stop` or after the engine broke."""
        self._post(lambda: self._engine.add(submit))

    def cancel(self, request_id: str, reason: str = "") -> None:
        """Ask the engine to end a request; takes effect before its next step."""
        self._post(lambda: self._engine.cancel(request_id, reason))

    def stop(self, timeout_s: float = 2.0, error: RequestError | None = None) -> bool:
        """End the thread; live requests end with `error`, or as cancelled. Returns whether it ended in time.

        A step in flight is not interrupted: when it outlasts the timeout the thread is left to end after it.
        """
        with self._wake:
            self._stopping = True
            self._last_words = error
            self._wake.notify()
        if self._thread.ident is None:
            self._close()
        else:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _post(self, command: Command) -> None:
        with self._wake:
            if self._stopping:
                raise RuntimeError("the engine has stopped")
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._obey():
                # A step takes long; whoever was accepted or refused learns it before.
                self._deliver()
                self._step()
        except BaseException as error:  # whoever owns the thread decides what its end means
            log.exception("the engine thread ends")
            self._last_words = RequestError(ErrorCode.INTERNAL_ERROR, "the engine broke down")
            self.failure = error
        self._close()

    def _close(self) -> None:
        """Refuse new commands, carry out those that were let in, and end every request that is left."""
        with self._wake:
            self._stopping = True
        self._obey()
        self._engine.end_all(self._last_words)
        self._deliver()

    def _obey(self) -> bool:
        """Wait until there is something to do and carry out the commands. Returns False when it is time to end."""
        with self._wake:
            while not (self._commands or self._stopping or self._engine.has_work):
                self._wake.wait()
            commands, self._commands = self._commands, []
            stopping = self._stopping
        for command in commands:
            command()
        return not stopping

    def _step(self) -> None:
        self._step_started_s = time.monotonic()
        try:
            self._engine.step()
        finally:
            self._step_started_s = 0.0
            self._deliver()

    def _deliver(self) -> None:
        self.stats = self._engine.stats
        events = self._engine.take_events()
        if events:
            self._on_events(events)
