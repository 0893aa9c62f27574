"""The registry of open calls against a worker in memory, with a wire that loses, repeats and delays."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.config import WebConfig
from common.errors import ErrorCode, RequestError
from common.params import SamplingParams
from common.wire import (
    Accepted,
    Batch,
    Cancel,
    Failed,
    Finished,
    Have,
    Message,
    Resync,
    Submit,
    Tokens,
    Usage,
    decode_to_web,
    decode_to_worker,
    encode,
)
from tests.support.link_worker import ScriptedWorker, answer, heartbeat
from web.link.call import CallGroup, CallSpec
from web.link.registry import Registry

pytestmark = pytest.mark.timeout(60)

TOPIC = "p/0123456789abcdef/"


def spec(prompt_ids: list[int] | None = None, max_tokens: int = 4) -> CallSpec:
    return CallSpec(prompt_ids or [1, 2, 3], SamplingParams(), max_tokens)


class Bench:
    """A registry whose clock and wire the test holds."""

    def __init__(self, **settings: float):
        self.sent: list[Message] = []
        self.blocked = False
        self.now = 0.0
        self.registry = Registry(WebConfig(**settings), TOPIC, self._send)  # type: ignore[arg-type]

    def _send(self, message: Message) -> bool:
        if not self.blocked:
            self.sent.append(decode_to_worker(encode(message)))
        return not self.blocked

    def hear(self, *args: object, **kwargs: object) -> None:
        self.registry.take(heartbeat(*args, **kwargs))  # type: ignore[arg-type]

    def batch(self, seq: int, *events: object, incarnation: str = "first") -> None:
        self.registry.take(Batch(incarnation, seq, list(events)))  # type: ignore[arg-type]

    def pass_s(self, seconds: float, alive: bool = False, **beat: object) -> None:
        """Let time pass in small steps, with heartbeats when the worker is alive."""
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            self.registry.sweep(self.now, not self.blocked)
            if alive:
                self.hear(**beat)

    def ready(self) -> "Bench":
        self.hear()
        self.pass_s(0.1)
        return self

    def open(self, *specs: CallSpec) -> CallGroup:
        return self.registry.open(list(specs) or [spec()], "cmpl")

    def sent_of(self, kind: type) -> list[Message]:
        return [message for message in self.sent if isinstance(message, kind)]


@pytest.fixture
def bench() -> Bench:
    return Bench(accept_timeout_s=5, heartbeat_timeout_s=1, max_open_requests=4, ping_interval_s=5).ready()


def failure(group: CallGroup) -> Failed:
    """The Failed that ends a group of one."""
    events = [item for item in group.events() if item]
    assert isinstance(events[-1][1], Failed)
    return events[-1][1]


# --- readiness and local admission ---


@pytest.mark.parametrize(
    ("beat", "code", "word"),
    [
        (None, ErrorCode.NOT_READY, "not been heard"),
        ({"state": "loading"}, ErrorCode.NOT_READY, "loading"),
        ({"state": "draining"}, ErrorCode.DRAINING, "shutting down"),
        ({"step_age_s": 31.0}, ErrorCode.NOT_READY, "step has been running"),
    ],
)
def test_not_ready_is_refused_with_the_reason(beat: dict[str, object] | None, code: ErrorCode, word: str) -> None:
    """A call that the worker cannot run is refused at once, with what is the matter."""
    bench = Bench()
    if beat is not None:
        bench.hear(**beat)
    bench.pass_s(0.1)
    with pytest.raises(RequestError, match=word) as caught:
        bench.open()
    assert caught.value.code == code
    assert not bench.sent
    assert bench.registry.num_open == 0


def test_silence_makes_it_unready_and_a_heartbeat_ready_again(bench: Bench) -> None:
    """A worker that says nothing is not sent anything new; it needs no restart of the web process to come back."""
    bench.pass_s(1.5)
    with pytest.raises(RequestError, match="silent"):
        bench.open()
    bench.hear()
    bench.open()


def test_unconnected_wire_is_not_ready(bench: Bench) -> None:
    """Heartbeats can come before the way to the worker is open; until then a call would be lost."""
    bench.blocked = True
    bench.pass_s(0.2, alive=True)
    with pytest.raises(RequestError) as caught:
        bench.open()
    assert caught.value.code == ErrorCode.NOT_READY


def test_more_than_the_limit_is_refused_until_one_closes(bench: Bench) -> None:
    """Local admission counts calls, answers 429 beyond the limit, and frees the place on close."""
    groups = [bench.open(spec(), spec()), bench.open(), bench.open()]
    with pytest.raises(RequestError) as caught:
        bench.open()
    assert caught.value.code == ErrorCode.QUEUE_FULL
    groups[0].close()
    bench.open()
    assert bench.registry.num_open == 3


def test_a_group_larger_than_the_limit_can_never_run(bench: Bench) -> None:
    """What no retry can help is the client's error, not a 429."""
    with pytest.raises(RequestError) as caught:
        bench.open(*[spec()] * 5)
    assert caught.value.code == ErrorCode.INVALID_REQUEST


def test_send_that_would_block_refuses_and_leaves_nothing(bench: Bench) -> None:
    """When the queue to the worker is full in the middle of a group, what was sent of it is cancelled."""
    accepts = iter([True, False])
    original = bench._send
    bench.registry._send = lambda message: next(accepts, True) and original(message)
    with pytest.raises(RequestError) as caught:
        bench.open(spec(), spec())
    assert caught.value.code == ErrorCode.NOT_READY
    assert bench.registry.num_open == 0
    submitted = bench.sent_of(Submit)[0]
    assert submitted.id in [message.id for message in bench.sent_of(Cancel)]  # type: ignore[attr-defined, union-attr]


# --- acceptance ---


def test_missing_acceptance_sends_the_same_submit_again(bench: Bench) -> None:
    """A lost Submit is repaired by the very same message, so that nothing can run twice."""
    bench.open()
    bench.pass_s(2, alive=True)
    submits = bench.sent_of(Submit)
    assert len(submits) >= 2
    assert all(message == submits[0] for message in submits)


def test_acceptance_that_never_comes_is_an_error_and_a_cancel(bench: Bench) -> None:
    """After the limit the client gets a 503, and the worker is told in case it took the request after all."""
    group = bench.open()
    bench.pass_s(6, alive=True)
    with pytest.raises(RequestError) as caught:
        group.wait_accepted()
    assert caught.value.code == ErrorCode.NOT_READY
    assert bench.sent_of(Cancel) == [Cancel(group.ids[0], "the worker did not answer in time")]


def test_a_long_step_is_no_reason_to_give_up(bench: Bench) -> None:
    """An engine in a step that began earlier cannot have seen the request: the time is not held against it."""
    group = bench.open()
    for age in range(1, 81):  # a step that began just before the call and lasts 8 s
        bench.hear(step_age_s=age * 0.1 + 0.05)
        bench.pass_s(0.1)
    bench.batch(1, Accepted(group.ids[0]))
    group.wait_accepted()


def test_a_hung_step_is_given_up(bench: Bench) -> None:
    """A step that never ends does not keep a client waiting for ever."""
    group = bench.open()
    for age in range(1, 400):
        bench.hear(step_age_s=age * 0.1 + 0.05)
        bench.pass_s(0.1)
    with pytest.raises(RequestError):
        group.wait_accepted()


# --- repair ---


def accepted_group(bench: Bench, max_tokens: int = 4) -> CallGroup:
    group = bench.open(spec(max_tokens=max_tokens))
    bench.batch(1, Accepted(group.ids[0]), Tokens(group.ids[0], 0, [10]))
    return group


def test_heartbeat_ahead_of_what_came_asks_once_an_interval_until_repaired(bench: Bench) -> None:
    """A lost last batch shows in the heartbeat; the question is repeated, but not with every heartbeat."""
    group = accepted_group(bench)
    for _ in range(5):
        bench.hear(seq=2)
    bench.pass_s(0.1)
    assert bench.sent_of(Resync) == [Resync(TOPIC, "first", [Have(group.ids[0], 1)])]
    bench.pass_s(1.1, alive=True, seq=2)
    assert 2 <= len(bench.sent_of(Resync)) <= 3
    bench.batch(3, Tokens(group.ids[0], 1, [11]))
    asked = len(bench.sent_of(Resync))
    bench.pass_s(3, alive=True, seq=3)
    assert len(bench.sent_of(Resync)) == asked


def test_hole_in_sequence_numbers_asks_about_every_running_call(bench: Bench) -> None:
    """A lost batch may have held the end of a call that will never be heard of again otherwise."""
    ended, other = accepted_group(bench), bench.open()
    bench.batch(2, Accepted(other.ids[0]))
    # Batch 3, with the end of the first call, is lost.
    bench.batch(4, Tokens(other.ids[0], 0, [1]))
    bench.pass_s(0.1)
    assert bench.sent_of(Resync) == [Resync(TOPIC, "first", [Have(ended.ids[0], 1)])]
    bench.batch(5, Finished(ended.ids[0], "stop", Usage(3, 1)))
    assert len(list(ended.events())) == 2


def test_hole_in_positions_asks_for_what_is_missing(bench: Bench) -> None:
    """Positions show a hole even when the sequence numbers do not."""
    group = accepted_group(bench)
    bench.batch(2, Tokens(group.ids[0], 3, [13]))
    bench.pass_s(0.1)
    assert bench.sent_of(Resync) == [Resync(TOPIC, "first", [Have(group.ids[0], 1)])]
    usage = Usage(3, 4)
    bench.batch(3, Tokens(group.ids[0], 1, [11, 12, 13]), Finished(group.ids[0], "length", usage))
    received = [event for _, event in group.events()]  # type: ignore[misc]
    assert [one for event in received if isinstance(event, Tokens) for one in event.ids] == [10, 11, 12, 13]
    assert received[-1] == Finished(group.ids[0], "length", usage)


def test_nothing_missing_asks_nothing(bench: Bench) -> None:
    """An undisturbed stream costs no repair."""
    group = accepted_group(bench)
    for seq in range(2, 5):
        bench.hear(seq=seq - 1)
        bench.batch(seq, Tokens(group.ids[0], seq - 1, [seq]))
        bench.hear(seq=seq)
        bench.pass_s(0.2)
    assert bench.sent_of(Resync) == []


def test_unknown_ids_and_repeated_batches_are_harmless(bench: Bench) -> None:
    """Events of calls that were closed, and batches that come twice, change nothing."""
    group = accepted_group(bench)
    bench.batch(1, Accepted(group.ids[0]), Tokens(group.ids[0], 0, [10]))
    bench.batch(2, Tokens("another-1", 0, [1]), Failed("another-2", ErrorCode.QUEUE_FULL, ""))
    assert next(group.events()) == (0, Tokens(group.ids[0], 0, [10]))


def test_a_call_the_worker_has_forgotten_does_not_wait_for_ever(bench: Bench) -> None:
    """A running call that hears nothing for long is asked about, once an interval, and learns the truth."""
    group = accepted_group(bench)
    bench.pass_s(9, alive=True, seq=1)
    assert bench.sent_of(Resync) == []
    bench.pass_s(2, alive=True, seq=1)
    assert bench.sent_of(Resync)
    bench.batch(2, Failed(group.ids[0], ErrorCode.UNKNOWN_REQUEST, "unknown"))
    assert failure(group).code == ErrorCode.UNKNOWN_REQUEST


# --- the worker's lives ---


def test_restarted_worker_ends_what_ran_and_gets_what_was_not_accepted(bench: Bench) -> None:
    """Running calls end with one error; a call the old worker never confirmed simply runs on the new one."""
    running = accepted_group(bench)
    waiting = bench.open()
    bench.sent.clear()
    bench.hear(incarnation="second")
    assert failure(running).code == ErrorCode.WORKER_LOST
    assert [message.id for message in bench.sent_of(Submit)] == waiting.ids  # type: ignore[attr-defined, union-attr]
    bench.batch(1, Accepted(waiting.ids[0]), incarnation="second")
    waiting.wait_accepted()


def test_late_words_of_a_dead_worker_are_ignored(bench: Bench) -> None:
    """A message of the earlier life that arrives after the new one spoke must not count as yet another restart."""
    bench.hear(incarnation="second")
    group = bench.open()
    bench.batch(1, Accepted(group.ids[0]), incarnation="second")
    bench.hear(incarnation="first", seq=7)
    bench.batch(9, Tokens(group.ids[0], 0, [99]), incarnation="first")
    bench.batch(2, Tokens(group.ids[0], 0, [1]), incarnation="second")
    assert next(group.events()) == (0, Tokens(group.ids[0], 0, [1]))


def test_silence_ends_open_calls_only_after_a_longer_limit(bench: Bench) -> None:
    """A pause of the worker is survived; when it lasts, calls end with one error, and the worker is told."""
    group = accepted_group(bench)
    bench.pass_s(4)
    bench.hear(seq=1)
    bench.pass_s(4)
    assert not group.calls[0].done
    bench.pass_s(2)
    assert failure(group).code == ErrorCode.WORKER_LOST
    assert len(bench.sent_of(Cancel)) == 1


def test_new_requests_run_after_a_restart(bench: Bench) -> None:
    """The web process needs no restart when the worker had one."""
    bench.pass_s(3)
    bench.hear(incarnation="second", state="loading")
    with pytest.raises(RequestError):
        bench.open()
    bench.hear(incarnation="second")
    group = bench.open()
    bench.batch(1, Accepted(group.ids[0]), incarnation="second")
    group.wait_accepted()


# --- ending ---


def test_closing_a_live_call_cancels_it_once(bench: Bench) -> None:
    """Close may come twice and after a cancel; the worker hears one Cancel."""
    group = accepted_group(bench)
    group.client_gone()
    group.close()
    group.close()
    assert len(bench.sent_of(Cancel)) == 1
    assert bench.registry.num_open == 0


def test_a_client_that_left_takes_no_place_any_more(bench: Bench) -> None:
    """The place is free at once, also when the route never runs again to close the group."""
    group = accepted_group(bench)
    group.client_gone()
    assert bench.registry.num_open == 0
    assert bench.sent_of(Cancel) == [Cancel(group.ids[0], "the client left")]


def test_closing_a_finished_call_sends_nothing(bench: Bench) -> None:
    """The usual end needs no message."""
    group = accepted_group(bench)
    bench.batch(2, Finished(group.ids[0], "stop", Usage(3, 1)))
    group.close()
    assert bench.sent_of(Cancel) == []


def test_cancel_that_cannot_leave_is_sent_later(bench: Bench) -> None:
    """A full queue must not make the worker run an abandoned request to its end."""
    group = accepted_group(bench)
    bench.blocked = True
    group.close()
    bench.pass_s(0.3)
    bench.blocked = False
    bench.pass_s(0.1)
    assert len(bench.sent_of(Cancel)) == 1


def test_cancelled_call_still_gets_its_end_from_the_worker(bench: Bench) -> None:
    """After cancel(i), call i ends with Finished(cancelled) and the others go on."""
    group = bench.open(spec(), spec())
    bench.batch(1, *[Accepted(name) for name in group.ids])
    group.cancel(0, "stop string")
    bench.batch(2, Finished(group.ids[0], "cancelled", Usage(3, 0)), Finished(group.ids[1], "stop", Usage(3, 0)))
    assert [(index, event.reason) for index, event in group.events()] == [(0, "cancelled"), (1, "stop")]  # type: ignore


def test_unanswered_cancel_is_repeated(bench: Bench) -> None:
    """A Cancel, or its answer, that got lost does not leave the route waiting."""
    group = accepted_group(bench)
    group.cancel()
    bench.pass_s(1.3, alive=True, seq=1)
    assert len(bench.sent_of(Cancel)) >= 2
    assert bench.sent_of(Resync)


def test_call_cancelled_before_acceptance_ends_here_and_is_not_sent_again(bench: Bench) -> None:
    """The worker may never have seen it and so may never answer."""
    group = bench.open()
    group.cancel()
    assert [event.reason for _, event in group.events()] == ["cancelled"]  # type: ignore[misc, union-attr]
    bench.pass_s(2, alive=True)
    assert len(bench.sent_of(Submit)) == 1


def test_shutdown_ends_every_call_with_one_error(bench: Bench) -> None:
    """Running and waiting calls end with `draining`, the worker is told, new ones are refused."""
    running, waiting = accepted_group(bench), bench.open()
    error = RequestError(ErrorCode.DRAINING, "the server is shutting down")
    bench.registry.closing = error
    bench.registry.fail_all(error)
    assert failure(running).code == failure(waiting).code == ErrorCode.DRAINING
    assert len(bench.sent_of(Cancel)) == 2
    with pytest.raises(RequestError) as caught:
        bench.open()
    assert caught.value.code == ErrorCode.DRAINING


def test_silent_stream_is_pinged_once_an_interval(bench: Bench) -> None:
    """A ping comes after the interval without an event, and not while events come."""
    group = accepted_group(bench)
    events = group.events()
    next(events)
    for seq in range(2, 5):
        bench.pass_s(3, alive=True, seq=seq - 1)
        bench.batch(seq, Tokens(group.ids[0], seq - 1, [seq]))
        assert next(events) == (0, Tokens(group.ids[0], seq - 1, [seq]))
    bench.pass_s(5.2, alive=True, seq=4)
    assert next(events) is None


# --- everything at once ---


class LossyWire:
    """Carries messages between a registry and a scripted worker, and loses or repeats what it is told to."""

    def __init__(self) -> None:
        self.worker = ScriptedWorker()
        self.losing_up = False
        self.now = 0.0
        self.registry = Registry(WebConfig(accept_timeout_s=1000, heartbeat_timeout_s=1000), TOPIC, self._send)

    def _send(self, message: Message) -> bool:
        if not self.losing_up:
            self.worker.take(decode_to_worker(encode(message)))
        return True

    def deliver(self, message: object, times: int) -> None:
        for _ in range(times):
            self.registry.take(decode_to_web(encode(message)))  # type: ignore[arg-type]

    def step(self, times: int, beat: bool) -> None:
        """One step of the worker, whose batch arrives `times` times."""
        self.worker.step()
        batch = self.worker.batch()
        if batch:
            self.deliver(batch, times)
        if beat:
            self.deliver(self.worker.heartbeat(), 1)
        self.sweep()

    def sweep(self) -> None:
        self.now += 0.3
        self.registry.sweep(self.now, True)


MOVES = st.one_of(
    st.tuples(st.just("open"), st.integers(1, 12), st.booleans()),
    st.tuples(st.just("step"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("cancel"), st.integers(0, 20), st.booleans()),
    st.tuples(st.just("close"), st.integers(0, 20), st.booleans()),
    st.tuples(st.just("restart"), st.just(0), st.booleans()),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(moves=st.lists(MOVES, max_size=60))
def test_whatever_is_lost_every_call_ends_once_and_whole(moves: list[tuple[str, int, bool]]) -> None:
    """Random loss and repetition both ways, cancels, closes and restarts: each call that stays open gets exactly the
    tokens of its prompt from the first on, and one end; the worker is left with nothing."""
    wire = LossyWire()
    wire.deliver(wire.worker.heartbeat(), 1)
    wire.sweep()
    groups: list[CallGroup] = []
    closed: set[int] = set()
    for name, number, flag in moves:
        wire.losing_up = flag and name in ("open", "cancel")
        if name == "open":
            groups.append(wire.registry.open([spec([len(groups) + 1], number)], "cmpl"))
        elif name == "step":
            wire.step(number, flag)
        elif name == "cancel" and groups:
            groups[number % len(groups)].cancel()
        elif name == "close" and groups:
            groups[number % len(groups)].close()
            closed.add(number % len(groups))
        elif name == "restart":
            wire.worker = ScriptedWorker(incarnation=f"life-{wire.now}")
            wire.deliver(wire.worker.heartbeat(), 1)
    wire.losing_up = False
    for _ in range(60):
        wire.step(1, True)
    for index, group in enumerate(groups):
        if index not in closed:
            _assert_whole(group)
            group.close()
    assert wire.registry.num_open == 0
    assert wire.worker.num_live == 0


def _assert_whole(group: CallGroup) -> None:
    assert group.calls[0].done, "a call never ended"
    events = [item[1] for item in group.events() if item]
    ids = [one for event in events if isinstance(event, Tokens) for one in event.ids]
    assert ids == answer(group.calls[0].spec.prompt_ids, len(ids))
    end = events[-1]
    assert sum(not isinstance(event, Tokens) for event in events) == 1
    if isinstance(end, Finished):
        assert end.reason == "cancelled" or len(ids) == group.calls[0].spec.max_tokens
        assert end.usage.completion_tokens == len(ids)
    else:
        assert isinstance(end, Failed)
        assert end.code == ErrorCode.WORKER_LOST
