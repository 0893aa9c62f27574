"""The disconnect watcher on real socket pairs, under threads and under gevent."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from web.link.disconnect import DisconnectWatcher

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def watcher() -> Iterator[DisconnectWatcher]:
    made = DisconnectWatcher()
    made.start()
    yield made
    made.stop()


def watched_pair(watcher: DisconnectWatcher) -> tuple[socket.socket, socket.socket, threading.Event]:
    ours, theirs = socket.socketpair()
    gone = threading.Event()
    watcher.watch(ours.fileno(), gone.set)
    return ours, theirs, gone


def test_close_is_noticed(watcher: DisconnectWatcher) -> None:
    """A client that closes is noticed although nobody reads or writes."""
    ours, theirs, gone = watched_pair(watcher)
    theirs.close()
    assert gone.wait(5)
    ours.close()


def test_half_close_counts(watcher: DisconnectWatcher) -> None:
    """A client that ends its side has left, as proxies take it too."""
    ours, theirs, gone = watched_pair(watcher)
    theirs.shutdown(socket.SHUT_WR)
    assert gone.wait(5)
    ours.close()
    theirs.close()


def test_early_data_does_not_count(watcher: DisconnectWatcher) -> None:
    """The next request on a kept-alive connection may come early; that is no hang-up, and stays to be read."""
    ours, theirs, gone = watched_pair(watcher)
    theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
    other_ours, other_theirs, other_gone = watched_pair(watcher)
    other_theirs.close()
    assert other_gone.wait(5)
    assert not gone.is_set()
    assert ours.recv(100).startswith(b"GET")
    theirs.close()
    assert gone.wait(5)
    ours.close()
    other_ours.close()


def test_client_that_left_before_is_noticed(watcher: DisconnectWatcher) -> None:
    """Hanging up before the watch began is noticed as well."""
    ours, theirs = socket.socketpair()
    theirs.close()
    gone = threading.Event()
    watcher.watch(ours.fileno(), gone.set)
    assert gone.wait(5)
    ours.close()


def test_after_unwatch_nothing_is_called(watcher: DisconnectWatcher) -> None:
    """A request that is over must not be called back, nor the next one with the same descriptor by mistake."""
    ours, theirs, gone = watched_pair(watcher)
    watcher.unwatch(ours.fileno())
    watcher.unwatch(ours.fileno())
    theirs.close()
    other_ours, other_theirs, other_gone = watched_pair(watcher)
    other_theirs.close()
    assert other_gone.wait(5)
    assert not gone.is_set()
    ours.close()
    other_ours.close()


def test_a_descriptor_that_is_used_again_is_another_client() -> None:
    """Two clients leave together; while the first is dealt with, a new one gets the second's descriptor.

    The bug: hang-ups were collected first and looked up later, so the new client was taken for gone.
    """
    watcher = DisconnectWatcher()
    pairs = [socket.socketpair() for _ in range(2)]
    newcomer, peer = socket.socketpair()
    newcomer_gone = threading.Event()
    fds = [ours.fileno() for ours, _ in pairs]

    def give_to_newcomer(fd: int) -> None:
        if not newcomer_gone.is_set() and fd in fds:
            fds.clear()
            watcher.unwatch(fd)
            os.dup2(newcomer.fileno(), fd)
            watcher.watch(fd, newcomer_gone.set)

    for (ours, theirs), other in zip(pairs, reversed(fds), strict=True):
        theirs.close()
        watcher.watch(ours.fileno(), lambda other=other: give_to_newcomer(other))
    watcher.start()
    ours, theirs, gone = watched_pair(watcher)
    while fds:
        time.sleep(0.01)
    theirs.close()
    assert gone.wait(5)
    assert not newcomer_gone.is_set()
    peer.close()
    assert newcomer_gone.wait(5)
    watcher.stop()
    for each in (ours, newcomer, *(left for left, _ in pairs)):
        each.close()


def test_one_failing_callback_does_not_end_the_watch(watcher: DisconnectWatcher) -> None:
    """Trouble with one client does not leave the others unwatched."""
    ours, theirs = socket.socketpair()
    called = threading.Event()

    def fail() -> None:
        called.set()
        raise RuntimeError("on purpose")

    watcher.watch(ours.fileno(), fail)
    theirs.close()
    assert called.wait(5)
    other_ours, other_theirs, gone = watched_pair(watcher)
    other_theirs.close()
    assert gone.wait(5)
    ours.close()
    other_ours.close()


def test_many_at_once(watcher: DisconnectWatcher) -> None:
    """Two hundred clients that leave together are all noticed."""
    pairs = [watched_pair(watcher) for _ in range(200)]
    for _, theirs, _ in pairs:
        theirs.close()
    assert all(gone.wait(5) for _, _, gone in pairs)
    for ours, _, _ in pairs:
        ours.close()


def test_all_of_this_under_gevent() -> None:
    """gevent takes epoll out of `select` and makes the threads greenlets; the same tests must pass there."""
    if "gevent.monkey" in sys.modules and sys.modules["gevent.monkey"].is_module_patched("select"):
        return  # this is that run
    code = "from gevent import monkey; monkey.patch_all(); import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    tests = [
        str(Path(__file__).with_name(name))
        for name in ("test_link_disconnect.py", "test_link_call.py", "test_link_reader.py")
    ]
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        code,
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:timeout",
        "-o",
        "addopts=",
        *tests,
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
