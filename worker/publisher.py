"""What each web process has been told, and what it must still be told.

Every request has one record: what the engine made of it, and how far its web process has been told. A batch is whatever
lies between the two. So output that cannot leave now merges by itself, and telling something again, after a Resync or a
repeated Submit, only moves the mark back. A topic's output is held until its subscription has been seen.

Owns the records and the sequence numbers. Runs on the io thread; knows neither sockets nor clocks: the caller passes
`now`, in seconds, and a `send`. Everything it holds is bounded.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from common.errors import ErrorCode, RequestError
from common.wire import Accepted, Batch, Event, Failed, Finished, Logprobs, PromptLogprobs, Resync, Submit, Tokens

EVENT_COST_TOKENS = 16
"""What an event counts in a batch on top of its tokens, so that many small ones make no huge message either."""

Send = Callable[[str, Batch], bool]
"""Sends one batch to a topic, or returns False at once when that topic takes nothing now."""


@dataclass(frozen=True, slots=True)
class PublisherLimits:
    """Bounds, in seconds and counts.

    subscriber_grace_s: how long a topic may be unsubscribed before its requests are cancelled. stuck_limit_s: how long
    it may take nothing. first_subscription_s: how long a new topic may take to subscribe. retained_*: finished requests
    that were told and can still be told again. max_batch_tokens: what one message carries; the rest comes in the next.
    """

    subscriber_grace_s: float = 2.0
    stuck_limit_s: float = 30.0
    first_subscription_s: float = 10.0
    retry_interval_s: float = 0.02
    retained_s: float = 60.0
    retained_requests: int = 4096
    retained_tokens: int = 1_000_000
    max_requests: int = 65_536
    max_topics: int = 4096
    max_batch_tokens: int = 65_536


@dataclass(slots=True)
class PublisherCounters:
    """Totals since the start; they only grow."""

    batches: int = 0
    blocked_sends: int = 0
    resyncs: int = 0
    repeated_submits: int = 0
    dropped_messages: int = 0
    lost_subscribers: int = 0
    stuck_subscribers: int = 0


@dataclass(slots=True, eq=False)
class _Record:
    """One request. ids: all tokens generated; `ids[:told]`, and what the flags say, have left.

    logprobs: one for each token from index `first_logprob` on, when they were asked for. prompt_logprobs: as they came.
    """

    id: str
    topic: "_Topic | None"
    ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    first_logprob: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    prompt_told: bool = False
    accepted: bool = False
    end: Finished | Failed | None = None
    told: int = 0
    accepted_told: bool = False

    @property
    def cost_tokens(self) -> int:
        """What the record counts among those that are kept; a log-probability and its token count as one more each."""
        told = 1 + len(self.logprobs[0].top_ids) if self.logprobs else 0
        prompt = self.prompt_logprobs.logprobs if self.prompt_logprobs else []
        told_of_prompt = 1 + len(prompt[0].top_ids) if prompt else 0
        return len(self.ids) + len(self.logprobs) * told + len(prompt) * told_of_prompt

    def take(self, event: Event) -> None:
        """Take what happened next; nothing happens after the end."""
        if self.end is not None:
            return
        if isinstance(event, Accepted):
            self.accepted = True
        elif isinstance(event, PromptLogprobs):
            self.prompt_logprobs = event
        elif isinstance(event, Tokens):
            self.ids[event.pos :] = event.ids
            if event.logprobs:
                self.logprobs[event.pos - self.first_logprob :] = event.logprobs
        else:
            self.end = event

    def rewind(self, have: int) -> None:
        """Note that the web process has only the first `have` tokens, and must be told everything else again."""
        self.told = min(have, len(self.ids))
        self.accepted_told = False
        # Whoever has a generated token has what came before it.
        self.prompt_told = self.told > self.first_logprob

    def news(self, upto: int) -> Iterator[Event]:
        """Yield what has not been told, tokens up to index `upto`."""
        if self.accepted and not self.accepted_told:
            yield Accepted(self.id)
        if self.prompt_logprobs is not None and not self.prompt_told:
            yield self.prompt_logprobs
        if upto > self.told:
            at = self.told - self.first_logprob
            logprobs = self.logprobs[at : upto - self.first_logprob] if at >= 0 else []
            yield Tokens(self.id, self.told, self.ids[self.told : upto], logprobs)
        if self.end is not None and upto == len(self.ids):
            yield self.end


@dataclass(slots=True, eq=False)
class _Topic:
    """One web process. seq: the last batch that left. since_s: when `subscribed` last changed."""

    name: str
    since_s: float
    subscribed: bool = False
    ever_subscribed: bool = False
    seq: int = 0
    untold: dict[str, _Record] = field(default_factory=dict)
    blocked_since_s: float | None = None
    retry_at_s: float = 0.0


class Publisher:
    """See the module."""

    def __init__(self, incarnation: str, limits: PublisherLimits | None = None):
        self._incarnation = incarnation
        self._limits = limits or PublisherLimits()
        self._topics: dict[str, _Topic] = {}
        self._records: dict[str, _Record] = {}
        self._retained: OrderedDict[str, float] = OrderedDict()
        self._retained_tokens = 0
        # Beyond the numbers of every forgotten topic, so that one that comes back is not taken for never having gone.
        self._first_seq = 0
        self.counters = PublisherCounters()

    # --- web processes ------------------------------------------------------------------------------------------------

    def subscribe(self, name: str, now: float) -> None:
        """Note that a web process listens: what was held for it may leave."""
        topic = self._topic(name, now)
        if topic is not None:
            topic.subscribed = topic.ever_subscribed = True
            topic.since_s = now
            topic.blocked_since_s, topic.retry_at_s = None, now

    def unsubscribe(self, name: str, now: float) -> None:
        """Note that a web process has gone. Its requests go on until `expire` finds that it stays away."""
        topic = self._topics.get(name)
        if topic is not None and topic.subscribed:
            topic.subscribed = False
            topic.since_s = now
            topic.blocked_since_s = None

    def subscribers(self) -> list[tuple[str, int]]:
        """Return each subscribed topic with the sequence number of the last batch that was sent to it."""
        return [(topic.name, topic.seq) for topic in self._topics.values() if topic.subscribed]

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, submit: Submit, now: float) -> bool:
        """Take a request. Returns True when it is new: the caller then has the engine add it, or records a failure.

        A known id is told again what it has. One that cannot be kept track of is dropped and counted.
        """
        have = len(submit.generated_ids)
        record = self._records.get(submit.id)
        topic = self._topic(submit.topic, now)
        if topic is not None and record is not None and record.topic is topic:
            self.counters.repeated_submits += 1
            record.rewind(have)
            topic.untold[record.id] = record
            return False
        if topic is None or record is not None or len(self._records) >= self._limits.max_requests:
            # A record without its topic belongs to a cancelled request whose end has not come yet.
            self.counters.dropped_messages += 1
            return False
        self._records[submit.id] = _Record(submit.id, topic, list(submit.generated_ids), first_logprob=have, told=have)
        return True

    def resync(self, message: Resync, now: float) -> None:
        """Tell these requests again from where the web process is; an unknown one has failed."""
        topic = self._topic(message.topic, now)
        if topic is None or message.incarnation != self._incarnation:
            return
        self.counters.resyncs += 1
        for have in message.requests:
            record = self._records.get(have.id)
            if record is not None and record.topic is topic:
                record.rewind(have.have)
            elif len(topic.untold) < self._limits.max_requests:
                record = _Record(have.id, topic, end=_unknown(have.id))
            else:
                self.counters.dropped_messages += 1
                continue
            topic.untold[have.id] = record

    def record(self, events: list[Event]) -> None:
        """Take what happened, in order; events of requests that nobody waits for any more are ignored."""
        for event in events:
            record = self._records.get(event.id)
            if record is None:
                continue
            record.take(event)
            if record.topic is not None:
                record.topic.untold[record.id] = record
            elif record.end is not None:
                del self._records[record.id]

    def fail_all(self, error: RequestError) -> None:
        """End every request that has not ended yet, because nothing will come from the engine any more."""
        self.record([Failed.of(record.id, error) for record in self._records.values() if record.end is None])

    # --- sending ------------------------------------------------------------------------------------------------------

    def flush(self, send: Send, now: float) -> None:
        """Send one batch to each topic that has something untold, is subscribed and is not known to be blocked."""
        for topic in self._topics.values():
            if topic.untold and topic.subscribed and now >= topic.retry_at_s:
                self._flush_topic(topic, send, now)

    def flush_due_s(self) -> float | None:
        """Return when the next `flush` can send something; None when there is nothing to send to anyone who listens."""
        due = [topic.retry_at_s for topic in self._topics.values() if topic.untold and topic.subscribed]
        return min(due, default=None)

    def _flush_topic(self, topic: _Topic, send: Send, now: float) -> None:
        events: list[Event] = []
        shares: list[tuple[_Record, int]] = []
        room = self._limits.max_batch_tokens
        for record in topic.untold.values():
            if room <= 0:
                break
            upto = min(len(record.ids), record.told + room)
            room -= upto - record.told + EVENT_COST_TOKENS
            shares.append((record, upto))
            events.extend(record.news(upto))
        if events and not send(topic.name, Batch(self._incarnation, topic.seq + 1, events)):
            self.counters.blocked_sends += 1
            topic.blocked_since_s = now if topic.blocked_since_s is None else topic.blocked_since_s
            topic.retry_at_s = now + self._limits.retry_interval_s
            return
        topic.blocked_since_s = None
        if events:
            topic.seq += 1
            self.counters.batches += 1
        for record, upto in shares:
            self._mark_told(topic, record, upto, now)

    def _mark_told(self, topic: _Topic, record: _Record, upto: int, now: float) -> None:
        record.told, record.accepted_told = upto, record.accepted
        record.prompt_told = record.prompt_logprobs is not None
        if upto == len(record.ids):
            del topic.untold[record.id]
            if record.end is not None and self._records.get(record.id) is record:
                self._retain(record, now)

    # --- forgetting ---------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> list[str]:
        """Forget web processes that are gone and ends told long ago; return the ids of requests to cancel."""
        cancelled: list[str] = []
        limits = self._limits
        for topic in list(self._topics.values()):
            grace_s = limits.subscriber_grace_s if topic.ever_subscribed else limits.first_subscription_s
            if not topic.subscribed and now - topic.since_s > grace_s:
                self.counters.lost_subscribers += 1
                cancelled += self._abandon(topic)
                del self._topics[topic.name]
                self._first_seq = max(self._first_seq, topic.seq)
            elif topic.blocked_since_s is not None and now - topic.blocked_since_s > limits.stuck_limit_s:
                self.counters.stuck_subscribers += 1
                topic.blocked_since_s = None
                cancelled += self._abandon(topic)
        self._evict(now)
        return cancelled

    def _abandon(self, topic: _Topic) -> list[str]:
        """Forget a topic's requests; return those that still run, whose records stay until their end comes."""
        topic.untold.clear()
        # Like a batch that was lost: should the web process come back, it must notice and ask what became of its calls.
        topic.seq += 1
        live: list[str] = []
        for record in [r for r in self._records.values() if r.topic is topic]:
            if record.end is None:
                record.topic = None
                live.append(record.id)
            else:
                self._forget(record.id)
        return live

    def _retain(self, record: _Record, now: float) -> None:
        if record.id not in self._retained:
            self._retained_tokens += record.cost_tokens
            self._retained[record.id] = now

    def _evict(self, now: float) -> None:
        limits = self._limits
        while self._retained:
            oldest, told_s = next(iter(self._retained.items()))
            if (
                len(self._retained) <= limits.retained_requests
                and self._retained_tokens <= limits.retained_tokens
                and now - told_s <= limits.retained_s
            ):
                return
            self._forget(oldest)

    def _forget(self, request_id: str) -> None:
        record = self._records.pop(request_id)
        if self._retained.pop(request_id, None) is not None:
            self._retained_tokens -= record.cost_tokens

    def _topic(self, name: str, now: float) -> _Topic | None:
        """Return the topic of that name, a new one if need be, or None when there are too many."""
        topic = self._topics.get(name)
        if topic is None and len(self._topics) < self._limits.max_topics:
            topic = self._topics[name] = _Topic(name, now, seq=self._first_seq)
        return topic


def _unknown(request_id: str) -> Failed:
    return Failed.of(request_id, RequestError(ErrorCode.UNKNOWN_REQUEST, "the worker does not know this request"))
