"""The link between a web process and the worker: what the routes use.

Puts together the sockets, the registry of calls, the reader and the disconnect watcher of one process. Make it in the
process that uses it, after the fork. Knows nothing of HTTP; its methods may be called from any thread or greenlet.
"""

import socket
import time
from collections.abc import Callable

from common.config import WebConfig
from common.errors import ErrorCode, RequestError
from common.ids import new_topic
from common.wire import Message, ModelInfo, encode
from web.link.call import CallGroup, CallSpec
from web.link.disconnect import DisconnectWatcher
from web.link.reader import Reader, Wire
from web.link.registry import Registry
from web.link.socket import WorkerSocket

LAST_WORDS_S = 1.0
"""Time that the last finished answer has to leave the process before it counts as drained."""


class Link:
    """Opens calls to the worker, between `start` and `stop`."""

    def __init__(self, config: WebConfig, connect: Callable[[WebConfig, str], Wire] = WorkerSocket):
        self._config = config
        self._connect = connect
        self._topic = new_topic()
        self._registry = Registry(config, self._topic, self._send)
        self._watcher = DisconnectWatcher()
        self._wire: Wire | None = None
        self._reader: Reader | None = None
        self._drain_until_s: float | None = None
        self._idle_since_s = 0.0
        self._on_drained: Callable[[], None] | None = None

    # --- life ---

    def start(self) -> None:
        """Connect and start the threads, once."""
        self._wire = self._connect(self._config, self._topic)
        self._reader = Reader(self._wire, self._registry, self._tick)
        self._watcher.start()
        self._reader.start()

    def drain(self, on_drained: Callable[[], None]) -> None:
        """Take no new calls, and end those that are open after `graceful_timeout_s`. Safe in a signal handler.

        on_drained: called once, from another thread, when no call has been open for LAST_WORDS_S.
        """
        if not self._registry.closing:
            self._registry.closing = _draining()
            self._idle_since_s = time.monotonic()
            self._drain_until_s = self._idle_since_s + self._config.graceful_timeout_s
            self._on_drained = on_drained

    def stop(self) -> None:
        """End what is open with an error, then the threads and the sockets. Harmless when repeated."""
        if not (self._wire and self._reader):
            return
        self._registry.closing = _draining()
        self._registry.fail_all(_draining())
        self._reader.stop()
        self._watcher.stop()
        self._wire.close()
        self._wire = self._reader = None

    # --- routes ---

    @property
    def model(self) -> ModelInfo | None:
        """The model the worker serves, once it was heard of."""
        return self._registry.worker.model

    @property
    def ready(self) -> bool:
        """Whether a call opened now would be sent."""
        return self._registry.refusal() is None

    def why_not_ready(self) -> str:
        """Say why `ready` is False; empty when it is True."""
        refusal = self._registry.refusal()
        return refusal.message if refusal else ""

    @property
    def open_requests(self) -> int:
        """Calls that are open in this process."""
        return self._registry.num_open

    def open(self, specs: list[CallSpec], prefix: str, client_socket: socket.socket | None) -> CallGroup:
        """Submit the calls of one HTTP request and watch its client.

        client_socket: the client's connection, or None when it cannot leave. Raises RequestError at once when the
        calls cannot be taken. The caller closes the group in the end, whatever happens.
        """
        group = self._registry.open(specs, prefix)
        if client_socket is not None:
            group.watch(self._watcher, client_socket.fileno())
        return group

    # --- inside ---

    def _send(self, message: Message) -> bool:
        return self._wire is not None and self._wire.send(encode(message))

    def _tick(self) -> None:
        now = time.monotonic()
        if self._drain_until_s is not None and now >= self._drain_until_s:
            self._drain_until_s = None
            self._registry.fail_all(_draining())
        if self.open_requests:
            self._idle_since_s = now
        elif self._on_drained and now - self._idle_since_s >= LAST_WORDS_S:
            on_drained, self._on_drained = self._on_drained, None
            on_drained()


def _draining() -> RequestError:
    return RequestError(ErrorCode.DRAINING, "the server is shutting down")
