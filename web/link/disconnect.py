"""Notices clients that hang up, also while nothing is being written to them.

One thread (a greenlet under gevent) per process. It waits on an epoll of the client sockets; the epoll's own file
descriptor is waited on with `select.poll`, which gevent replaces by one that yields. Data that a client sends early is
no reason: only the end of its side of the connection is. It never reads, writes or closes a client's socket.
"""

import contextlib
import logging
import select
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

HANG_UP = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
STOP_CHECK_S = 0.2


def _new_epoll() -> Any:
    """Return an epoll object; gevent takes the name out of `select`, because a blocking poll() would stop the hub."""
    if hasattr(select, "epoll"):
        return select.epoll()
    from gevent import monkey

    return monkey.get_original("select", "epoll")()


class DisconnectWatcher:
    """Calls back, on its own thread, once for each watched socket whose client has hung up."""

    def __init__(self) -> None:
        self._epoll = _new_epoll()
        self._poll = select.poll()
        self._poll.register(self._epoll.fileno(), select.POLLIN)
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="disconnect", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        self._thread.join()
        self._epoll.close()

    def watch(self, fd: int, on_hang_up: Callable[[], None]) -> None:
        """Watch a socket until `unwatch`, which must come before it is closed. At once if it has hung up already."""
        with self._lock:
            known = fd in self._callbacks
            self._callbacks[fd] = on_hang_up
            if known:
                self._epoll.modify(fd, HANG_UP)
            else:
                self._epoll.register(fd, HANG_UP)

    def unwatch(self, fd: int) -> None:
        """Stop watching; harmless when it is not watched."""
        with self._lock:
            if self._callbacks.pop(fd, None):
                self._unregister(fd)

    def _unregister(self, fd: int) -> None:
        # A socket that was closed meanwhile has been taken out by the kernel already.
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)

    def _run(self) -> None:
        while not self._stopping:
            self._poll.poll(STOP_CHECK_S * 1000)
            callback = self._take_hang_up()
            if callback:
                self._call(callback)

    def _take_hang_up(self) -> Callable[[], None] | None:
        """Return the callback of one client that has hung up, if there is one, and stop watching its socket."""
        # Under one lock: a descriptor that is looked up later may be another client's by then.
        with self._lock:
            for fd, _ in self._epoll.poll(0, 1):
                self._unregister(fd)
                return self._callbacks.pop(fd, None)
        return None

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:  # one client's trouble must not end the watch over the others
            log.exception("a hang-up could not be handled")
