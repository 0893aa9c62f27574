"""The two ZeroMQ sockets of a web process: PUSH to the worker, SUB on this process's own topic.

The only file of web that imports zmq. `send` and `can_send` may be called from any thread or greenlet; the rest
belongs to the reader thread. The reader waits on ZeroMQ's own file descriptor with `select.poll`, which gevent replaces
by one that yields, so the same code runs under gevent and under threads. zmq.green is not used: it starves the hub.
"""

import select
import threading

import zmq

from common.config import WebConfig
from common.wire import MAX_MESSAGE_BYTES

SPARE_MESSAGES = 1000
"""Room in the send queue for cancels and repeats, beyond one message for each request that may be open."""

RECEIVE_HWM_MESSAGES = 100
"""Batches beyond it stay with the worker, which merges them."""
RECONNECT_MS = 50
CLOSE_LINGER_MS = 100
"""How long the last cancels may take to leave when the process stops."""


class WorkerSocket:
    """Sends bytes to the worker and receives what it publishes for this process.

    Made after the fork, in the process that uses it.
    """

    def __init__(self, config: WebConfig, topic: str):
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._push = self._connected_push(config)
        self._sub = self._connected_sub(config.publish_endpoint, topic)
        self._poll = select.poll()
        self._poll.register(int(self._sub.getsockopt(zmq.FD)), select.POLLIN)

    def _connected_push(self, config: WebConfig) -> zmq.Socket[bytes]:
        push = self._context.socket(zmq.PUSH)
        # Without IMMEDIATE messages pile up for a worker that is not there, and reach the next one much too late.
        push.setsockopt(zmq.IMMEDIATE, 1)
        # A burst of as many requests as may be open must fit, before the io thread has sent the first.
        push.setsockopt(zmq.SNDHWM, config.max_open_requests + SPARE_MESSAGES)
        push.setsockopt(zmq.LINGER, 0)
        push.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        push.connect(config.submit_endpoint)
        return push

    def _connected_sub(self, endpoint: str, topic: str) -> zmq.Socket[bytes]:
        sub = self._context.socket(zmq.SUB)
        sub.setsockopt(zmq.RCVHWM, RECEIVE_HWM_MESSAGES)
        sub.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        sub.setsockopt(zmq.LINGER, 0)
        sub.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        sub.connect(endpoint)
        return sub

    def send(self, data: bytes) -> bool:
        """Send one message, or return False at once when the worker is not connected or its queue is full."""
        with self._lock:
            if not self._can_send():
                return False
            try:
                self._push.send(data, zmq.NOBLOCK)
            except zmq.Again:
                return False
            return True

    def can_send(self) -> bool:
        """Return whether the worker is connected and takes messages at the moment."""
        with self._lock:
            return self._can_send()

    def _can_send(self) -> bool:
        # Sending looks at news of the connection only now and then; asking for EVENTS always does.
        return not self._push.closed and bool(int(self._push.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def wait(self, timeout_s: float) -> None:
        """Return when something may be there to receive, or after the timeout."""
        # The descriptor tells of changes only (it is edge-triggered), so what is there already is asked for first.
        if not int(self._sub.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._poll.poll(timeout_s * 1000)

    def receive(self, limit: int) -> list[bytes]:
        """Return up to `limit` messages that are there, without waiting."""
        messages: list[bytes] = []
        try:
            while len(messages) < limit:
                messages.append(self._sub.recv_multipart(zmq.NOBLOCK)[-1])
        except zmq.Again:
            pass
        return messages

    def close(self) -> None:
        """Close both sockets; `send` returns False from here on."""
        with self._lock:
            self._push.close(linger=CLOSE_LINGER_MS)
            self._sub.close()
        self._context.term()
