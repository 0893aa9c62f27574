"""The worker's sockets and their files: who may have them, who may connect, who may listen to what."""

import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zmq

from common.errors import ConfigError
from common.ids import new_topic
from tests.support.processes import free_port
from worker.channel import SEND_HWM_MESSAGES, Channel, Subscription

pytestmark = pytest.mark.timeout(60)

WAIT_S = 10.0


@contextmanager
def opened(submit: str, publish: str) -> Iterator[Channel]:
    channel = Channel(submit, publish)
    try:
        yield channel
    finally:
        channel.close(0.0)


@pytest.fixture
def endpoints(tmp_path: Path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/run/submit.sock", f"ipc://{tmp_path}/run/publish.sock"


@pytest.fixture
def channel(endpoints: tuple[str, str]) -> Iterator[Channel]:
    with opened(*endpoints) as channel:
        yield channel


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


def subscribed(channel: Channel, count: int) -> list[Subscription]:
    """The next `count` changes of subscriptions."""
    changes: list[Subscription] = []
    deadline = time.monotonic() + WAIT_S
    while len(changes) < count:
        assert time.monotonic() < deadline, changes
        channel.wait(0.1)
        changes += channel.take_subscriptions()
    return changes


def listener(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, topic: str, hwm: int = 1000) -> zmq.Socket[bytes]:
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.RCVHWM, hwm)
    sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
    sub.connect(endpoint)
    return sub


def send(channel: Channel, topic: str, data: bytes) -> None:
    """Send as the io thread does: between two waits, and again if the queue had no room yet."""
    deadline = time.monotonic() + WAIT_S
    while not channel.send(topic, data):
        assert time.monotonic() < deadline, "the topic takes nothing"
        channel.wait(0.001)


# --- files ---


def test_folder_and_sockets_are_private(channel, tmp_path):
    """No other user can connect, or put a socket of his own in the place."""
    folder = tmp_path / "run"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in ("submit.sock", "publish.sock", "submit.sock.lock", "publish.sock.lock"):
        assert stat.S_IMODE((folder / name).stat().st_mode) & 0o077 == 0, name


def test_closing_removes_the_sockets_and_frees_the_place(endpoints, tmp_path):
    """Another worker can follow at once."""
    for _ in range(2):
        with opened(*endpoints):
            assert (tmp_path / "run" / "submit.sock").exists()
        assert not list((tmp_path / "run").glob("*.sock"))


@pytest.mark.parametrize("taken", ["submit_endpoint", "publish_endpoint"])
def test_a_place_that_is_taken_is_refused(channel, context, endpoints, tmp_path, taken):
    """Either endpoint; the error names the setting, and the worker that is there keeps working."""
    other = f"ipc://{tmp_path}/other.sock"
    mine = (endpoints[0], other) if taken == "submit_endpoint" else (other, endpoints[1])
    with pytest.raises(ConfigError, match=f"another worker .process {os.getpid()}. is running") as caught:
        Channel(*mine)
    assert caught.value.key == taken
    with opened(other, f"ipc://{tmp_path}/third.sock"):
        pass
    push = context.socket(zmq.PUSH)
    push.connect(endpoints[0])
    push.send(b"hello")
    channel.wait(WAIT_S)
    assert list(channel.receive(10)) == [b"hello"]


def test_one_path_for_both_is_refused(tmp_path):
    """A worker cannot have requests and tokens in one place."""
    with pytest.raises(ConfigError) as caught:
        Channel(f"ipc://{tmp_path}/x.sock", f"ipc://{tmp_path}/x.sock")
    assert caught.value.key == "publish_endpoint"


def test_a_dead_workers_socket_is_replaced(endpoints, tmp_path):
    """A file without a lock on it is left over."""
    (tmp_path / "run").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(endpoints[0].removeprefix("ipc://"))
    with opened(*endpoints):
        pass


def test_a_file_that_is_no_socket_is_left_alone(endpoints, tmp_path):
    """A wrong path in the configuration must not cost the user a file."""
    precious = tmp_path / "run" / "submit.sock"
    precious.parent.mkdir(mode=0o700)
    precious.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        Channel(*endpoints)
    assert precious.read_text() == "precious"


def test_a_folder_that_others_can_write_is_refused(endpoints, tmp_path):
    """Anyone could put a socket there and read the prompts."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    with pytest.raises(ConfigError, match="other users"):
        Channel(*endpoints)


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    """The setting and the path are named."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"submit_endpoint: .*file"):
        Channel(f"ipc://{tmp_path}/file/submit.sock", f"ipc://{tmp_path}/publish.sock")


def test_a_busy_tcp_port_is_a_clear_error():
    """The setting and the address are named."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"publish_endpoint: cannot bind tcp://127.0.0.1:{port}"):
            Channel(f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{port}")


# --- sockets ---


def test_the_bell_wakes_the_waiter(channel):
    """From any thread, any number of times, before the wait or after the close."""
    for _ in range(100_000):
        channel.ring()
    started_s = time.monotonic()
    channel.wait(WAIT_S)
    assert time.monotonic() - started_s < WAIT_S / 2, "the bell was not heard"
    channel.close(0.0)
    channel.ring()
    channel.close = lambda linger_s: None


def test_messages_of_many_parts_are_no_messages(channel, context, endpoints):
    """They arrive as nothing that a decoder takes; the ones after them are whole."""
    push = context.socket(zmq.PUSH)
    push.connect(endpoints[0])
    push.send_multipart([b"a", b"b"])
    push.send(b"c")
    received: list[bytes] = []
    deadline = time.monotonic() + WAIT_S
    while len(received) < 2:
        assert time.monotonic() < deadline
        channel.wait(0.1)
        received += channel.receive(10)
    assert received == [b"", b"c"]


def test_subscribers_are_counted_by_topic(channel, context, endpoints):
    """A process that reconnects may come again before it has gone: in between it is not gone."""
    topic = new_topic()
    old = listener(context, endpoints[1], topic)
    assert subscribed(channel, 1) == [Subscription(topic, True)]
    new = listener(context, endpoints[1], topic)
    assert subscribed(channel, 1) == [Subscription(topic, True)]
    old.close(linger=0)
    channel.wait(0.3)
    assert channel.take_subscriptions() == []
    assert channel.send(topic, b"x")
    assert new.poll(WAIT_S * 1000)
    new.close(linger=0)
    assert subscribed(channel, 1) == [Subscription(topic, False)]


@pytest.mark.parametrize("prefix", ["", "p/", "hb/"])
def test_nobody_listens_to_everything(channel, context, endpoints, prefix):
    """Output goes to the one process it is for; and one that takes nothing cannot hold up the others this way."""
    eavesdropper = listener(context, endpoints[1], prefix, hwm=1)
    topic = new_topic()
    sub = listener(context, endpoints[1], topic)
    assert subscribed(channel, 1) == [Subscription(topic, True)]
    for _ in range(50 * SEND_HWM_MESSAGES):
        send(channel, topic, b"x" * 1000)
        assert sub.poll(WAIT_S * 1000)
        sub.recv_multipart()
    assert not eavesdropper.poll(100)


def test_a_full_queue_fails_its_own_sends_only(channel, context, endpoints):
    """Send returns at once with False, nothing of it leaves, and later it works again, in order."""
    topics = [new_topic(), new_topic()]
    stuck, healthy = (listener(context, endpoints[1], topic, hwm=1) for topic in topics)
    subscribed(channel, 2)
    count = 0
    full_since_s = time.monotonic()
    while time.monotonic() - full_since_s < 0.3:  # what ZeroMQ has taken still moves on into the kernel for a moment
        if channel.send(topics[0], str(count).encode() + b" " * 4096):
            count += 1
            full_since_s = time.monotonic()
        channel.wait(0.001)
        assert count < 10_000, "the queue has no end"
    for _ in range(1000):
        assert not channel.send(topics[0], b"lost")
        send(channel, topics[1], b"x")
        assert healthy.poll(WAIT_S * 1000)
        healthy.recv_multipart()
    received = []
    while len(received) < count:
        assert stuck.poll(WAIT_S * 1000), f"{len(received)} of {count} arrived"
        received.append(int(stuck.recv_multipart()[1]))
    assert received == list(range(count))
    send(channel, topics[0], b"again")
    assert stuck.poll(WAIT_S * 1000)
    assert stuck.recv_multipart() == [topics[0].encode(), b"again"]
