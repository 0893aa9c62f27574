"""What breaks between web and worker: killed, frozen and restarted processes, and clients that leave."""

import http.client
import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.link_rig import MakeRig, check_whole, rig_maker
from tests.support.processes import wait_for

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(params=["gevent", "gthread"])
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeRig]:
    yield from rig_maker(tmp_path, request.param)


def hang_up(connection: http.client.HTTPConnection) -> None:
    assert connection.sock is not None
    connection.sock.close()


# --- processes that die or freeze ---


def test_killed_web_process_leaves_nothing_in_the_worker(make_rig: MakeRig) -> None:
    """kill -9 of a web process in the middle of streams: the worker frees everything, and its successor serves."""
    rig = make_rig(worker={"step_delay_s": 0.01, "max_batch_size": 4})
    streams = [rig.stream([number], 3000).read(2) for number in range(4)]
    queued = rig.ask([9], 3000)
    rig.observer.wait_until(running=4, waiting=1)
    killed = rig.web_process
    killed.kill()
    rig.observer.wait_idle()
    for stream in streams:
        stream.leave()
    queued.close()
    wait_for(lambda: rig.state().get("pid", killed.pid) != killed.pid, 20, "a new web process")
    rig.wait_ready()
    check_whole(rig.stream([1], 5).read(), [1], 5)


def test_frozen_web_process_misses_no_token(make_rig: MakeRig) -> None:
    """SIGSTOP of a web process for 5 s in the middle of streams: afterwards not one token is missing.

    The worker makes more meanwhile than fits on the way, so its sends to this process block for a while.
    """
    rig = make_rig(worker={"step_delay_s": 0.001})
    streams = [rig.stream([number], 5000) for number in range(8)]
    readers = [threading.Thread(target=stream.read) for stream in streams]
    for reader in readers:
        reader.start()
    wait_for(lambda: all(len(stream.ids[0]) > 20 for stream in streams), 20, "streams that run")
    rig.signal_web(signal.SIGSTOP)
    time.sleep(5)
    assert not any(stream.done for stream in streams)
    assert rig.observer.heartbeat().counters["blocked_sends"] > 0
    rig.signal_web(signal.SIGCONT)
    for reader in readers:
        reader.join(60)
    for number, stream in enumerate(streams):
        check_whole(stream, [number], 5000)
    rig.observer.wait_idle()
    check_whole(rig.stream([1], 5).read(), [1], 5)


def test_frozen_worker_costs_a_pause(make_rig: MakeRig) -> None:
    """SIGSTOP of the worker for longer than the heartbeat timeout: new requests are refused, open streams go on."""
    rig = make_rig(web={"heartbeat_timeout_s": 0.5}, worker={"step_delay_s": 0.005})
    stream = rig.stream([3], 400).read(10)
    assert rig.worker is not None
    rig.worker.send_signal(signal.SIGSTOP)
    wait_for(lambda: not rig.ready(), 10, "an unready web process")
    assert rig.ask([1], 5).getresponse().status == 503
    rig.worker.send_signal(signal.SIGCONT)
    check_whole(stream.read(), [3], 400)
    rig.wait_ready()


def test_restarted_worker_serves_without_a_restart_of_web(make_rig: MakeRig) -> None:
    """Worker killed and started again: open streams end with one error and [DONE], answers with a 503, and new
    requests work."""
    rig = make_rig(worker={"step_delay_s": 0.01, "max_batch_size": 3})
    streams = [rig.stream([number], 5000).read(2) for number in range(2)]
    unstreamed = rig.ask([5], 5000, stream=False)
    rig.observer.wait_until(running=3)
    rig.kill_worker()
    rig.start_worker()
    for stream in streams:
        stream.read()
        assert stream.ends == ["worker_lost"]
        assert stream.done
    answer = json.loads(unstreamed.getresponse().read())
    assert answer[-1]["error"] == "worker_lost"
    rig.wait_ready()
    check_whole(rig.stream([1], 50).read(), [1], 50)
    rig.observer.wait_idle()


def test_worker_that_stays_away_ends_streams_with_an_error(make_rig: MakeRig) -> None:
    """A worker that never comes back: each open stream ends with one error and [DONE], after the limit."""
    rig = make_rig(web={"heartbeat_timeout_s": 0.3}, worker={"step_delay_s": 0.01})
    stream = rig.stream([1], 5000).read(2)
    rig.kill_worker()
    stream.read()
    assert stream.ends == ["worker_lost"]
    assert stream.done


# --- clients that leave ---


def test_client_leaves_while_streaming(make_rig: MakeRig) -> None:
    """Between two tokens."""
    rig = make_rig(worker={"step_delay_s": 0.01})
    streams = [rig.stream([number], 50_000).read(2) for number in range(5)]
    for stream in streams:
        stream.leave()
    rig.observer.wait_idle()
    wait_for(lambda: rig.state()["open"] == 0, 10, "no open call")


def test_client_leaves_while_queued(make_rig: MakeRig) -> None:
    """In the queue, where nothing is written that could fail; the one that runs is not disturbed."""
    rig = make_rig(worker={"step_delay_s": 0.01, "max_batch_size": 1})
    running = rig.stream([1], 300).read(1)
    queued = [rig.ask([2], 300, stream=stream) for stream in (True, False)]
    rig.observer.wait_until(running=1, waiting=2)
    for connection in queued:
        hang_up(connection)
    rig.observer.wait_until(running=1, waiting=0)
    check_whole(running.read(), [1], 300)
    rig.observer.wait_idle()


def test_client_leaves_in_a_long_prefill(make_rig: MakeRig) -> None:
    """Before the first token, while the prompt is computed piece by piece."""
    rig = make_rig(worker={"step_delay_s": 0.05, "max_batch_tokens": 16})
    connections = [rig.ask([7] * 10_000, 10, stream=stream) for stream in (True, False)]
    wait_for(lambda: rig.observer.heartbeat().kv_blocks_used > 0, 20, "a prefill")
    for connection in connections:
        hang_up(connection)
    rig.observer.wait_idle()


def test_client_of_an_unstreamed_answer_leaves(make_rig: MakeRig) -> None:
    """In the middle of a generation of which nothing is sent before its end."""
    rig = make_rig(worker={"step_delay_s": 0.01})
    connections = [rig.ask([1], 50_000, stream=False, n=2) for _ in range(3)]
    rig.observer.wait_until(running=6)
    for connection in connections:
        hang_up(connection)
    rig.observer.wait_idle()


def test_waves_of_leaving_clients(make_rig: MakeRig) -> None:
    """Three waves of 50 streams, each left after its first token: nothing stays behind, and the next is served."""
    rig = make_rig(web={"web_threads": 64}, worker={"step_delay_s": 0.01})
    for _ in range(3):
        with ThreadPoolExecutor(50) as pool:
            streams = list(pool.map(lambda number: rig.stream([number], 50_000).read(1), range(50)))
        for stream in streams:
            stream.leave()
        rig.observer.wait_idle()
    check_whole(rig.stream([1], 5).read(), [1], 5)
    assert rig.state()["open"] == 0


# --- shutdown ---


def test_sigterm_lets_short_streams_end_and_cuts_long_ones_with_an_error(make_rig: MakeRig) -> None:
    """SIGTERM: a stream that ends within the grace is whole; a longer one ends with an error and [DONE]; exit 0; the
    worker is left with nothing. An idle kept-alive connection does not hold the process up."""
    rig = make_rig(web={"graceful_timeout_s": 2}, worker={"step_delay_s": 0.01})
    idle = rig.connect()
    idle.request("GET", "/state")
    idle.getresponse().read()
    short, long = rig.stream([1], 60).read(1), rig.stream([2], 50_000).read(1)
    assert rig.web is not None
    rig.web.terminate()
    readers = [threading.Thread(target=stream.read) for stream in (short, long)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    check_whole(short, [1], 60)
    assert long.ends == ["draining"]
    assert long.done
    assert rig.web.wait(20) == 0
    rig.observer.wait_idle()
    idle.close()


def test_sigint_ends_at_once(make_rig: MakeRig) -> None:
    """SIGINT to Gunicorn's master in the middle of streams: every process ends, exit 0, the worker is left idle."""
    rig = make_rig(worker={"step_delay_s": 0.01})
    streams = [rig.stream([number], 50_000).read(1) for number in range(3)]
    serving = rig.web_process
    assert rig.web is not None
    rig.web.send_signal(signal.SIGINT)
    assert rig.web.wait(20) == 0
    assert not serving.is_running()
    rig.observer.wait_idle()
    for stream in streams:
        stream.leave()


def test_killed_master_takes_its_processes_along(make_rig: MakeRig) -> None:
    """kill -9 of Gunicorn's master: the processes that served end too, and the worker is left with nothing."""
    rig = make_rig(web={"graceful_timeout_s": 1}, worker={"step_delay_s": 0.01})
    stream = rig.stream([1], 50_000).read(1)
    serving = rig.web_process
    assert rig.web is not None
    rig.web.kill()
    serving.wait(20)
    rig.observer.wait_idle()
    stream.leave()
