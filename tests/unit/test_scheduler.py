"""The scheduler and the cache bookkeeping, under thousands of random lives. No torch, no sockets."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ErrorCode, RequestError
from common.params import SamplingParams
from common.wire import Accepted, Failed, Finished, Submit, Tokens
from tests.support.history_runner import VOCAB_SIZE, HistoryRunner, expected_tokens
from worker.batch import StepResult
from worker.engine import Engine
from worker.kv_cache import KVCacheManager
from worker.scheduler import Scheduler, SchedulerConfig


class Harness:
    """An engine whose every step is checked, and what its client has seen."""

    def __init__(
        self,
        num_blocks=16,
        block_size=4,
        max_batch_tokens=16,
        max_batch_size=8,
        max_queued_requests=10_000,
        max_model_len=10_000,
        eos=(),
        prefix_caching=True,
    ):
        self.cache = KVCacheManager(num_blocks, block_size, prefix_caching)
        self.runner = HistoryRunner(num_blocks, block_size)
        config = SchedulerConfig(
            max_batch_tokens, max_batch_size, max_queued_requests, max_model_len, VOCAB_SIZE, frozenset(eos)
        )
        self.scheduler = Scheduler(config, self.cache)
        self.engine = Engine(self.scheduler, self.runner)
        self.submits: dict[str, Submit] = {}
        self.tokens: dict[str, list[int]] = {}
        self.accepted: set[str] = set()
        self.ends: dict[str, Finished | Failed] = {}

    def add(self, id, prompt, max_tokens=5, seed=0, **kwargs):
        submit = Submit(
            id=id, topic="", prompt_ids=prompt, params=SamplingParams(seed=seed), max_tokens=max_tokens, **kwargs
        )
        self.submits[id] = submit
        self.engine.add(submit)
        self.collect()

    def step(self):
        had_work = self.engine.has_work
        before = self.runner.computed_tokens
        self.engine.step()
        self.scheduler.check()
        if had_work:
            assert self.runner.computed_tokens > before, "there is work, but a step computed nothing"
            assert self.runner.computed_tokens - before <= self.scheduler.config.max_batch_tokens
            assert len(self.runner.steps[-1].segments) <= self.scheduler.config.max_batch_size
        self.collect()

    def collect(self):
        for event in self.engine.take_events():
            assert event.id not in self.ends, "an event after the terminal one"
            match event:
                case Accepted():
                    assert event.id not in self.accepted
                    self.accepted.add(event.id)
                    self.tokens[event.id] = list(self.submits[event.id].generated_ids)
                case Tokens():
                    assert event.pos == len(self.tokens[event.id])
                    self.tokens[event.id] += event.ids
                case Finished() | Failed():
                    self.ends[event.id] = event

    def run(self, limit=100_000):
        for _ in range(limit):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("requests are still running")

    def assert_right(self, id):
        """The request's tokens are those it would have got alone, and its end is the right one."""
        submit, end, tokens = self.submits[id], self.ends[id], self.tokens[id]
        want = expected_tokens(submit.prompt_ids, submit.params.seed, submit.max_tokens)
        assert tokens == want[: len(tokens)]
        assert isinstance(end, Finished)
        assert end.usage.completion_tokens == len(tokens)
        assert end.usage.prompt_tokens == len(submit.prompt_ids)
        assert end.usage.cached_tokens < len(submit.prompt_ids)
        if end.reason == "length":
            assert len(tokens) == submit.max_tokens


def prompt(length, seed=0):
    return [random.Random(seed).randrange(VOCAB_SIZE) for _ in range(length)]


def test_tokens_are_those_of_the_request_alone():
    """A request in a crowd, chunked and preempted, gets the tokens it would get alone."""
    h = Harness(num_blocks=12, max_batch_tokens=7)
    for i in range(20):
        h.add(f"r{i}", prompt(3 + i, i), max_tokens=15, seed=i)
    h.run()
    for i in range(20):
        h.assert_right(f"r{i}")
    assert h.scheduler.counters.preemptions > 0


def test_decodes_are_not_held_up_by_a_long_prompt():
    """While a long prompt is computed in chunks, a running request gets a token in every step."""
    h = Harness(num_blocks=64, max_batch_tokens=8)
    h.add("short", prompt(4), max_tokens=30)
    h.step()
    h.add("long", prompt(100, 1), max_tokens=1)
    while "long" not in h.ends:
        before = len(h.tokens["short"])
        h.step()
        assert len(h.tokens["short"]) == before + 1


def test_prompts_are_admitted_in_the_order_they_came():
    h = Harness(max_batch_size=1)
    for i in range(5):
        h.add(f"r{i}", prompt(5, i), max_tokens=2)
    h.run()
    assert list(h.ends) == [f"r{i}" for i in range(5)]


def test_a_lower_priority_number_goes_first():
    h = Harness(max_batch_size=1)
    h.add("first", prompt(5), max_tokens=2)
    h.step()
    h.add("b", prompt(5, 1), max_tokens=2, priority=1)
    h.add("a", prompt(5, 2), max_tokens=2, priority=-1)
    h.add("c", prompt(5, 3), max_tokens=2, priority=1)
    h.run()
    assert list(h.ends) == ["first", "a", "b", "c"]


def test_the_oldest_request_is_never_preempted():
    """However tight the cache, the oldest running request keeps its blocks, so work always gets done."""
    h = Harness(num_blocks=8, block_size=2, max_batch_tokens=64)
    for i in range(6):
        h.add(f"r{i}", prompt(4, i), max_tokens=10)
    oldest = h.scheduler.waiting.head
    h.run()
    assert h.scheduler.counters.preemptions > 0
    assert oldest.num_preemptions == 0


def test_a_shared_prefix_is_computed_once():
    """The second request with the same long prompt computes only what is new, and its usage says so."""
    h = Harness(num_blocks=64, max_batch_tokens=64)
    h.add("a", prompt(40), max_tokens=1)
    h.run()
    assert h.runner.computed_tokens == 40
    h.add("b", [*prompt(40), 1, 2], max_tokens=1)
    h.run()
    assert h.runner.computed_tokens == 40 + 2
    assert h.ends["b"].usage.cached_tokens == 40
    h.assert_right("b")


@pytest.mark.parametrize("max_batch_tokens", [16, 64, 1000])
def test_equal_prompts_submitted_together_are_computed_once(max_batch_tokens):
    """Four answers to one prompt cost one prefill, and hold its blocks once: n = 4 must not cost four."""
    h = Harness(num_blocks=64, max_batch_tokens=max_batch_tokens)
    for id in "abcd":
        h.add(id, prompt(42), max_tokens=5, seed=ord(id))
    most_used = 0
    while h.engine.has_work:
        h.step()
        most_used = max(most_used, h.cache.num_used)
    decoded = 4 * (5 - 1)
    assert h.runner.computed_tokens == 42 + 3 * 2 + decoded  # the last block of 4 is not full: each has its own
    assert [h.ends[id].usage.cached_tokens for id in "abcd"] == [0, 40, 40, 40]
    assert most_used <= 10 + 4 * 2
    for id in "abcd":
        h.assert_right(id)


@pytest.mark.parametrize("way", ["cancel", "fail"])
def test_a_prompt_whose_computation_ends_early_is_taken_over(way):
    """Whoever waited for it computes it; it must not wait for ever."""
    h = Harness(num_blocks=64, max_batch_tokens=16)
    h.add("a", prompt(40))
    h.add("b", prompt(40), seed=1)
    h.step()
    assert (len(h.scheduler.running), len(h.scheduler.waiting)) == (1, 1)
    if way == "cancel":
        h.engine.cancel("a")
    else:
        h.scheduler.fail(h.scheduler.running[0], RequestError(ErrorCode.INTERNAL_ERROR, "x"))
    h.run()
    assert h.ends["b"].usage.cached_tokens == 16
    h.assert_right("b")


def test_an_equal_prompt_leaves_its_last_token_to_compute():
    """A prompt that is wholly cached still computes at least one token, or there would be no logits."""
    h = Harness(num_blocks=64, max_batch_tokens=64)
    h.add("a", prompt(8), max_tokens=1)
    h.run()
    h.add("b", prompt(8), max_tokens=3)
    h.run()
    assert h.ends["b"].usage.cached_tokens == 4
    h.assert_right("b")


def test_a_conversation_reuses_the_answer_too():
    """The next turn finds the blocks of the previous answer, not only those of the previous prompt."""
    h = Harness(num_blocks=64, max_batch_tokens=64)
    h.add("turn1", prompt(10), max_tokens=11)
    h.run()
    h.add("turn2", [*prompt(10), *h.tokens["turn1"], 5, 6], max_tokens=2)
    h.run()
    assert h.ends["turn2"].usage.cached_tokens == 20
    h.assert_right("turn2")


def test_tenants_do_not_share_prefixes():
    """One tenant's cache hits must not tell what another tenant asked."""
    h = Harness(num_blocks=64, max_batch_tokens=64)
    h.add("a", prompt(40), max_tokens=1, tenant="alice")
    h.run()
    h.add("b", prompt(40), max_tokens=1, tenant="bob")
    h.run()
    assert h.ends["b"].usage.cached_tokens == 0


def test_no_prefix_caching_when_it_is_off():
    h = Harness(num_blocks=64, max_batch_tokens=64, prefix_caching=False)
    for id in "ab":
        h.add(id, prompt(40), max_tokens=1)
        h.run()
    assert h.runner.computed_tokens == 80
    assert h.ends["b"].usage.cached_tokens == 0


def test_cached_blocks_make_room():
    """A cache full of remembered prefixes still takes any new request, the least recently used going first."""
    h = Harness(num_blocks=8, block_size=4, max_batch_tokens=64)
    for i in range(30):
        h.add(f"r{i}", prompt(20, i), max_tokens=4)
        h.run()
        h.assert_right(f"r{i}")


def test_preempted_usage_counts_only_the_first_cache_hit():
    """What a preempted request finds of its own earlier work is not reported as a cached prompt."""
    h = Harness(num_blocks=8, block_size=2, max_batch_tokens=64)
    for i in range(6):
        h.add(f"r{i}", prompt(4, i), max_tokens=10)
    h.run()
    assert h.scheduler.counters.preemptions > 0
    assert all(end.usage.cached_tokens == 0 for end in h.ends.values())


def test_cancel_frees_at_once_whether_waiting_or_running():
    h = Harness(max_batch_size=1)
    h.add("runs", prompt(10), max_tokens=30)
    h.add("waits", prompt(10, 1), max_tokens=30)
    h.step()
    assert h.cache.num_used
    for id in ("waits", "runs"):
        h.engine.cancel(id)
        h.collect()
        h.scheduler.check()
        assert h.ends[id].reason == "cancelled"
    assert h.cache.num_used == 0
    assert not h.engine.has_work


def test_cancel_is_exact_and_idempotent():
    """Cancelling an id touches no request whose id merely starts with it; unknown ids do no harm."""
    h = Harness()
    h.add("req-1", prompt(4))
    h.add("req-11", prompt(4, 1))
    for id in ("req-1", "req-1", "req", "nobody"):
        h.engine.cancel(id)
    h.collect()
    assert set(h.ends) == {"req-1"}
    h.run()
    assert h.ends["req-11"].reason == "length"


def test_adding_a_live_id_again_changes_nothing():
    h = Harness()
    h.add("a", prompt(4), max_tokens=6)
    h.step()
    h.engine.add(h.submits["a"])
    h.run()
    h.assert_right("a")
    assert h.scheduler.counters.accepted == 1


def test_end_of_text_ends_unless_ignored():
    want = expected_tokens(prompt(4), 0, 9)
    h = Harness(eos={want[3]})
    h.add("a", prompt(4), max_tokens=9)
    h.add("b", prompt(4), max_tokens=9, ignore_eos=True)
    h.run()
    assert h.ends["a"].reason == "stop"
    assert h.tokens["a"] == want[:4]
    assert h.ends["b"].reason == "length"
    assert h.tokens["b"] == want


def test_a_stop_token_ends_even_when_end_of_text_is_ignored():
    want = expected_tokens(prompt(4), 0, 9)
    h = Harness()
    h.add("a", prompt(4), max_tokens=9, ignore_eos=True, stop_token_ids=[want[2]])
    h.run()
    assert h.ends["a"].reason == "stop"
    assert h.tokens["a"] == want[:3]


def test_a_resumed_request_goes_on_where_it_was():
    """Tokens that a request brings along count as generated: positions, limits and the answer go on from there."""
    want = expected_tokens(prompt(9), 3, 12)
    h = Harness()
    h.add("a", prompt(9), max_tokens=12, seed=3, generated_ids=want[:5])
    h.run()
    h.assert_right("a")
    assert h.tokens["a"] == want


def test_a_request_that_is_already_complete_ends_at_once():
    want = expected_tokens(prompt(9), 3, 12)
    h = Harness()
    h.add("a", prompt(9), max_tokens=12, seed=3, generated_ids=want)
    assert h.ends["a"].reason == "length"
    assert not h.engine.has_work


@pytest.mark.parametrize(
    ("kwargs", "code"),
    [
        ({"prompt": []}, ErrorCode.INVALID_REQUEST),
        ({"prompt": [VOCAB_SIZE]}, ErrorCode.INVALID_REQUEST),
        ({"prompt": [1], "generated_ids": [VOCAB_SIZE]}, ErrorCode.INVALID_REQUEST),
        ({"prompt": [1], "grammar": "x"}, ErrorCode.INVALID_REQUEST),
        ({"prompt": [1] * 40, "max_tokens": 1}, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        ({"prompt": [1] * 30, "max_tokens": 11}, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(kwargs, code):
    """Longer than the context, outside the vocabulary, empty: one Failed with the reason, nothing held."""
    h = Harness(num_blocks=64, max_model_len=40)
    h.add("a", **kwargs)
    assert h.ends["a"].code == code
    assert not h.accepted
    assert not h.engine.has_work


def test_longer_than_the_whole_cache_is_refused():
    """What can never fit is told so instead of waiting for ever."""
    h = Harness(num_blocks=4, block_size=4)
    h.add("a", prompt(10), max_tokens=7)
    assert h.ends["a"].code == ErrorCode.CONTEXT_LENGTH_EXCEEDED
    h.add("b", prompt(10), max_tokens=6)
    h.run()
    h.assert_right("b")


def test_a_full_queue_refuses():
    h = Harness(max_queued_requests=3)
    for i in range(5):
        h.add(f"r{i}", prompt(4, i))
    assert {id: end.code for id, end in h.ends.items()} == {"r3": ErrorCode.QUEUE_FULL, "r4": ErrorCode.QUEUE_FULL}
    assert h.ends["r3"].retryable
    h.run()
    for i in range(3):
        h.assert_right(f"r{i}")


def test_a_failing_step_fails_its_own_requests_only():
    """The requests of a step that raises end with an error; those that wait are served afterwards."""
    h = Harness(max_batch_size=2)
    for i in range(4):
        h.add(f"r{i}", prompt(4, i))
    run, h.runner.run = h.runner.run, lambda batch: 1 / 0
    h.engine.step()
    h.collect()
    h.runner.run = run
    h.run()
    assert {id for id, end in h.ends.items() if isinstance(end, Failed)} == {"r0", "r1"}
    assert h.ends["r0"].code == ErrorCode.INTERNAL_ERROR
    h.assert_right("r2")
    h.assert_right("r3")


def test_an_unusable_row_fails_its_own_request_only():
    """A row whose logits were not numbers (the runner says so with -1) ends with an error, its neighbours go on."""
    h = Harness()
    h.add("bad", prompt(4))
    h.add("good", prompt(4, 1))
    run = h.runner.run
    h.runner.run = lambda batch: StepResult([-1, *run(batch).token_ids[1:]])
    h.step()
    h.runner.run = run
    h.run()
    assert h.ends["bad"].code == ErrorCode.INTERNAL_ERROR
    h.assert_right("good")


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 30),  # step of arrival
        st.integers(1, 30),  # prompt length
        st.integers(1, 25),  # max_tokens
        st.integers(0, 3),  # which of four common beginnings the prompt shares
        st.integers(0, 20),  # how much of it
        st.integers(-1, 1),  # priority
        st.one_of(st.none(), st.integers(0, 20)),  # steps until the client leaves
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=250, deadline=None)
@given(
    requests=REQUESTS,
    num_blocks=st.integers(14, 40),
    block_size=st.integers(1, 8),
    max_batch_tokens=st.integers(1, 40),
    max_batch_size=st.integers(1, 8),
    prefix_caching=st.booleans(),
)
def test_any_mix_of_arrivals_cancels_and_preemptions(
    requests, num_blocks, block_size, max_batch_tokens, max_batch_size, prefix_caching
):
    """Whatever comes in whatever order: every accepted request ends once and rightly, and the books always balance."""
    h = Harness(
        num_blocks, block_size, max_batch_tokens, min(max_batch_size, max_batch_tokens), prefix_caching=prefix_caching
    )
    arrivals, leaves = {}, {}
    for i, (at, length, max_tokens, family, shared, priority, patience) in enumerate(requests):
        ids = [*prompt(30, 1000 + family)[:shared], *prompt(length, i)]
        arrivals.setdefault(at, []).append((f"r{i}", ids, max_tokens, i, priority))
        if patience is not None:
            leaves.setdefault(at + patience, []).append(f"r{i}")
    for now in range(60):
        for id, ids, max_tokens, seed, priority in arrivals.get(now, []):
            h.add(id, ids, max_tokens, seed, priority=priority)
            h.scheduler.check()
        for id in leaves.get(now, []):
            h.engine.cancel(id)
            h.scheduler.check()
            h.collect()
        h.step()
    h.run()
    assert set(h.ends) == set(h.submits)
    for id in h.accepted:
        h.assert_right(id)
    refused = set(h.submits) - h.accepted
    assert all(h.ends[id].code == ErrorCode.CONTEXT_LENGTH_EXCEEDED for id in refused)
    assert h.cache.num_used == 0


def test_a_long_random_life():
    """Thousands of requests in one engine: nothing leaks, nothing is stuck, every answer is right."""
    rng = random.Random(7)
    h = Harness(num_blocks=24, block_size=4, max_batch_tokens=24, max_batch_size=8)
    for i in range(3000):
        ids = [*prompt(40, rng.randrange(5))[: rng.randrange(40)], *prompt(rng.randrange(1, 20), i)]
        h.add(f"r{i}", ids, rng.randrange(1, 30), seed=i, priority=rng.randrange(3))
        for _ in range(rng.randrange(3)):
            h.step()
        if rng.random() < 0.1:
            h.engine.cancel(f"r{rng.randrange(i + 1)}")
            h.collect()
    h.run()
    assert len(h.ends) == 3000
    for id in h.submits:
        h.assert_right(id)
    assert h.scheduler.counters.preemptions > 0
    assert h.scheduler.counters.prefix_hit_tokens > 0
