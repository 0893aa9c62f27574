"""The publisher under any order of events: processes that come, go, stall and lose messages, and ask again.

The engine and the web processes are small models. A web process knows only what reaches it, and repairs holes as the
real one does: it asks again for what a missing number, a hole in positions or a heartbeat's number makes suspect.
"""

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from common.errors import ErrorCode
from common.params import SamplingParams
from common.wire import Accepted, Batch, Event, Failed, Finished, Have, Resync, Submit, Tokens, Usage
from worker.publisher import Publisher, PublisherLimits

LIFE = "life"
LIMITS = PublisherLimits(
    subscriber_grace_s=2.0,
    stuck_limit_s=5.0,
    first_subscription_s=4.0,
    retry_interval_s=0.1,
    retained_s=1e9,
    max_batch_tokens=40,
)
TOPICS = [f"p/{n:016x}/" for n in range(3)]


def token(id: str, index: int) -> int:
    return (sum(map(ord, id)) * 31 + index * 7) % 1000


@dataclass
class Work:
    """A request inside the engine."""

    id: str
    length: int
    made: int = 0
    ended: bool = False


@dataclass
class Web:
    """One web process: what it has of its requests, and what is on the way to it."""

    topic: str
    listening: bool = False
    blocked: bool = False
    wire: list[Batch] = field(default_factory=list)
    seq: int = 0
    have: dict[str, list[int]] = field(default_factory=dict)
    accepted: set[str] = field(default_factory=set)
    ends: dict[str, Event] = field(default_factory=dict)
    stale: set[str] = field(default_factory=set)

    def hear(self, batch: Batch) -> None:
        if batch.seq > self.seq + 1:
            self.suspect_all()
        self.seq = max(self.seq, batch.seq)
        for event in batch.events:
            self.take(event)

    def hear_seq(self, seq: int) -> None:
        """The number in a heartbeat, which travels behind the batches."""
        if seq != self.seq:
            self.seq = seq
            self.suspect_all()

    def suspect_all(self) -> None:
        # A request that was never accepted is submitted again instead, as web.link.registry does.
        self.stale |= {id for id in self.have if id in self.accepted and id not in self.ends}

    def take(self, event: Event) -> None:
        have = self.have[event.id]
        if event.id in self.ends:
            # A repeated end is the same end, or says that the worker has forgotten the request.
            assert isinstance(event, (Accepted, Tokens)) or event == self.ends[event.id] or is_unknown(event)
            return
        self.stale.discard(event.id)
        if isinstance(event, Accepted):
            self.accepted.add(event.id)
        elif isinstance(event, Tokens):
            self.accepted.add(event.id)
            if event.pos > len(have):
                self.stale.add(event.id)
                return
            known = len(have) - event.pos
            assert have[event.pos :][: len(event.ids)] == event.ids[:known]
            have += event.ids[known:]
        elif isinstance(event, Finished) and event.usage.completion_tokens > len(have):
            self.stale.add(event.id)
        else:
            self.ends[event.id] = event


def is_unknown(event: Event) -> bool:
    return isinstance(event, Failed) and event.code is ErrorCode.UNKNOWN_REQUEST


class Lives(RuleBasedStateMachine):
    """See the module."""

    requests: Bundle = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.publisher = Publisher(LIFE, LIMITS)
        self.now = 0.0
        self.webs = {topic: Web(topic) for topic in TOPICS}
        self.engine: dict[str, Work] = {}
        self.owner: dict[str, str] = {}
        self.submits: dict[str, Submit] = {}
        self.events: list[Event] = []
        self.count = 0

    # --- the worker's side ---

    def send(self, topic: str, batch: Batch) -> bool:
        web = self.webs[topic]
        if web.blocked:
            return False
        if web.listening:
            web.wire.append(batch)
        return True

    def end(self, work: Work, reason: str) -> None:
        work.ended = True
        self.events.append(Finished(work.id, reason, Usage(1, work.made)))

    def cancel(self, id: str) -> None:
        work = self.engine.get(id)
        if work and not work.ended:
            self.end(work, "cancelled")

    def take_submit(self, submit: Submit) -> None:
        if self.publisher.submit(submit, self.now):
            assert submit.id not in self.engine or self.engine[submit.id].ended
            self.engine[submit.id] = Work(submit.id, submit.max_tokens)
            self.events.append(Accepted(submit.id))

    def expire(self) -> None:
        cancelled = self.publisher.expire(self.now)
        assert len(cancelled) == len(set(cancelled))
        for id in cancelled:
            web = self.webs[self.owner[id]]
            assert web.blocked or not web.listening, "a healthy process's request was cancelled"
            self.cancel(id)

    # --- what can happen ---

    @rule(target=requests, topic=st.sampled_from(TOPICS), length=st.integers(1, 60), count=st.integers(1, 3))
    def submit(self, topic, length, count):
        ids = []
        for _ in range(count):
            self.count += 1
            id = f"r{self.count}"
            self.owner[id] = topic
            self.webs[topic].have[id] = []
            self.submits[id] = Submit(id, topic, [1], SamplingParams(), length)
            self.take_submit(self.submits[id])
            ids.append(id)
        return multiple(*ids)

    @rule(id=requests)
    def submit_again(self, id):
        self.submit_unanswered(id)

    def submit_unanswered(self, id):
        """A web process reads what has arrived before it judges that an answer is missing."""
        web = self.webs[self.owner[id]]
        self.deliver(web.topic, 1000)
        if id not in web.accepted and id not in web.ends:
            self.take_submit(self.submits[id])

    @rule(id=requests)
    def cancel_one(self, id):
        self.cancel(id)

    @rule(steps=st.integers(1, 20))
    def engine_steps(self, steps):
        for _ in range(steps):
            for work in self.engine.values():
                if not work.ended:
                    self.events.append(Tokens(work.id, work.made, [token(work.id, work.made)]))
                    work.made += 1
                    if work.made == work.length:
                        self.end(work, "length")

    @rule()
    def publish(self):
        self.publisher.record(self.events)
        self.events = []
        self.publisher.flush(self.send, self.now)

    @rule(topic=st.sampled_from(TOPICS))
    def subscribe(self, topic):
        self.webs[topic].listening = True
        self.publisher.subscribe(topic, self.now)

    @rule(topic=st.sampled_from(TOPICS))
    def lose_connection(self, topic):
        """What is on the way is lost with it."""
        web = self.webs[topic]
        web.listening = web.blocked = False
        web.wire.clear()
        self.publisher.unsubscribe(topic, self.now)

    @rule(topic=st.sampled_from(TOPICS))
    def stall(self, topic):
        self.webs[topic].blocked = self.webs[topic].listening

    @rule(topic=st.sampled_from(TOPICS))
    def unstall(self, topic):
        self.webs[topic].blocked = False

    @rule(topic=st.sampled_from(TOPICS), messages=st.integers(1, 5))
    def deliver(self, topic, messages):
        web = self.webs[topic]
        arrived, web.wire = web.wire[:messages], web.wire[messages:]
        for batch in arrived:
            web.hear(batch)

    @rule(topic=st.sampled_from(TOPICS), at=st.integers(0, 3))
    def lose_message(self, topic, at):
        """ZeroMQ should not; the repair does not rely on it."""
        del self.webs[topic].wire[at : at + 1]

    @rule()
    def heartbeats(self):
        for topic, seq in self.publisher.subscribers():
            web = self.webs[topic]
            if web.listening and not web.wire:
                web.hear_seq(seq)

    @rule(topic=st.sampled_from(TOPICS))
    def resync(self, topic):
        web = self.webs[topic]
        have = [Have(id, len(web.have[id])) for id in sorted(web.stale)]
        if have:
            self.publisher.resync(Resync(topic, LIFE, have), self.now)

    @rule(seconds=st.sampled_from([0.05, 0.2, 1.0, 1.5, 6.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.publish()  # the io thread tries again all the time; only what still fails counts as stuck
        self.expire()

    # --- what must hold ---

    @invariant()
    def every_view_is_a_prefix(self):
        for web in self.webs.values():
            for id, have in web.have.items():
                assert have == [token(id, index) for index in range(len(have))]

    def teardown(self):
        """When the storms are over, every request has its one end, and every token up to it."""
        for topic in TOPICS:
            self.webs[topic].blocked = False
            self.subscribe(topic)
        for id in self.owner:
            self.submit_unanswered(id)
        for _ in range(60):
            self.now += 0.2
            self.engine_steps(5)
            self.publish()
            for topic in TOPICS:
                self.deliver(topic, 1000)
            self.heartbeats()
            for topic in TOPICS:
                self.resync(topic)
                for id in self.webs[topic].have:
                    self.submit_unanswered(id)
        for id, topic in self.owner.items():
            web = self.webs[topic]
            end = web.ends[id]
            if isinstance(end, Finished):
                assert end.usage.completion_tokens == len(web.have[id])
                assert end.reason == "cancelled" or len(web.have[id]) == self.submits[id].max_tokens
            else:
                assert is_unknown(end)
        assert all(work.ended for work in self.engine.values())


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
