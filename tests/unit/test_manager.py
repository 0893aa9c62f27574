"""The engine thread and the in-process manager, with the paged fake runner: real threads, no torch, no sockets."""

import contextlib
import threading
import time

import pytest

from common.errors import ErrorCode, RequestError
from common.params import SamplingParams
from common.wire import Submit
from tests.support.history_runner import VOCAB_SIZE, HistoryRunner, expected_tokens
from worker.engine import MAX_FAILED_STEPS, Engine
from worker.engine_thread import EngineThread
from worker.kv_cache import KVCacheManager
from worker.manager import ContinuousBatchingManager
from worker.scheduler import Scheduler, SchedulerConfig

WAIT_S = 20


class SlowRunner(HistoryRunner):
    """Takes `delay_s` a step; `gate`, when cleared, holds every step."""

    def __init__(self, num_blocks, block_size, delay_s=0.0):
        super().__init__(num_blocks, block_size)
        self.delay_s = delay_s
        self.gate = threading.Event()
        self.gate.set()

    def run(self, batch):
        assert self.gate.wait(WAIT_S)
        time.sleep(self.delay_s)
        return super().run(batch)


def make_engine(delay_s=0.0, num_blocks=256, max_model_len=1000):
    runner = SlowRunner(num_blocks, 4, delay_s)
    config = SchedulerConfig(64, 16, 1000, max_model_len, VOCAB_SIZE)
    return Engine(Scheduler(config, KVCacheManager(num_blocks, 4)), runner), runner


@pytest.fixture
def manager():
    engine, _ = make_engine(delay_s=0.0005)
    with ContinuousBatchingManager(engine) as manager:
        yield manager
    assert not [t for t in threading.enumerate() if t.name == "engine"]


def test_results_by_id(manager):
    ids = [manager.add_request([i, 2, 3], SamplingParams(seed=i), max_tokens=20) for i in range(30)]
    for i, request_id in reversed(list(enumerate(ids))):
        output = manager.get_result(request_id, WAIT_S)
        assert output.generated_tokens == expected_tokens([i, 2, 3], i, 20)
        assert output.finish_reason == "length"
        assert output.usage.completion_tokens == 20


def test_many_iterators_at_once_lose_nothing(manager):
    """Each reader sees every token of its own request, in order, however many read at the same time."""
    seen: dict[int, list[list[int]]] = {}

    def read(i, request_id):
        seen[i] = [output.generated_tokens for output in manager.request_id_iter(request_id)]

    threads = []
    for i in range(16):
        request_id = manager.add_request([i, 5], SamplingParams(seed=i), max_tokens=30)
        threads += [threading.Thread(target=read, args=(i + 100 * n, request_id)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    for key, outputs in seen.items():
        want = expected_tokens([key % 100, 5], key % 100, 30)
        assert outputs[-1] == want
        assert all(tokens == want[: len(tokens)] for tokens in outputs)


def test_an_iterator_waits_while_there_is_nothing():
    """No empty outputs and no early end while the first token is not there yet."""
    engine, runner = make_engine()
    runner.gate.clear()
    with ContinuousBatchingManager(engine) as manager:
        iterator = manager.request_id_iter(manager.add_request([1], SamplingParams(seed=1), max_tokens=2))
        got = []
        thread = threading.Thread(target=lambda: got.extend(iterator))
        thread.start()
        time.sleep(0.1)
        assert got == []
        runner.gate.set()
        thread.join(WAIT_S)
        assert got[-1].generated_tokens == expected_tokens([1], 1, 2)
        assert got[0].generated_tokens


def test_a_finished_request_can_be_read_again(manager):
    request_id = manager.add_request([1], SamplingParams(seed=1), max_tokens=2)
    first = manager.get_result(request_id, WAIT_S)
    assert manager.get_result(request_id, 0) == first
    assert list(manager.request_id_iter(request_id)) == [first]


def test_without_a_limit_the_rest_of_the_context_is_generated():
    engine, _ = make_engine(max_model_len=50)
    with ContinuousBatchingManager(engine) as manager:
        output = manager.get_result(manager.add_request([1] * 10, SamplingParams(seed=3)), WAIT_S)
    assert len(output.generated_tokens) == 40
    assert output.finish_reason == "length"


def test_what_cannot_be_served_ends_with_its_error(manager):
    output = manager.get_result(manager.add_request([VOCAB_SIZE + 5], max_tokens=3), WAIT_S)
    assert output.finish_reason == "error"
    assert output.error.code == ErrorCode.INVALID_REQUEST


def test_unknown_and_repeated_ids(manager):
    manager.add_request([1], request_id="mine", max_tokens=1)
    with pytest.raises(ValueError, match="mine"):
        manager.add_request([1], request_id="mine", max_tokens=1)
    with pytest.raises(KeyError):
        manager.get_result("nobody", 0)
    with pytest.raises(KeyError):
        manager.request_id_iter("nobody")
    manager.cancel("nobody")


def test_cancel_ends_one_request_only():
    engine, runner = make_engine()
    runner.gate.clear()
    with ContinuousBatchingManager(engine) as manager:
        a = manager.add_request([1], SamplingParams(seed=1), max_tokens=500)
        b = manager.add_request([2], SamplingParams(seed=2), max_tokens=5)
        manager.cancel(a)
        runner.gate.set()
        assert manager.get_result(a, WAIT_S).finish_reason == "cancelled"
        assert manager.get_result(b, WAIT_S).generated_tokens == expected_tokens([2], 2, 5)


def test_stop_with_requests_in_flight_leaves_nothing():
    """stop() ends the thread, every reader returns, and nothing of the manager stays behind."""
    threads_before = set(threading.enumerate())
    engine, _ = make_engine(delay_s=0.005)
    manager = ContinuousBatchingManager(engine)
    manager.start()
    ids = [manager.add_request([i], SamplingParams(seed=i), max_tokens=900) for i in range(20)]
    outputs = []
    readers = [threading.Thread(target=lambda i=i: outputs.extend(manager.request_id_iter(i))) for i in ids]
    for reader in readers:
        reader.start()
    assert manager.stop(timeout_s=2.0)
    for reader in readers:
        reader.join(WAIT_S)
    assert set(threading.enumerate()) == threads_before
    assert {manager.get_result(i, 0).finish_reason for i in ids} == {"cancelled"}
    with pytest.raises(RuntimeError):
        manager.add_request([1])
    assert manager.stop()


def test_stop_before_start_and_stop_twice():
    """A manager that never ran still ends what was added to it."""
    engine, _ = make_engine()
    manager = ContinuousBatchingManager(engine)
    request_id = manager.add_request([1], max_tokens=5)
    assert manager.stop()
    assert manager.get_result(request_id, 0).finish_reason == "cancelled"
    assert manager.stop()


def make_submit(request_id, max_tokens=9):
    return Submit(id=request_id, topic="", prompt_ids=[1], params=SamplingParams(), max_tokens=max_tokens)


def collect_events(engine):
    events = []
    return EngineThread(engine, events.extend), events


def test_stop_can_give_a_reason():
    """A worker that goes away tells its requests why, instead of pretending that the client cancelled."""
    engine, _ = make_engine(delay_s=0.005)
    thread, events = collect_events(engine)
    thread.start()
    thread.submit(make_submit("a", 900))
    assert thread.stop(WAIT_S, RequestError(ErrorCode.DRAINING, "going down"))
    assert events[-1].code == ErrorCode.DRAINING
    assert events[-1].retryable


def test_a_broken_engine_ends_with_an_answer_for_everyone():
    """When every step fails, requests get errors, then the thread ends by itself and says why."""
    engine, runner = make_engine()
    runner.run = lambda batch: 1 / 0
    thread, events = collect_events(engine)
    thread.start()
    deadline = time.monotonic() + WAIT_S
    submitted = []
    while thread.alive and time.monotonic() < deadline:
        with contextlib.suppress(RuntimeError):
            thread.submit(make_submit(f"r{len(submitted)}"))
            submitted.append(f"r{len(submitted)}")
        time.sleep(0.001)
    assert not thread.alive
    assert thread.failure is not None
    assert len(submitted) >= MAX_FAILED_STEPS
    assert [event.id for event in events if event.TYPE == "failed"] == submitted
    with pytest.raises(RuntimeError):
        thread.submit(make_submit("x", 9))


def test_step_age_shows_a_hung_step():
    engine, runner = make_engine()
    runner.gate.clear()
    thread, _ = collect_events(engine)
    thread.start()
    assert thread.step_age_s == 0
    thread.submit(make_submit("a", 1))
    deadline = time.monotonic() + WAIT_S
    while not thread.step_age_s and time.monotonic() < deadline:
        time.sleep(0.005)
    first = thread.step_age_s
    time.sleep(0.05)
    assert thread.step_age_s > first > 0
    runner.gate.set()
    assert thread.stop(WAIT_S)
    assert thread.step_age_s == 0


def test_acceptance_is_told_before_the_step():
    """A client learns that it was accepted or refused while the step is still being computed, not after it."""
    engine, runner = make_engine()
    runner.gate.clear()
    thread, events = collect_events(engine)
    thread.start()
    thread.submit(make_submit("a", 1))
    deadline = time.monotonic() + WAIT_S
    while not events and time.monotonic() < deadline:
        time.sleep(0.005)
    assert [event.TYPE for event in events] == ["accepted"]
    runner.gate.set()
    assert thread.stop(WAIT_S)
