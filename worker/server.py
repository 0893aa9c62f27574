"""The io thread: between the sockets, the publisher and the engine thread.

It runs from before the model is loaded until the last word is sent. It takes requests from web processes to the engine,
events from the engine to the publisher, and says every few hundred milliseconds how the worker is, also while the model
is loading or a step takes long. It never computes anything and never waits for the engine.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict

from common.clock import AwakeClock
from common.config import WorkerConfig
from common.errors import ErrorCode, RequestError, WireError
from common.ids import new_incarnation
from common.wire import (
    Batch,
    Cancel,
    Event,
    Failed,
    Heartbeat,
    ModelInfo,
    Resync,
    Submit,
    decode_to_worker,
    encode,
)
from worker.channel import Channel
from worker.engine import Engine, EngineStats
from worker.engine_thread import EngineThread
from worker.publisher import Publisher, PublisherLimits

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_ENGINE_DIED = 3
"""The engine thread ended by itself; a new process may do better."""
EXIT_IO_DIED = 4

RECEIVE_LIMIT_MESSAGES = 256
"""Messages taken in one round, so that a flood of them does not hold up what the engine has made."""
ENGINE_STOP_S = 1.0
FLUSH_S = 0.3
LINGER_S = 0.3
"""What stopping may take: the step in flight, the last batches into ZeroMQ, and from there to web processes."""
LOG_INTERVAL_S = 1.0


class WorkerServer:
    """See the module. Binds the endpoints at once and raises ConfigError when it cannot.

    `start`, then `serve` when the engine is there; `stop` and `ready` may be called from any thread.
    """

    def __init__(self, config: WorkerConfig):
        self._config = config
        self._incarnation = new_incarnation()
        self._publisher = Publisher(
            self._incarnation,
            PublisherLimits(subscriber_grace_s=config.subscriber_grace_s, stuck_limit_s=config.stuck_limit_s),
        )
        self._events: deque[list[Event]] = deque()
        self._engine: EngineThread | None = None
        self._model: ModelInfo | None = None
        self._stopping = threading.Event()
        self._exit_code = EXIT_OK
        self._malformed_messages = 0
        self._log_at_s = 0.0
        self._beat_at_s = 0.0
        # After a SIGSTOP no web process is blamed for our own silence.
        self._clock = AwakeClock(4 * config.heartbeat_interval_s)
        self._now = 0.0
        self._thread = threading.Thread(target=self._run, name="io", daemon=True)
        self._channel = Channel(config.submit_endpoint, config.publish_endpoint)

    def start(self) -> None:
        """Start the io thread: from here on web processes hear that the model is loading."""
        self._thread.start()

    def serve(self, engine: Engine, model: ModelInfo) -> None:
        """Start the engine and take requests."""
        thread = EngineThread(engine, self._receive)
        thread.start()
        self._model = model
        self._engine = thread
        self._channel.ring()

    def stop(self) -> None:
        """Refuse new requests, end those that are left with an answer, and end the thread; returns at once."""
        self._stopping.set()
        self._channel.ring()

    def join(self, timeout_s: float | None = None) -> int | None:
        """Wait for the io thread's end and return the exit code of the process, or None when the timeout passes."""
        self._thread.join(timeout_s)
        return None if self._thread.is_alive() else self._exit_code

    @property
    def engine_alive(self) -> bool:
        """Whether an engine thread is still running, as after a `stop` that a long step outlasted."""
        return self._engine is not None and self._engine.alive

    def _receive(self, events: list[Event]) -> None:
        """Take events; runs on the engine thread."""
        self._events.append(events)
        self._channel.ring()

    # --- the io thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._guard(self._serve)
        self._guard(self._finish)
        self._guard(lambda: self._channel.close(LINGER_S))

    def _guard(self, work: Callable[[], None]) -> None:
        """A process that cannot talk must end, with a code that says so, so that another can take its place."""
        try:
            work()
        except Exception:
            log.exception("the io thread ends")
            self._exit_code = EXIT_IO_DIED

    def _serve(self) -> None:
        while not self._stopping.is_set():
            self._round()

    def _round(self) -> None:
        self._channel.wait(self._wait_s())
        self._now = self._clock.read()
        self._take_messages()
        self._publish()
        if self._now >= self._beat_at_s:
            self._beat_at_s = self._now + self._config.heartbeat_interval_s
            self._beat()
            self._cancel(self._publisher.expire(self._now), "its web process is gone")
            self._check_engine()

    def _wait_s(self) -> float:
        if self._events:
            return 0.0
        flush_at_s = self._publisher.flush_due_s()
        return (self._beat_at_s if flush_at_s is None else min(self._beat_at_s, flush_at_s)) - self._now

    def _take_messages(self) -> None:
        for change in self._channel.take_subscriptions():
            log.debug("web process %s %s", change.topic, "listens" if change.subscribed else "has gone")
            if change.subscribed:
                self._publisher.subscribe(change.topic, self._now)
                self._beat_at_s = self._now  # it wants to know how the worker is
            else:
                self._publisher.unsubscribe(change.topic, self._now)
        for data in self._channel.receive(RECEIVE_LIMIT_MESSAGES):
            self._take(data)

    def _take(self, data: bytes) -> None:
        try:
            message = decode_to_worker(data)
        except WireError as error:
            self._malformed_messages += 1
            if self._now >= self._log_at_s:
                self._log_at_s = self._now + LOG_INTERVAL_S
                log.warning("dropped a malformed message, %d so far: %s", self._malformed_messages, error)
            return
        match message:
            case Submit():
                self._submit(message)
            case Cancel(id=id, reason=reason):
                self._cancel([id], reason)
            case Resync():
                self._publisher.resync(message, self._now)

    def _submit(self, submit: Submit) -> None:
        if not self._publisher.submit(submit, self._now):
            return
        refusal = self._refusal()
        if refusal is None and self._engine is not None:
            try:
                self._engine.submit(submit)
                return
            except RuntimeError:
                refusal = RequestError(ErrorCode.NOT_READY, "the engine has stopped")
        assert refusal is not None
        self._publisher.record([Failed.of(submit.id, refusal)])

    def _refusal(self) -> RequestError | None:
        if self._stopping.is_set():
            return RequestError(ErrorCode.DRAINING, "the worker is shutting down")
        if self._engine is None:
            return RequestError(ErrorCode.NOT_READY, "the worker is loading the model")
        return None

    def _cancel(self, ids: list[str], reason: str) -> None:
        if self._engine is None:
            return
        for id in ids:
            try:
                self._engine.cancel(id, reason)
            except RuntimeError:  # it has stopped, and every request has ended with it
                return

    def _check_engine(self) -> None:
        if self._engine is not None and not self._engine.alive:
            log.error("the engine thread has died: %s", self._engine.failure)
            self._exit_code = EXIT_ENGINE_DIED
            self._stopping.set()

    # --- sending ------------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        while self._events:
            self._publisher.record(self._events.popleft())
        self._publisher.flush(self._send, self._now)

    def _send(self, topic: str, batch: Batch) -> bool:
        return self._channel.send(topic, encode(batch))

    def _beat(self) -> None:
        for topic, seq in self._publisher.subscribers():
            # One that is stuck hears it later, or hears the next one.
            self._channel.send(topic, encode(self._heartbeat(seq)))

    def _heartbeat(self, seq: int) -> Heartbeat:
        stats = EngineStats() if self._engine is None else self._engine.stats
        wire = asdict(self._publisher.counters) | {"malformed_messages": self._malformed_messages}
        return Heartbeat(
            incarnation=self._incarnation,
            state=self._state,
            seq=seq,
            model=self._model,
            step=stats.step,
            step_age_s=0.0 if self._engine is None else self._engine.step_age_s,
            running=stats.running,
            waiting=stats.waiting,
            kv_blocks_used=stats.kv_blocks_used,
            kv_blocks_total=stats.kv_blocks_total,
            counters=stats.counters | wire,
        )

    @property
    def _state(self) -> str:
        if self._stopping.is_set():
            return "draining"
        return "loading" if self._engine is None else "ready"

    # --- the end ------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Give every request that is left its terminal event, and send it."""
        self._beat()
        error = RequestError(ErrorCode.WORKER_LOST, "the worker was shut down during this request")
        if self._engine is not None and not self._engine.stop(ENGINE_STOP_S, error):
            log.warning("the step in flight takes too long; leaving without it")
        self._publish()
        self._publisher.fail_all(error)  # those that the engine could not answer any more
        deadline_s = self._now + FLUSH_S
        while self._now < deadline_s:
            self._take_messages()
            self._publish()
            if self._publisher.flush_due_s() is None:
                break
            self._channel.wait(0.01)
            self._now = self._clock.read()
