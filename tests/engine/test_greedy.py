"""Greedy tokens are those of transformers' own generate, whatever else the engine does at the time."""

from functools import lru_cache

import pytest
import torch

from common.params import SamplingParams
from common.wire import Finished
from tests.support.tiny_models import FAMILIES, answers, prompt_of, reference_tokens, tiny_engine, tiny_model

GREEDY = SamplingParams(temperature=0.0)
COUNT = 24
LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 23, 31, 40, 48, 57, 64, 71, 90)
"""Below, at and above whole blocks of 8, and beyond the sliding windows (20 and 24)."""

PROMPTS = [prompt_of(length, seed=length) for length in LENGTHS]


@lru_cache(maxsize=len(FAMILIES))
def reference(family: str) -> list[list[int]]:
    model = tiny_model(family)
    return [reference_tokens(model, prompt, COUNT) for prompt in PROMPTS]


def tokens(found) -> list[list[int]]:
    return [answer.tokens for answer in found]


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_is_worth_comparing_with(family):
    """A model that repeats one token would hide a broken cache."""
    assert sum(len(set(row)) for row in reference(family)) / len(LENGTHS) > 8
    assert len({tuple(row) for row in reference(family)}) == len(LENGTHS)


@pytest.mark.parametrize("family", FAMILIES)
def test_alone(family):
    """One request at a time."""
    engine = tiny_engine(family)
    for at in (0, 3, 7, 15):
        assert tokens(answers(engine, [PROMPTS[at]], COUNT, GREEDY)) == [reference(family)[at]]


@pytest.mark.parametrize("family", FAMILIES)
def test_in_a_mixed_batch_of_16(family):
    """Prefills and decodes of many lengths share steps."""
    assert tokens(answers(tiny_engine(family), PROMPTS, COUNT, GREEDY)) == reference(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_chunked_prefill(family):
    """The longest prompt takes six steps; chunks end in the middle of blocks and of windows."""
    engine = tiny_engine(family, max_batch_tokens=17)
    assert tokens(answers(engine, PROMPTS, COUNT, GREEDY)) == reference(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_prefix_hit(family):
    """Blocks that another request has computed serve this one."""
    engine = tiny_engine(family)
    answers(engine, [PROMPTS[15][:50]], COUNT, GREEDY)
    [answer] = answers(engine, [PROMPTS[15]], COUNT, GREEDY)
    assert isinstance(answer.end, Finished)
    assert answer.end.usage.cached_tokens == 48
    assert answer.tokens == reference(family)[15]


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_forced_preemption(family):
    """A cache that cannot hold everyone: requests lose their blocks and are computed again."""
    engine = tiny_engine(family, num_blocks=20, max_batch_tokens=40)
    assert tokens(answers(engine, PROMPTS, COUNT, GREEDY)) == reference(family)
    assert engine.stats.counters["preemptions"] > 0


def test_blocks_with_leftovers_do_not_leak():
    """A cache whose memory starts full of NaN gives the same tokens: nothing unwritten is ever summed up."""
    engine = tiny_engine("gemma3", num_blocks=40)
    cache = engine._runner.cache
    answers(engine, [PROMPTS[0]], 1, GREEDY)
    with torch.inference_mode():
        for stored in (tensor for pair in cache.layers.values() for tensor in pair):
            stored[:, : cache.num_blocks] = float("nan")
    assert tokens(answers(engine, PROMPTS[10:12], COUNT, GREEDY)) == reference("gemma3")[10:12]
