"""What a web process is told, and when: the publisher with a clock and a wire that the test holds."""

import pytest

from common.errors import ErrorCode, RequestError
from common.params import SamplingParams
from common.wire import (
    Accepted,
    Batch,
    Event,
    Failed,
    Finished,
    Have,
    Logprobs,
    PromptLogprobs,
    Resync,
    Submit,
    Tokens,
    Usage,
)
from worker.publisher import Publisher, PublisherLimits

A, B = "p/aaaaaaaaaaaaaaaa/", "p/bbbbbbbbbbbbbbbb/"
LIFE = "this life"


def submit(id: str = "r", topic: str = A, generated_ids: list[int] | None = None) -> Submit:
    return Submit(id, topic, [1, 2], SamplingParams(), 100, generated_ids=generated_ids or [])


def finished(id: str = "r", reason: str = "length") -> Finished:
    return Finished(id, reason, Usage(2, 3))


class Bench:
    """A publisher and what left it, by topic. Sends to a topic in `blocked` fail."""

    def __init__(self, **limits: float):
        self.publisher = Publisher(LIFE, PublisherLimits(**limits))  # type: ignore[arg-type]
        self.sent: dict[str, list[Batch]] = {A: [], B: []}
        self.blocked: set[str] = set()
        self.now = 0.0

    def send(self, topic: str, batch: Batch) -> bool:
        if topic not in self.blocked:
            self.sent[topic].append(batch)
        return topic not in self.blocked

    def add(self, id: str = "r", topic: str = A) -> None:
        """Subscribe and submit, and have the engine accept."""
        self.publisher.subscribe(topic, self.now)
        assert self.publisher.submit(submit(id, topic), self.now)
        self.publisher.record([Accepted(id)])

    def step(self, *events: Event) -> None:
        self.publisher.record(list(events))
        self.publisher.flush(self.send, self.now)

    def resync(self, *have: Have, topic: str = A, incarnation: str = LIFE) -> None:
        self.publisher.resync(Resync(topic, incarnation, list(have)), self.now)
        self.publisher.flush(self.send, self.now)

    def pass_s(self, seconds: float) -> list[str]:
        self.now += seconds
        return self.publisher.expire(self.now)

    def take(self, topic: str = A) -> list[Event]:
        """What has been sent to a topic since the last call."""
        events = [event for batch in self.sent[topic] for event in batch.events]
        self.sent[topic].clear()
        return events


def test_one_batch_a_step_numbered_from_one():
    """All that happened to a topic's requests in one step travels together; seq has no holes."""
    bench = Bench()
    bench.add("r")
    bench.add("s")
    bench.step(Tokens("r", 0, [7]), Tokens("s", 0, [8]))
    bench.step(Tokens("r", 1, [9]))
    assert bench.sent[A] == [
        Batch(LIFE, 1, [Accepted("r"), Tokens("r", 0, [7]), Accepted("s"), Tokens("s", 0, [8])]),
        Batch(LIFE, 2, [Tokens("r", 1, [9])]),
    ]
    assert bench.publisher.subscribers() == [(A, 2)]


def test_topics_have_their_own_numbers():
    """A gap in one process's numbers must mean that this process missed something."""
    bench = Bench()
    bench.add("r", A)
    bench.add("s", B)
    bench.step(Tokens("r", 0, [1]))
    bench.step(Tokens("r", 1, [2]))
    bench.step(Tokens("s", 0, [3]))
    assert [batch.seq for batch in bench.sent[A]] == [1, 2]
    assert [batch.seq for batch in bench.sent[B]] == [1, 2]
    assert bench.sent[B][1].events == [Tokens("s", 0, [3])]


def test_nothing_to_tell_is_no_batch():
    """Steps of others do not cost a message."""
    bench = Bench()
    bench.add()
    bench.step()
    bench.take()
    bench.step()
    assert bench.sent[A] == []


def test_output_is_held_until_the_subscription_is_seen():
    """The first request of a new process arrives before its subscription; its first tokens must not be lost."""
    bench = Bench()
    assert bench.publisher.submit(submit(), 0.0)
    bench.step(Accepted("r"), Tokens("r", 0, [5]))
    bench.step(Tokens("r", 1, [6]))
    assert bench.sent[A] == []
    assert bench.publisher.flush_due_s() is None
    bench.publisher.subscribe(A, 0.0)
    bench.step()
    assert bench.sent[A] == [Batch(LIFE, 1, [Accepted("r"), Tokens("r", 0, [5, 6])])]


def test_a_blocked_topic_keeps_and_merges_while_others_flow():
    """A process that takes nothing costs the others nothing, and loses nothing."""
    bench = Bench(retry_interval_s=0.0)
    bench.add("r", A)
    bench.add("s", B)
    bench.blocked = {A}
    for at in range(5):
        bench.step(Tokens("r", at, [at]), Tokens("s", at, [at]))
    assert bench.take(A) == []
    assert bench.take(B) == [Accepted("s")] + [Tokens("s", at, [at]) for at in range(5)]
    bench.blocked = set()
    bench.step(Tokens("r", 5, [5]))
    assert bench.sent[A] == [Batch(LIFE, 1, [Accepted("r"), Tokens("r", 0, [0, 1, 2, 3, 4, 5])])]


def test_a_blocked_topic_is_tried_at_intervals():
    """Building a growing batch again at every step would slow the io thread."""
    bench = Bench(retry_interval_s=0.5)
    bench.add()
    bench.blocked = {A}
    for at in range(10):
        bench.step(Tokens("r", at, [at]))
    assert bench.publisher.counters.blocked_sends == 1
    assert bench.publisher.flush_due_s() == 0.5
    bench.now = 0.5
    bench.step()
    assert bench.publisher.counters.blocked_sends == 2


def test_a_long_backlog_goes_out_in_pieces_in_order():
    """No message grows without bound; each piece continues the one before, and the end comes last."""
    bench = Bench(max_batch_tokens=100)
    bench.add()
    bench.blocked = {A}
    bench.step(Tokens("r", 0, list(range(950))), finished())
    bench.blocked = set()
    bench.now += 1
    while bench.publisher.flush_due_s() is not None:
        bench.step()
    assert max(sum(len(e.ids) for e in b.events if isinstance(e, Tokens)) for b in bench.sent[A]) <= 100
    events = bench.take()
    tokens = [event for event in events if isinstance(event, Tokens)]
    assert [i for event in tokens for i in event.ids] == list(range(950))
    assert [event.pos for event in tokens] == list(range(0, 950, 100))
    assert events[-1] == finished()


def test_thousands_of_small_events_do_not_make_one_huge_message():
    """A process whose thousands of requests end together gets several messages of a sane size."""
    bench = Bench(max_batch_tokens=1600)
    bench.publisher.subscribe(A, 0.0)
    for n in range(1000):
        bench.publisher.submit(submit(f"r{n}"), 0.0)
    bench.publisher.fail_all(RequestError(ErrorCode.WORKER_LOST, "gone"))
    while bench.publisher.flush_due_s() is not None:
        bench.step()
    assert len(bench.sent[A]) == 10
    assert len(bench.take()) == 1000


def test_repeated_submit_tells_again_what_is_there():
    """Submitting is idempotent by id: no second run, no second copy in the engine, every event again."""
    bench = Bench()
    bench.add()
    bench.step(Tokens("r", 0, [4, 5]))
    bench.take()
    assert not bench.publisher.submit(submit(), 0.0)
    bench.step()
    assert bench.take() == [Accepted("r"), Tokens("r", 0, [4, 5])]
    bench.step(Tokens("r", 2, [6]), finished())
    assert bench.take() == [Tokens("r", 2, [6]), finished()]
    assert not bench.publisher.submit(submit(), 0.0)
    bench.step()
    assert bench.take() == [Accepted("r"), Tokens("r", 0, [4, 5, 6]), finished()]


def test_repeated_submit_before_the_engine_has_answered():
    """Accepted still comes: having nothing to repeat yet must not count as having said it."""
    bench = Bench()
    bench.publisher.subscribe(A, 0.0)
    bench.publisher.submit(submit(), 0.0)
    bench.publisher.submit(submit(), 0.0)
    bench.step()
    assert bench.sent[A] == []
    bench.step(Accepted("r"))
    assert bench.take() == [Accepted("r")]


def test_a_refusal_is_told_and_told_again():
    """A request that the engine never accepted ends with Failed alone."""
    bench = Bench()
    bench.publisher.subscribe(A, 0.0)
    bench.publisher.submit(submit(), 0.0)
    refusal = Failed("r", ErrorCode.QUEUE_FULL, "full", True)
    bench.step(refusal)
    assert bench.take() == [refusal]
    assert not bench.publisher.submit(submit(), 0.0)
    bench.step()
    assert bench.take() == [refusal]


def test_resumed_request_goes_on_from_the_tokens_it_brought():
    """Positions count the tokens a resumed request already has; those are not sent back unless asked for."""
    bench = Bench()
    bench.publisher.subscribe(A, 0.0)
    assert bench.publisher.submit(submit(generated_ids=[7, 8]), 0.0)
    bench.step(Accepted("r"), Tokens("r", 2, [9]))
    assert bench.take() == [Accepted("r"), Tokens("r", 2, [9])]
    bench.resync(Have("r", 0))
    assert bench.take() == [Accepted("r"), Tokens("r", 0, [7, 8, 9])]


def test_logprobs_travel_with_their_tokens():
    """Merged, cut into batches and told again, each stays with its token; a resumed request has them for new ones."""
    bench = Bench(max_batch_tokens=40)
    bench.publisher.subscribe(A, 0.0)
    many = [Logprobs(-float(at), [at], [-1.0]) for at in range(60)]
    bench.publisher.submit(submit(generated_ids=[100, 101]), 0.0)
    bench.step(Accepted("r"), *(Tokens("r", 2 + at, [at], [many[at]]) for at in range(60)))
    for _ in range(3):
        bench.step()
    told = [event for event in bench.take() if isinstance(event, Tokens)]
    assert len(told) > 1
    assert [at for event in told for at in event.ids] == list(range(60))
    assert [entry for event in told for entry in event.logprobs] == many
    bench.publisher.resync(Resync(A, LIFE, [Have("r", 50)]), 0.0)
    bench.step()
    again = [event for event in bench.take() if isinstance(event, Tokens)]
    assert [entry for event in again for entry in event.logprobs] == many[48:]


def test_a_prompts_logprobs_come_before_its_tokens_and_again_if_need_be():
    """Whoever has a token of the answer has them; whoever has none is told again."""
    bench = Bench()
    bench.add()
    told = PromptLogprobs("r", [Logprobs(-1.0)])
    bench.step(told, Tokens("r", 0, [1]))
    bench.step(Tokens("r", 1, [2]))
    assert bench.take() == [Accepted("r"), told, Tokens("r", 0, [1]), Tokens("r", 1, [2])]
    bench.resync(Have("r", 1))
    assert bench.take() == [Accepted("r"), Tokens("r", 1, [2])]
    bench.resync(Have("r", 0))
    assert bench.take() == [Accepted("r"), told, Tokens("r", 0, [1, 2])]


def test_resync_tells_what_follows():
    """From where the process is, for the requests it names and no others."""
    bench = Bench()
    bench.add("r")
    bench.add("s")
    bench.step(Tokens("r", 0, [1, 2, 3]), Tokens("s", 0, [4]))
    bench.take()
    bench.resync(Have("r", 1))
    assert bench.take() == [Accepted("r"), Tokens("r", 1, [2, 3])]


def test_resync_of_a_whole_request_proves_it_whole():
    """The process learns that nothing is missing, also while the request is silent."""
    bench = Bench()
    bench.add()
    bench.step(Tokens("r", 0, [1]))
    bench.take()
    bench.resync(Have("r", 1))
    assert bench.take() == [Accepted("r")]


def test_resync_that_claims_too_much_is_taken_for_what_is_there():
    """A wrong number must not lose the tokens to come."""
    bench = Bench()
    bench.add()
    bench.step(Tokens("r", 0, [1]))
    bench.take()
    bench.resync(Have("r", 999))
    bench.step(Tokens("r", 1, [2]))
    assert bench.take() == [Accepted("r"), Tokens("r", 1, [2])]


def test_resync_of_an_unknown_request_fails_it():
    """A request lost with an earlier worker ends with an error that says a retry may help. It is then not known."""
    bench = Bench()
    bench.publisher.subscribe(A, 0.0)
    bench.resync(Have("gone", 3))
    (event,) = bench.take()
    assert isinstance(event, Failed)
    assert (event.code, event.retryable) == (ErrorCode.UNKNOWN_REQUEST, True)
    assert bench.publisher.submit(submit("gone"), 0.0)


def test_resync_cannot_read_another_topics_request():
    """Knowing an id is not enough to be told its tokens."""
    bench = Bench()
    bench.add("r", A)
    bench.publisher.subscribe(B, 0.0)
    bench.step(Tokens("r", 0, [1]))
    bench.resync(Have("r", 0), topic=B)
    (event,) = bench.take(B)
    assert isinstance(event, Failed)
    assert bench.publisher.submit(submit("r", B), 0.0) is False
    assert bench.publisher.counters.dropped_messages == 1


def test_resync_of_another_life_is_left_alone():
    """It speaks of another worker's requests; the process will learn from the heartbeat that this is a new one."""
    bench = Bench()
    bench.add()
    bench.step()
    bench.take()
    bench.resync(Have("r", 0), Have("x", 0), incarnation="another life")
    assert bench.take() == []


def test_reconnect_within_the_grace_cancels_nothing():
    """What happens meanwhile is kept, and what was lost on the way is told again on request."""
    bench = Bench(subscriber_grace_s=2.0)
    bench.add()
    bench.step(Tokens("r", 0, [1]))
    bench.take()
    bench.publisher.unsubscribe(A, bench.now)
    assert bench.pass_s(1.9) == []
    bench.step(Tokens("r", 1, [2]))
    assert bench.take() == []
    bench.publisher.subscribe(A, bench.now)
    assert bench.pass_s(10) == []
    bench.step(Tokens("r", 2, [3]))
    assert bench.take() == [Tokens("r", 1, [2, 3])]


def test_a_process_that_stays_away_has_its_requests_cancelled():
    """Only those that still run, each once; what the engine says of them afterwards goes nowhere."""
    bench = Bench(subscriber_grace_s=2.0)
    for id in ("r", "s", "done"):
        bench.add(id)
    bench.add("other", B)
    bench.step(finished("done"))
    bench.publisher.unsubscribe(A, bench.now)
    assert sorted(bench.pass_s(2.1)) == ["r", "s"]
    assert bench.pass_s(10) == []
    assert bench.publisher.subscribers() == [(B, 1)]
    bench.take()
    bench.publisher.subscribe(A, bench.now)
    bench.step(finished("r", "cancelled"), finished("s", "cancelled"))
    assert bench.take() == []
    bench.resync(Have("done", 0))
    assert [event.id for event in bench.take() if isinstance(event, Failed)] == ["done"]


def test_a_cancelled_id_comes_back_only_after_its_end():
    """The cancel of the first run must not end a second one: until its end has come, the id is taken."""
    bench = Bench(subscriber_grace_s=2.0)
    bench.add()
    bench.publisher.unsubscribe(A, bench.now)
    assert bench.pass_s(3) == ["r"]
    bench.publisher.subscribe(A, bench.now)
    assert bench.publisher.submit(submit(), bench.now) is False
    bench.step(finished("r", "cancelled"))
    assert bench.publisher.submit(submit(), bench.now) is True
    bench.step(Accepted("r"))
    assert bench.take() == [Accepted("r")]


def test_a_topic_that_never_subscribes_has_its_requests_cancelled():
    """Otherwise its output would be held for ever."""
    bench = Bench(first_subscription_s=10.0, subscriber_grace_s=2.0)
    bench.publisher.submit(submit(), 0.0)
    assert bench.pass_s(9.9) == []
    assert bench.pass_s(0.2) == ["r"]
    assert bench.publisher.counters.lost_subscribers == 1


def test_a_topic_stuck_too_long_has_its_requests_cancelled():
    """The limit counts from the first failed send, and starts again when one succeeds."""
    bench = Bench(stuck_limit_s=30.0)
    bench.add()
    bench.blocked = {A}
    bench.step()
    assert bench.pass_s(29) == []
    bench.blocked = set()
    bench.step()
    bench.blocked = {A}
    bench.step(Tokens("r", 0, [1]))
    assert bench.pass_s(29) == []
    bench.step(Tokens("r", 1, [2]))
    assert bench.pass_s(2) == ["r"]
    assert bench.publisher.counters.stuck_subscribers == 1


def test_a_topic_that_was_stuck_goes_on_when_it_comes_back():
    """It learns that its old requests are gone, its numbers go on, and new requests work."""
    bench = Bench(stuck_limit_s=30.0)
    bench.add("old")
    bench.step(Tokens("old", 0, [1]))
    bench.blocked = {A}
    bench.step(Tokens("old", 1, [2]))
    assert bench.pass_s(31) == ["old"]
    bench.blocked = set()
    bench.take()
    bench.step(finished("old", "cancelled"))
    bench.resync(Have("old", 1))
    (event,) = bench.take()
    assert isinstance(event, Failed)
    bench.add("new")
    bench.step(Tokens("new", 0, [1]))
    # One number is left out, as if a batch had been lost: the process learns that it must ask.
    assert [batch.seq for batch in bench.sent[A]] == [4]


def test_a_silent_subscriber_is_never_stuck():
    """Having nothing to say for an hour is no reason to cancel."""
    bench = Bench()
    bench.add()
    bench.step()
    assert bench.pass_s(3600) == []


@pytest.mark.parametrize(
    ("limits", "kept"),
    [({"retained_requests": 2}, ["r2", "r3"]), ({"retained_tokens": 25}, ["r2", "r3"]), ({}, ["r0", "r1", "r2", "r3"])],
)
def test_finished_requests_are_kept_within_bounds(limits, kept):
    """The latest ones can be told again; the count and the tokens of those kept have a limit each."""
    bench = Bench(**limits)
    for id in ("r0", "r1", "r2", "r3"):
        bench.add(id)
        bench.step(Tokens(id, 0, list(range(10))), finished(id))
    bench.pass_s(1)
    bench.take()
    bench.resync(*(Have(id, 10) for id in ("r0", "r1", "r2", "r3")))
    assert [event.id for event in bench.take() if isinstance(event, Finished)] == kept


def test_finished_requests_are_kept_for_a_while():
    """A while, in seconds; a repeated question does not lengthen it."""
    bench = Bench(retained_s=60.0)
    bench.add()
    bench.step(finished())
    bench.pass_s(59)
    bench.take()
    bench.resync(Have("r", 0))
    assert bench.take() == [Accepted("r"), finished()]
    bench.pass_s(2)
    bench.resync(Have("r", 0))
    assert isinstance(bench.take()[0], Failed)


def test_an_end_that_was_not_told_is_not_forgotten():
    """The bounds on finished requests are for those whose end has left."""
    bench = Bench(retained_s=5.0, retained_requests=0, retry_interval_s=0.0)
    bench.add()
    bench.blocked = {A}
    bench.step(Tokens("r", 0, [1]), finished())
    bench.pass_s(20)
    bench.blocked = set()
    bench.step()
    assert bench.take() == [Accepted("r"), Tokens("r", 0, [1]), finished()]


def test_fail_all_ends_what_the_engine_cannot():
    """Each live request gets one end; those that have one keep it."""
    bench = Bench()
    bench.add("live")
    bench.add("done")
    bench.step(finished("done"))
    bench.take()
    bench.publisher.fail_all(RequestError(ErrorCode.WORKER_LOST, "the worker is gone"))
    bench.step(finished("live", "cancelled"))
    assert bench.take() == [Failed("live", ErrorCode.WORKER_LOST, "the worker is gone", True)]


def test_requests_and_topics_have_a_limit():
    """What cannot be kept track of is dropped and counted; what is there goes on."""
    bench = Bench(max_requests=2, max_topics=1)
    bench.add("r")
    bench.add("s")
    assert bench.publisher.submit(submit("t"), 0.0) is False
    assert bench.publisher.submit(submit("u", B), 0.0) is False
    bench.publisher.subscribe(B, 0.0)
    assert bench.publisher.counters.dropped_messages == 2
    assert bench.publisher.subscribers() == [(A, 0)]
    bench.step()
    bench.take()
    bench.publisher.resync(Resync(A, LIFE, [Have(f"x{n}", 0) for n in range(100)]), 0.0)
    bench.step()
    assert len([event for event in bench.take() if isinstance(event, Failed)]) == 2


def test_nothing_is_left_when_all_is_over():
    """After thousands of requests of processes that came and went, and some time, no record is kept."""
    bench = Bench()
    for n in range(2000):
        bench.add(f"r{n}", A if n % 2 else B)
        bench.step(Tokens(f"r{n}", 0, [1]))
        if n % 3:
            bench.step(finished(f"r{n}"))
    bench.publisher.unsubscribe(A, bench.now)
    bench.publisher.unsubscribe(B, bench.now)
    cancelled = bench.pass_s(100)
    assert sorted(cancelled) == sorted(f"r{n}" for n in range(0, 2000, 3))
    bench.step(*(finished(id, "cancelled") for id in cancelled))
    publisher = bench.publisher
    assert (publisher._records, publisher._topics, publisher._retained_tokens) == ({}, {}, 0)
    assert not publisher._retained


def test_a_process_that_was_given_up_sees_a_gap_when_it_comes_back():
    """After the grace the numbers do not start anew, or the process would wait for its lost requests for ever."""
    bench = Bench(subscriber_grace_s=2.0)
    bench.add("old")
    bench.step()
    assert bench.publisher.subscribers() == [(A, 1)]
    bench.publisher.unsubscribe(A, bench.now)
    assert bench.pass_s(5.0) == ["old"]
    bench.step(finished("old", "cancelled"))
    bench.sent[A].clear()
    bench.add("new")
    ((_, seq),) = bench.publisher.subscribers()
    assert seq > 1
    bench.step()
    assert [batch.seq for batch in bench.sent[A]] == [seq + 1]
