"""A worker process over real ZeroMQ, with the real engine and a runner that has no model."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import ErrorCode
from common.wire import Failed, Finished, Submit, encode
from tests.support.fake_runner import expected_tokens
from tests.support.fake_worker import start_fake_worker
from tests.support.processes import ROOT
from tests.support.wire_client import PROMPT, WAIT_S, Answer, WireClient, start_wire_client

pytestmark = pytest.mark.timeout(120)

VOCAB_SIZE = 1000
EXIT_S = 10.0


class Rig:
    """The processes and clients of one test; all are ended with it."""

    def __init__(self, folder: Path):
        self.folder = folder / "run"
        self.endpoints = (f"ipc://{self.folder}/submit.sock", f"ipc://{self.folder}/publish.sock")
        self._processes: list[subprocess.Popen[str]] = []
        self._clients: list[WireClient] = []

    def worker(self, **settings: Any) -> subprocess.Popen[str]:
        return self._keep(start_fake_worker(*self.endpoints, **settings))

    def client(self, **settings: Any) -> WireClient:
        client = WireClient(*self.endpoints, **settings)
        self._clients.append(client)
        return client

    def client_process(self, max_tokens: int) -> subprocess.Popen[str]:
        """A client with one request in a process of its own, at a moment when tokens are arriving."""
        process = self._keep(start_wire_client(*self.endpoints, max_tokens))
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        return process

    def _keep(self, process: subprocess.Popen[str]) -> subprocess.Popen[str]:
        self._processes.append(process)
        return process

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    with contextlib.closing(rig):
        yield rig


def expect_whole(client: WireClient, id: str, prompt_ids: list[int], count: int) -> None:
    """The request has ended once, with every token."""
    answer = client.answers[id]
    assert answer.ids == expected_tokens(prompt_ids, count, VOCAB_SIZE)
    (end,) = answer.ends
    assert isinstance(end, Finished)
    assert (end.reason, end.usage.completion_tokens) == ("length", count)


def failure(client: WireClient, id: str) -> Failed:
    (end,) = client.answers[id].ends
    assert isinstance(end, Failed)
    return end


# --- nothing is lost ---


def test_late_subscriber_loses_nothing(rig):
    """A request that is over before its process listens is told from the first token on."""
    rig.worker()
    watcher, late = rig.client(), rig.client(listen=False)
    watcher.until_ready()
    id = late.submit([1, 2], 200)
    watcher.until_beat(generated_tokens=200)
    late.listen()
    late.until_ended(id)
    expect_whole(late, id, [1, 2], 200)
    assert late.answers[id].accepted == 1
    assert late.seq == 1, "what was held did not leave as one batch"


def test_burst_to_a_slow_reader_arrives_complete(rig):
    """50,000 tokens are made, in more batches than any queue holds, before the process reads the first."""
    rig.worker(step_delay_s=0.0001)  # enough that each step is a batch of its own until the queues are full
    watcher, slow = rig.client(), rig.client(receive_hwm=10)
    watcher.until_ready()
    ids = [slow.submit([n], 12_500) for n in range(1, 5)]
    watcher.until_beat(generated_tokens=50_000)
    slow.until_ended(*ids)
    for n, id in enumerate(ids, start=1):
        expect_whole(slow, id, [n], 12_500)
        assert (slow.answers[id].holes, slow.answers[id].repeated) == (0, 0)
    watcher.until(lambda: watcher.beat.counters["batches"] == slow.seq, "the count of batches")
    assert watcher.beat.counters["blocked_sends"] > 0, "the queues were never full, so this showed nothing"
    assert slow.seq < 12_500, "nothing was merged"


def test_frozen_subscriber_misses_nothing_and_slows_nobody(rig):
    """A process is stopped for 3 s amid its stream. Another one's request begins and ends in that time."""
    rig.worker(step_delay_s=0.001)
    other = rig.client()
    other.until_ready()
    frozen = rig.client_process(max_tokens=4000)
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s:
            id = other.submit([9], 100)
            other.until_ended(id)
            expect_whole(other, id, [9], 100)
        other.until(lambda: other.beat.counters["blocked_sends"] > 0, "a full queue of the frozen process")
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    output, _ = frozen.communicate(timeout=60)
    seen = json.loads(output)
    assert seen == {"ids": expected_tokens(PROMPT, 4000, VOCAB_SIZE), "holes": 0, "ends": 1}


def test_reconnecting_subscriber_loses_nothing(rig):
    """What is lost with a connection is told again on request, and its requests go on meanwhile."""
    rig.worker(step_delay_s=0.002, subscriber_grace_s=10)
    client = rig.client()
    client.until_ready()
    id = client.submit([5], 600)
    answer = client.answers[id]
    for at in (20, 200):
        client.until(lambda at=at: len(answer.ids) > at, "some tokens")
        client.stop_listening()
        time.sleep(0.1)
        client.listen()
        client.until(lambda: client.beat.seq == client.seq, "a heartbeat after the last batch")
        client.resync()
    client.until(lambda: answer.holes or answer.ends, "what follows the gap")
    while not answer.ends or len(answer.ids) < 600:
        client.resync()
        client.receive(0.2)
    assert answer.ids == expected_tokens([5], 600, VOCAB_SIZE)
    assert all(end == answer.ends[0] for end in answer.ends)
    assert client.beat.counters["cancelled"] == 0


def test_frozen_worker_blames_nobody(rig):
    """Time in which the worker itself was stopped does not count against a process that was stuck at that moment."""
    worker = rig.worker(step_delay_s=0.001, stuck_limit_s=1.5, heartbeat_interval_s=0.05)
    watcher = rig.client()
    watcher.until_ready()
    stuck = rig.client_process(max_tokens=4000)
    os.kill(stuck.pid, signal.SIGSTOP)
    watcher.until(lambda: watcher.beat.counters["blocked_sends"] > 0, "a full queue")
    os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(2.0)
    os.kill(worker.pid, signal.SIGCONT)
    time.sleep(0.2)
    os.kill(stuck.pid, signal.SIGCONT)
    output, _ = stuck.communicate(timeout=60)
    assert json.loads(output) == {"ids": expected_tokens(PROMPT, 4000, VOCAB_SIZE), "holes": 0, "ends": 1}
    watcher.until_beat(finished_length=1, cancelled=0)


# --- processes that go ---


def test_killed_subscriber_frees_its_requests(rig):
    """Its requests, and only its, are cancelled after the grace, and their blocks are free."""
    rig.worker(step_delay_s=0.005, subscriber_grace_s=0.3)
    other = rig.client()
    other.until_ready()
    id = other.submit([7], 50_000)
    doomed = [rig.client_process(max_tokens=50_000) for _ in range(2)]
    other.until_beat(running=3)
    for process in doomed:
        os.kill(process.pid, signal.SIGKILL)
    other.until_beat(running=1, waiting=0, cancelled=2, lost_subscribers=2)
    assert not other.answers[id].ends
    other.cancel(id)
    other.until_ended(id)
    other.until_idle()


def test_subscriber_frozen_past_the_limit_has_its_requests_cancelled(rig):
    """It may not hold blocks and memory for ever. When it wakes up, it learns that its request is gone."""
    rig.worker(step_delay_s=0.0005, stuck_limit_s=0.5)
    other = rig.client()
    other.until_ready()
    frozen = rig.client_process(max_tokens=99_000)
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        other.until_beat(stuck_subscribers=1, cancelled=1)
        other.until_idle()
    finally:
        os.kill(frozen.pid, signal.SIGCONT)


def test_a_process_that_never_listens_is_given_up(rig):
    """Its request does not run for ever: nobody would ever read it."""
    rig.worker(step_delay_s=0.005)
    watcher, deaf = rig.client(), rig.client(listen=False)
    watcher.until_ready()
    deaf.submit([1], 90_000)
    watcher.until_beat(running=1)
    watcher.until_beat(cancelled=1, running=0, kv_blocks_used=0)


# --- messages repeated, broken, unexpected ---


def test_repeated_submit_runs_once(rig):
    """The same request sent six times is accepted once, computed once, and its tokens form one answer."""
    rig.worker(step_delay_s=0.002)
    client = rig.client()
    client.until_ready()
    id = client.submit([1, 2, 3], 300)
    for at in (0, 10, 50, 150, 299):
        client.until(lambda at=at: len(client.answers[id].ids) > at, "some tokens")
        client.submit([1, 2, 3], 300, id)
    client.until_ended(id)
    client.until_beat(repeated_submits=5)
    answer = client.answers[id]
    assert answer.ids == expected_tokens([1, 2, 3], 300, VOCAB_SIZE)
    assert answer.repeated > 0
    assert answer.holes == 0
    assert all(end == answer.ends[0] for end in answer.ends)
    assert (client.beat.counters["accepted"], client.beat.counters["generated_tokens"]) == (1, 300)


def test_garbage_is_counted_and_harmless(rig):
    """Random bytes, broken messages, many parts, and a peer that does not speak ZeroMQ, amid a stream."""
    rig.worker(step_delay_s=0.002)
    client = rig.client()
    client.until_ready()
    id = client.submit([4], 500)
    rng = random.Random(1)
    good = encode(Submit("x", client.topic, [1], None, 1))  # type: ignore[arg-type]
    for _ in range(300):
        client.send_parts(rng.randbytes(rng.randint(0, 300)))
        client.send_parts(good[: rng.randrange(len(good))])
    client.send_parts(b"a", b"b", encode(Submit("x", client.topic, [1], None, 1)))  # type: ignore[arg-type]
    for endpoint in rig.endpoints:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(endpoint.removeprefix("ipc://"))
            with contextlib.suppress(OSError):
                stranger.sendall(rng.randbytes(10_000))
    client.until_ended(id)
    expect_whole(client, id, [4], 500)
    # The stranger's bytes may pass for messages of the oldest ZeroMQ protocol; then they are counted, too.
    client.until(lambda: client.beat.counters["malformed_messages"] >= 601, "the count of malformed messages")
    assert client.beat.counters["accepted"] == 1


def test_unknown_requests_are_answered(rig):
    """A cancel of one is nothing; a resync of one says that it is unknown and may be tried again."""
    rig.worker()
    client = rig.client()
    client.until_ready()
    client.cancel("nobody")
    client.answers["lost"] = Answer()
    client.resync()
    client.until_ended("lost")
    assert (failure(client, "lost").code, failure(client, "lost").retryable) == (ErrorCode.UNKNOWN_REQUEST, True)


def test_a_refused_request_says_why(rig):
    """Too long, and too many waiting: the code tells which, and whether trying again can help."""
    rig.worker(step_delay_s=0.005, max_model_len=100, max_queued_requests=1, max_batch_size=1)
    client = rig.client()
    client.until_ready()
    long = client.submit([1] * 90, 20)
    running = client.submit([1], 99)
    client.until(lambda: client.answers[running].ids, "the first token")
    waiting = client.submit([1], 1)
    client.until(lambda: client.answers[waiting].accepted, "a place in the queue")
    full = client.submit([1], 1)
    client.until_ended(long, running, waiting, full)
    assert failure(client, long).code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert (failure(client, full).code, failure(client, full).retryable) == (ErrorCode.QUEUE_FULL, True)
    expect_whole(client, waiting, [1], 1)


# --- start and stop ---


def test_heartbeats_while_the_model_loads(rig):
    """Web can say why it is not ready; a request that comes too early is refused, not lost."""
    rig.worker(load_delay_s=1.0)
    client = rig.client()
    client.until(lambda: client.beat, "a heartbeat")
    assert (client.beat.state, client.beat.model) == ("loading", None)
    early = client.submit([1], 1)
    client.until_ended(early)
    assert (failure(client, early).code, failure(client, early).retryable) == (ErrorCode.NOT_READY, True)
    client.until_ready()
    assert client.beat.model is not None
    assert client.beat.model.vocab_size == VOCAB_SIZE
    id = client.submit([1], 3)
    client.until_ended(id)
    expect_whole(client, id, [1], 3)
    assert client.states == ["loading", "ready"]


def test_heartbeats_go_on_during_a_long_step(rig):
    """They come from another thread than the steps, and say how long the step has been running."""
    rig.worker(step_delay_s=3.0)
    client = rig.client()
    client.until_ready()
    client.submit([1], 1)
    client.until(lambda: client.beat.step_age_s > 1.0, "a heartbeat amid the step")
    assert client.beat.step == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_every_request_and_exits_with_0(rig, number):
    """Running or waiting, of any process: each is told that it ended, and the worker leaves nothing behind."""
    worker = rig.worker(step_delay_s=0.005, max_batch_size=2)
    clients = [rig.client(), rig.client()]
    for client in clients:
        client.until_ready()
    ids = [[client.submit([n], 90_000) for n in range(1, 4)] for client in clients]
    clients[0].until_beat(running=2, waiting=4)
    worker.send_signal(number)
    for client, theirs in zip(clients, ids, strict=True):
        client.until_ended(*theirs)
        for id in theirs:
            assert client.answers[id].accepted == 1
            assert (failure(client, id).code, failure(client, id).retryable) == (ErrorCode.WORKER_LOST, True)
            assert client.answers[id].holes == 0
    assert worker.wait(EXIT_S) == 0
    assert clients[0].states[-1] == "draining"
    assert sorted(path.name for path in rig.folder.iterdir()) == ["publish.sock.lock", "submit.sock.lock"]


def test_a_signal_during_a_step_that_hangs(rig):
    """The step cannot be interrupted; its request is told so by the io thread, and the process exits with 0."""
    worker = rig.worker(step_delay_s=60)
    client = rig.client()
    client.until_ready()
    id = client.submit([1], 5)
    client.until(lambda: client.beat.step_age_s > 0, "a step in flight")
    worker.send_signal(signal.SIGTERM)
    client.until_ended(id)
    assert failure(client, id).code is ErrorCode.WORKER_LOST
    assert worker.wait(EXIT_S) == 0


def test_a_signal_while_loading(rig):
    """Loading takes long and cannot be interrupted; the process ends all the same."""
    worker = rig.worker(load_delay_s=60)
    client = rig.client()
    client.until(lambda: client.beat, "a heartbeat")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(EXIT_S) == 0


def test_a_stuck_subscriber_does_not_hold_up_the_end(rig):
    """What cannot be sent is given up after a moment."""
    worker = rig.worker(step_delay_s=0.0005)
    other = rig.client()
    other.until_ready()
    frozen = rig.client_process(max_tokens=99_000)
    os.kill(frozen.pid, signal.SIGSTOP)
    other.until(lambda: other.beat.counters["blocked_sends"] > 0, "a full queue")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(EXIT_S) == 0


def test_a_broken_engine_ends_the_process_with_its_own_code(rig):
    """Step after step raises: each request is told, and a supervisor can tell this end from others."""
    worker = rig.worker(raise_on=[666])
    client = rig.client()
    client.until_ready()
    good = client.submit([1], 5)
    client.until_ended(good)
    ids = []
    for _ in range(8):
        ids.append(client.submit([666], 5))
        client.until_ended(ids[-1])
        assert failure(client, ids[-1]).code is ErrorCode.INTERNAL_ERROR
    assert worker.wait(EXIT_S) == 3


def test_a_step_that_raises_fails_its_requests_only(rig):
    """Serving goes on, and nothing is held."""
    rig.worker(raise_on=[666])
    client = rig.client()
    client.until_ready()
    for _ in range(20):
        bad = client.submit([666], 5)
        client.until_ended(bad)
        good = client.submit([1], 5)
        client.until_ended(good)
        assert failure(client, bad).code is ErrorCode.INTERNAL_ERROR
        expect_whole(client, good, [1], 5)
    client.until_idle()


def test_a_killed_worker_can_be_started_again(rig):
    """The files it left are no obstacle, and the same clients reach the new one."""
    first = rig.worker()
    client = rig.client()
    client.until_ready()
    first.kill()
    first.wait()
    assert (rig.folder / "submit.sock").exists()
    rig.worker()
    client.until(lambda: len(client.incarnations) == 2 and client.beat.state == "ready", "the new worker")
    id = client.submit([1], 5)
    client.until_ended(id)
    expect_whole(client, id, [1], 5)


def tokenloom_worker(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run the worker command to its end."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TOKENLOOM_")} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "cli", "worker", *flags]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_a_second_worker_at_the_same_place_is_refused(rig):
    """With one line that names the setting and the process, and exit code 2; the first one is unharmed."""
    first = rig.worker(step_delay_s=0.002)
    client = rig.client()
    client.until_ready()
    id = client.submit([1], 300)
    flags = ["--submit-endpoint", rig.endpoints[0], "--publish-endpoint", rig.endpoints[1]]
    second = tokenloom_worker(*flags, "--model", "qwen2.5-coder-0.5b-instruct")
    assert second.returncode == 2
    assert second.stderr.strip().count("\n") == 0, second.stderr
    assert "--submit-endpoint: another worker" in second.stderr
    assert str(first.pid) in second.stderr
    client.until_ended(id)
    expect_whole(client, id, [1], 300)


def test_a_model_that_is_not_there_is_one_line_and_exit_code_2(rig):
    """No traceback, and the endpoints are free again."""
    flags = ["--submit-endpoint", rig.endpoints[0], "--publish-endpoint", rig.endpoints[1]]
    for _ in range(2):
        result = tokenloom_worker(*flags, "--model", "no-such-model")
        assert result.returncode == 2
        assert "no-such-model" in result.stderr.splitlines()[-1]
        assert "Traceback" not in result.stderr
