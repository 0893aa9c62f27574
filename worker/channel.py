"""The worker's two ZeroMQ sockets, PULL for requests and XPUB for their output, and a bell for the io thread.

The only file of the worker that imports zmq. All of it belongs to the io thread, but for `ring`, which any thread may
call. Both sockets are bound here; web processes connect. Nothing in it ever blocks, except `wait`.

XPUB runs with XPUB_NODROP and sends without waiting, so a subscriber that takes nothing makes sends to its own topic
fail and loses nothing. Subscriptions are admitted one by one (XPUB_MANUAL) and only for whole topics: a subscription to
a prefix would see every process's output, and could block it for all.
"""

import contextlib
import fcntl
import math
import os
import socket
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from common.errors import ConfigError
from common.ids import is_topic
from common.wire import MAX_MESSAGE_BYTES

RECEIVE_HWM_MESSAGES = 256
SEND_HWM_MESSAGES = 64
"""Batches that wait for one subscriber inside ZeroMQ. Beyond it they merge in the publisher, which is cheaper."""
MAX_SUBSCRIPTION_BYTES = 1024
SUBSCRIBE, UNSUBSCRIBE = 1, 0
"""First byte of what XPUB receives."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """A web process has come to listen to its topic, or has left it."""

    topic: str
    subscribed: bool


@dataclass
class Endpoints:
    """The files behind ipc:// endpoints: a private folder, and a lock that tells whether another worker lives there.

    The lock is the kernel's (flock), so it goes with its process however that ends; its file stays.
    """

    _claimed: list[tuple[Path, int]] = field(default_factory=list)

    def claim(self, key: str, endpoint: str) -> None:
        """Prepare the folder of an ipc:// endpoint and lock it. Raises ConfigError(key) when it cannot be had."""
        if not endpoint.startswith("ipc://"):
            return
        path = Path(endpoint.removeprefix("ipc://"))
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_folder(key, path.parent)
            if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
                raise ConfigError(key, f"{path} exists and is no socket")
            self._lock(key, path)
        except OSError as error:
            raise ConfigError(key, f"{error.filename or path}: {error.strerror}") from None

    def release(self) -> None:
        """Remove the sockets' files and let another worker have their place."""
        while self._claimed:
            path, lock = self._claimed.pop()
            path.unlink(missing_ok=True)
            os.close(lock)

    def _lock(self, key: str, path: Path) -> None:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock, 32, 0).decode(errors="replace").strip()
            os.close(lock)
            raise ConfigError(key, f"another worker (process {owner}) is running at {path}") from None
        self._claimed.append((path, lock))
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)


def _check_folder(key: str, folder: Path) -> None:
    """Refuse a folder in which another user could put a socket in our place."""
    status = folder.stat()
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    if status.st_uid not in (0, os.getuid()) or others_write:
        raise ConfigError(key, f"{folder} belongs to, or can be written by, other users")


class Channel:
    """See the module. Raises ConfigError when an endpoint cannot be bound."""

    def __init__(self, submit_endpoint: str, publish_endpoint: str):
        self._subscribers: Counter[str] = Counter()
        self._endpoints = Endpoints()
        self._context = zmq.Context()
        self._bell, self._bell_rope = socket.socketpair()
        self._bell.setblocking(False)
        self._bell_rope.setblocking(False)
        try:
            self._pull = self._bound_pull(submit_endpoint)
            self._xpub = self._bound_xpub(publish_endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            self._close_files()
            raise
        self._poller = zmq.Poller()
        for source in (self._pull, self._xpub, self._bell.fileno()):
            self._poller.register(source, zmq.POLLIN)

    def _bound_pull(self, endpoint: str) -> zmq.Socket[bytes]:
        pull = self._context.socket(zmq.PULL)
        pull.setsockopt(zmq.RCVHWM, RECEIVE_HWM_MESSAGES)
        pull.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        pull.setsockopt(zmq.LINGER, 0)
        self._bind(pull, "submit_endpoint", endpoint)
        return pull

    def _bound_xpub(self, endpoint: str) -> zmq.Socket[bytes]:
        xpub = self._context.socket(zmq.XPUB)
        xpub.setsockopt(zmq.XPUB_NODROP, 1)
        xpub.setsockopt(zmq.XPUB_MANUAL, 1)
        xpub.setsockopt(zmq.SNDHWM, SEND_HWM_MESSAGES)
        xpub.setsockopt(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION_BYTES)
        xpub.setsockopt(zmq.LINGER, 0)
        self._bind(xpub, "publish_endpoint", endpoint)
        return xpub

    def _bind(self, zmq_socket: zmq.Socket[bytes], key: str, endpoint: str) -> None:
        self._endpoints.claim(key, endpoint)
        # The socket's file is made in here; with this mask only this user can connect to it.
        mask = os.umask(0o077)
        try:
            zmq_socket.bind(endpoint)  # removes a file that a dead worker left
        except zmq.ZMQError as error:
            raise ConfigError(key, f"cannot bind {endpoint}: {error.strerror}") from None
        finally:
            os.umask(mask)

    def ring(self) -> None:
        """Wake the io thread from `wait`. Any thread may call it, at any time."""
        with contextlib.suppress(OSError):  # full: it rings already; closed: nobody is left to wake
            self._bell_rope.send(b"!")

    def wait(self, timeout_s: float) -> None:
        """Return when something was received, the bell was rung, or the timeout has passed."""
        ready = dict(self._poller.poll(math.ceil(max(0.0, timeout_s) * 1000)))
        if self._bell.fileno() in ready:
            self._bell.recv(65536)

    def receive(self, limit: int) -> Iterator[bytes]:
        """Yield up to `limit` messages that are there. One of several parts comes as b"", which no decoder takes."""
        for _ in range(limit):
            try:
                parts = self._pull.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield parts[0] if len(parts) == 1 else b""

    def take_subscriptions(self) -> list[Subscription]:
        """Return who has come and who has gone since the last call."""
        changes: list[Subscription] = []
        while True:
            try:
                parts = self._xpub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return changes
            change = self._subscription(parts[0]) if len(parts) == 1 else None
            if change is not None:
                changes.append(change)

    def _subscription(self, frame: bytes) -> Subscription | None:
        """Admit a subscription, or note that one has ended.

        Subscribers are counted because a process that reconnects may be here again before its old connection is gone.
        """
        topic = frame[1:].decode("ascii", errors="replace")
        if not is_topic(topic) or frame[0] not in (SUBSCRIBE, UNSUBSCRIBE):
            return None
        if frame[0] == SUBSCRIBE:
            self._xpub.setsockopt(zmq.SUBSCRIBE, frame[1:])
            self._subscribers[topic] += 1
            return Subscription(topic, True)
        self._xpub.setsockopt(zmq.UNSUBSCRIBE, frame[1:])
        self._subscribers[topic] -= 1
        if self._subscribers[topic] > 0:
            return None
        del self._subscribers[topic]
        return Subscription(topic, False)

    def send(self, topic: str, data: bytes) -> bool:
        """Send to one topic, or return False at once when its subscriber's queue is full."""
        try:
            self._xpub.send_multipart([topic.encode(), data], zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, linger_s: float) -> None:
        """Close everything; what was sent gets at most `linger_s` to leave."""
        self._pull.close(linger=0)
        self._xpub.close(linger=int(linger_s * 1000))
        self._context.term()
        self._close_files()

    def _close_files(self) -> None:
        self._bell.close()
        self._bell_rope.close()
        self._endpoints.release()
