"""A cache too small for its requests costs time and nothing else: preempted requests give the same tokens."""

import random

import pytest

from common.params import SamplingParams
from tests.support.tiny_models import answers, prompt_of, tiny_engine

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=11, presence_penalty=0.5, repetition_penalty=1.1)
BLOCK = 8


def prompts(shared: int) -> list[list[int]]:
    """16 prompts of 40 to 100 tokens, the first `shared` of them the same in all."""
    start = prompt_of(shared, seed=99) if shared else []
    sizes = random.Random(5)
    return [start + prompt_of(sizes.randrange(40, 100), seed=number) for number in range(16)]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("shared", [0, 64], ids=["apart", "shared prefix"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_preempted_requests_give_the_same_tokens(family, shared, params):
    """In a cache that holds about three of sixteen requests, and one that holds all."""
    roomy = tiny_engine(family, num_blocks=16 * 40, block_size=BLOCK)
    tight = tiny_engine(family, num_blocks=90, block_size=BLOCK)
    wanted = answers(roomy, prompts(shared), 120, params)
    found = answers(tight, prompts(shared), 120, params)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]
    assert all(len(answer.tokens) == 120 for answer in found)
    assert roomy.stats.counters["preemptions"] == 0
    assert tight.stats.counters["preemptions"] > 5
    assert tight.stats.kv_blocks_used == 0
    if shared:
        assert tight.stats.counters["prefix_hit_tokens"] > 0
