"""The link under real Gunicorn, in both worker classes, against a worker process over real ZeroMQ."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_runner import expected_tokens
from tests.support.link_rig import VOCAB_SIZE, MakeRig, Stream, check_whole, rig_maker
from tests.support.processes import wait_for

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["gevent", "gthread"])
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeRig]:
    yield from rig_maker(tmp_path, request.param)


def test_two_hundred_streams_at_once_are_each_whole(make_rig: MakeRig) -> None:
    """Every one of 200 concurrent streams of one process gets its own tokens, all of them, in order."""
    rig = make_rig(web={"web_threads": 220})
    streams: dict[int, Stream] = {}

    def one(number: int) -> None:
        streams[number] = rig.stream([number, 7], 40).read()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in range(200):
        check_whole(streams[number], [number, 7], 40)
    rig.observer.wait_idle()
    assert rig.state()["open"] == 0


def test_several_answers_in_one_stream(make_rig: MakeRig) -> None:
    """The calls of one group share a stream, each in order and with its own end."""
    check_whole(make_rig().stream([1, 2, 3], 20, n=3).read(), [1, 2, 3], 20, n=3)


def test_requests_that_come_early_on_a_kept_alive_connection_are_answered(make_rig: MakeRig) -> None:
    """Data of the next request arrives while the first is streamed: it is no hang-up, and is answered in turn."""
    rig = make_rig(worker={"step_delay_s": 0.01})
    body = json.dumps({"prompt_ids": [5], "max_tokens": 30, "stream": False})
    head = (
        f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", rig.port), timeout=20) as connection:
        connection.sendall((head + body).encode())
        rig.observer.wait_until(running=1)
        connection.sendall((head + body).encode())
        received = b""
        while received.count(b'"finish"') < 2:
            data = connection.recv(65536)
            assert data, received
            received += data
    assert received.count(b"HTTP/1.1 200") == 2
    assert json.dumps(expected_tokens([5], 30, VOCAB_SIZE)[-1]).encode() in received


def test_no_worker_is_503_and_a_late_one_is_used(make_rig: MakeRig) -> None:
    """While there is no worker every request is refused with 503, at once; when one comes nothing needs a restart."""
    rig = make_rig(web={"heartbeat_timeout_s": 0.5})
    rig.kill_worker()
    wait_for(lambda: not rig.ready(), 10, "an unready web process")
    for _ in range(3):
        assert rig.ask([1], 5).getresponse().status == 503
    rig.start_worker()
    rig.wait_ready()
    check_whole(rig.stream([1], 5).read(), [1], 5)
