"""The reader's clock and its rounds, with a wire and a clock that the test holds."""

import threading
import time

import pytest

from common.config import WebConfig
from common.wire import Accepted, Batch, Finished, Tokens, Usage, encode
from tests.support.link_worker import heartbeat
from web.link.call import CallSpec, SamplingParams
from web.link.link import Link
from web.link.reader import ROUND_MESSAGES, TICK_S, Reader
from web.link.registry import Registry

pytestmark = pytest.mark.timeout(30)


class HeldWire:
    """A wire that holds what the test puts in, and a clock that the test turns."""

    def __init__(self) -> None:
        self.inbox: list[bytes] = []
        self.now = 100.0
        self.frozen_s = 0.0

    def clock(self) -> float:
        return self.now

    def send(self, data: bytes) -> bool:
        return True

    def can_send(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        self.now += timeout_s + self.frozen_s
        self.frozen_s = 0.0

    def receive(self, limit: int) -> list[bytes]:
        taken, self.inbox = self.inbox[:limit], self.inbox[limit:]
        return taken

    def close(self) -> None:
        pass


def make() -> tuple[HeldWire, Registry, Reader]:
    wire = HeldWire()
    registry = Registry(WebConfig(heartbeat_timeout_s=1.0), "p/0123456789abcdef/", lambda message: True)
    return wire, registry, Reader(wire, registry, lambda: None, wire.clock)


def test_a_frozen_process_reads_before_it_judges() -> None:
    """Stopped for an hour in the middle of a stream, the process finds the worker well and every token there."""
    wire, registry, reader = make()
    wire.inbox.append(encode(heartbeat()))
    reader.round()
    reader.round()
    group = registry.open([CallSpec([1], SamplingParams(), 1000)], "cmpl")
    name = group.ids[0]
    wire.inbox.append(encode(Batch("first", 1, [Accepted(name)])))
    reader.round()
    for pos in range(1000):
        wire.inbox.append(encode(Batch("first", pos + 2, [Tokens(name, pos, [pos])])))
    wire.inbox.append(encode(Batch("first", 1002, [Finished(name, "length", Usage(1, 1000))])))
    wire.frozen_s = 3600.0
    for _ in range(10):
        reader.round()
        assert registry.refusal() is None
    ids = [one for item in group.events() if item and isinstance(item[1], Tokens) for one in item[1].ids]
    assert ids == list(range(1000))


def test_a_silent_worker_is_noticed_although_pauses_do_not_count() -> None:
    """The clock stands still only while the process does: real silence is silence."""
    wire, registry, reader = make()
    wire.inbox.append(encode(heartbeat()))
    for _ in range(3):
        reader.round()
    assert registry.refusal() is None
    for _ in range(round(1.5 / TICK_S)):
        reader.round()
    assert registry.refusal() is not None


def test_garbage_is_dropped_and_the_rest_is_read() -> None:
    """Bytes that are no message, or one of another version, cost nothing but a line in the log."""
    wire, registry, reader = make()
    wire.inbox += [b"", b"\xff" * 100, b"\x80", encode(heartbeat()) + b"x", encode(heartbeat())]
    for _ in range(3):
        reader.round()
    assert registry.refusal() is None


def test_more_than_a_round_takes_is_read_without_waiting() -> None:
    """A flood is read on, and nothing is judged before its end."""
    wire, registry, reader = make()
    wire.inbox += [encode(heartbeat())] * (ROUND_MESSAGES + 1)
    reader.round()
    assert len(wire.inbox) == 1
    assert registry.refusal() is not None  # the sweep has not run
    reader.round()
    assert registry.refusal() is None


def test_an_endless_flood_lets_others_run() -> None:
    """While messages come without a pause the requests they are for must get their turn, also under gevent."""
    wire, registry, _ = make()
    wire.wait = lambda timeout_s: None  # type: ignore[method-assign]
    wire.receive = lambda limit: [encode(heartbeat())]  # type: ignore[method-assign]
    reader = Reader(wire, registry, lambda: None)
    stopper = threading.Timer(0.2, reader.stop)
    stopper.start()
    reader.start()
    stopper.join(10)
    assert not stopper.is_alive()


def test_link_ends_open_calls_when_its_drain_time_is_over() -> None:
    """drain() refuses new calls at once, lets open ones run, and ends them with `draining` when the time is over."""
    wire = HeldWire()
    wire.wait = time.sleep  # type: ignore[method-assign]
    link = Link(WebConfig(graceful_timeout_s=0.3), lambda config, topic: wire)
    link.start()
    drained: list[bool] = []
    try:
        wire.inbox.append(encode(heartbeat()))
        _until(lambda: link.ready)
        group = link.open([CallSpec([1], SamplingParams(), 10)], "cmpl", None)
        wire.inbox.append(encode(Batch("first", 1, [Accepted(group.ids[0]), Tokens(group.ids[0], 0, [1])])))
        group.wait_accepted()
        link.drain(lambda: drained.append(True))
        assert "shutting down" in link.why_not_ready()
        events = [item[1] for item in group.events() if item]
        assert [getattr(event, "code", None) for event in events] == [None, "draining"]
        assert not drained
        group.close()
        _until(lambda: drained)
    finally:
        link.stop()


def _until(condition: object, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
