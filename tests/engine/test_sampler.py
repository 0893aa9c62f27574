"""The sampler against a plain one that knows a single row, and the guarantees a client can count on."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.params import SamplingParams
from worker import filters, random_numbers
from worker.batch import SampleRow
from worker.random_numbers import uniform
from worker.sampler import UNUSABLE, sample

GREEDY = SamplingParams(temperature=0.0)


def row(
    params: SamplingParams,
    tokens: list[int] | None = None,
    num_prompt: int = 0,
    index: int = 0,
    end_ids: frozenset[int] = frozenset(),
) -> SampleRow:
    return SampleRow(0, index, params, tokens or [], num_prompt, end_ids)


def draw(logits: list[float], params: SamplingParams, **more) -> int:
    return sample(torch.tensor([logits], dtype=torch.float32), [row(params, **more)])[0]


# --- a plain sampler --------------------------------------------------------------------------------------------------


def kept_probabilities(logits: list[float], at: SampleRow) -> list[float]:
    """Return the probabilities that are left after every filter, by one step after another in double precision."""
    p, scores = at.params, [float(x) for x in logits]
    output = at.tokens[at.num_prompt :]
    for token in set(at.tokens):
        scores[token] *= 1 / p.repetition_penalty if scores[token] > 0 else p.repetition_penalty
        scores[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty * (token in output)
    for token, penalty in plain_dry(at).items():
        scores[token] -= penalty
    for token, bias in p.logit_bias:
        scores[token] += bias
    for token in range(len(scores)):
        if (p.allowed_token_ids and token not in p.allowed_token_ids) or (
            at.index < p.min_tokens and token in at.end_ids
        ):
            scores[token] = -math.inf
    if p.greedy:
        best = max(range(len(scores)), key=lambda token: (scores[token], -token))
        return [float(token == best) for token in range(len(scores))]
    top = max(scores)
    weights = [math.exp((x - top) / p.temperature) for x in scores]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = order[: p.top_k] if p.top_k else order
    mass, nucleus, running = sum(weights[token] for token in kept), [], 0.0
    for token in kept:
        if p.top_p < 1.0 and nucleus and running >= p.top_p * mass:
            break
        nucleus.append(token)
        running += weights[token]
    lowest = min(weights[token] for token in nucleus if weights[token] >= p.min_p * weights[order[0]])
    weights = [weight if weight >= lowest else 0.0 for weight in weights]
    return plain_xtc(plain_typical(weights, p.typical_p), at)


def plain_dry(at: SampleRow) -> dict[int, float]:
    """For each token, the longest end of the text that stands before an earlier place of it."""
    p = at.params
    if not p.dry_multiplier:
        return {}
    tokens = at.tokens[-p.dry_range :] if p.dry_range else at.tokens
    longest: dict[int, int] = {}
    for place in range(1, len(tokens)):
        if tokens[place] in p.dry_breakers:
            continue
        length = 0
        while (
            length < place
            and tokens[place - 1 - length] == tokens[len(tokens) - 1 - length]
            and tokens[place - 1 - length] not in p.dry_breakers
        ):
            length += 1
        longest[tokens[place]] = max(length, longest.get(tokens[place], 0))
    return {
        token: p.dry_multiplier * p.dry_base ** (min(length, 50) - p.dry_allowed_length)
        for token, length in longest.items()
        if length and length >= p.dry_allowed_length
    }


def plain_typical(weights: list[float], typical_p: float) -> list[float]:
    if typical_p >= 1.0:
        return weights
    total = sum(weights)
    surprise = {token: -math.log(weight / total) for token, weight in enumerate(weights) if weight}
    expected = sum(weights[token] / total * surprise[token] for token in surprise)
    deviation = {token: abs(surprise[token] - expected) for token in surprise}
    furthest, running = -1.0, 0.0
    for token in sorted(deviation, key=deviation.__getitem__):
        if furthest >= 0 and running >= typical_p:
            break
        furthest = deviation[token]
        running += weights[token] / total
    return [weight if weight and deviation[token] <= furthest else 0.0 for token, weight in enumerate(weights)]


def plain_xtc(weights: list[float], at: SampleRow) -> list[float]:
    p = at.params
    if uniform(p.seed + random_numbers.XTC_STREAM, at.index) >= p.xtc_probability:
        return weights
    top = sorted(weight for weight in weights if weight and weight >= p.xtc_threshold * sum(weights))
    return [0.0 if weight in top and weight > top[0] else weight for weight in weights]


def plain_token(logits: list[float], at: SampleRow) -> tuple[int, bool]:
    """Return the token, and whether the choice is so close that another rounding may turn it."""
    weights = kept_probabilities(logits, at)
    wanted, running, close = uniform(at.params.seed, at.index) * sum(weights), 0.0, False
    chosen = -1
    for token, weight in enumerate(weights):
        close |= weight > 0 and abs(running + weight - wanted) < 1e-4 * sum(weights)
        running += weight
        if chosen < 0 and running > wanted:
            chosen = token
    return chosen, close


VOCAB = 24
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.1, 0.37, 0.73, 0.93, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 23, 24, 1000]),
    min_p=st.sampled_from([0.0, 0.03, 0.21, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 2.0, 0.5]),
    typical_p=st.sampled_from([1.0, 1.0, 0.87, 0.41, 0.0]),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.0413, 0.1307, 0.49]),
    dry_multiplier=st.sampled_from([0.0, 0.0, 0.5]),
    dry_base=st.sampled_from([1.0, 1.5, 2.0]),
    dry_allowed_length=st.sampled_from([0, 1, 2, 3]),
    dry_range=st.sampled_from([0, 1, 5, 100]),
    dry_breakers=st.sampled_from([(), (3,), (0, 1, 2, 3)]),
    logit_bias=st.sampled_from([(), ((0, 5.0), (3, -100.0)), ((23, 100.0),)]),
    allowed_token_ids=st.sampled_from([(), (), (0, 3, 5, 9, 23)]),
    min_tokens=st.sampled_from([0, 0, 2**20]),
    seed=st.integers(0, 2**63 - 1),
)


@st.composite
def rows(draw_from):
    few = st.lists(st.integers(0, 3), max_size=20)  # in which sequences come again
    tokens = draw_from(st.lists(st.integers(0, VOCAB - 1), max_size=12) | few)
    # Distinct multiples of a sixteenth are exact in float32, and their weights stay distinct: no filter hangs on a
    # rounding.
    logits = [x / 16 for x in random.Random(draw_from(st.integers(0, 2**20))).sample(range(-64, 65), VOCAB)]
    at = row(
        draw_from(params),
        tokens,
        draw_from(st.integers(0, len(tokens))),
        draw_from(st.integers(0, 2**20)),
        draw_from(st.sampled_from([frozenset(), frozenset({0, 7})])),
    )
    return logits, at


@settings(max_examples=400, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=6))
def test_same_as_a_plain_sampler(batch):
    """All parameters at once, in batches: each row is what the plain sampler gives for it."""
    found = sample(torch.tensor([logits for logits, _ in batch]), [at for _, at in batch])
    for (logits, at), token in zip(batch, found, strict=True):
        expected, close = plain_token(logits, at)
        assert token == expected or close


@settings(max_examples=60, deadline=None)
@given(st.lists(rows(), min_size=2, max_size=8), st.randoms())
def test_a_row_does_not_depend_on_the_others(batch, chooser):
    """The same row gives the same token alone, in any batch and at any place in it."""
    together = sample(torch.tensor([logits for logits, _ in batch]), [at for _, at in batch])
    shuffled = list(range(len(batch)))
    chooser.shuffle(shuffled)
    again = sample(torch.tensor([batch[i][0] for i in shuffled]), [batch[i][1] for i in shuffled])
    assert [again[shuffled.index(i)] for i in range(len(batch))] == together
    assert [sample(torch.tensor([logits]), [at])[0] for logits, at in batch] == together


@pytest.mark.usefixtures("two_threads")
def test_a_row_does_not_depend_on_the_others_in_a_real_vocabulary():
    """150,000 tokens and flat distributions, where one more thread or another order of a sum could turn a choice."""
    torch.manual_seed(0)
    logits = torch.randn(8, 150_001)
    at = [row(SamplingParams(top_p=0.5 + 0.06 * i, top_k=i % 3 * 3000, seed=i)) for i in range(8)]
    together = sample(logits.clone(), at)
    assert [sample(logits[i : i + 1].clone(), at[i : i + 1])[0] for i in range(8)] == together
    assert len(set(together)) == 8


def test_wide_filters_see_past_the_first_candidates(monkeypatch):
    """top_p and top_k that keep more than NUM_CANDIDATES tokens give what a look at the whole vocabulary gives."""
    torch.manual_seed(1)
    logits = torch.randn(40, 300)
    at = [row(SamplingParams(top_p=0.9 + i % 10 / 100, top_k=i % 4 * 60, min_p=i % 3 / 50, seed=i)) for i in range(40)]
    whole = sample(logits.clone(), at)
    monkeypatch.setattr(filters, "NUM_CANDIDATES", 16)
    assert sample(logits.clone(), at) == whole


# --- randomness -----------------------------------------------------------------------------------------------------


def test_uniform_is_splitmix64():
    """The generator's published first numbers from state 0 (reference implementation by Vigna)."""
    assert [random_numbers._mix((i * 0x9E3779B97F4A7C15) & (2**64 - 1)) for i in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_uniform_is_uniform_along_indices_and_along_seeds():
    """Sixteen equal bins are filled alike (chi-square with 15 degrees of freedom), and neighbours do not follow."""
    for draws in (
        [uniform(7, index) for index in range(16_000)],
        [uniform(seed, 0) for seed in range(16_000)],
        [uniform(2**63 - 1 - seed, 5) for seed in range(16_000)],
    ):
        counts = np.bincount((np.array(draws) * 16).astype(int), minlength=16)
        assert ((counts - 1000) ** 2 / 1000).sum() < 37.7  # 0.1 %
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03
        assert 0 <= min(draws) < max(draws) < 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.5, top_k=6),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3),
    ],
)
def test_tokens_come_as_often_as_they_should(params):
    """20,000 draws of one request, 64 rows at a time, against the exact distribution (chi-square, 0.1 %)."""
    torch.manual_seed(3)
    logits = torch.randn(12)
    tokens = [1, 1, 2, 5, 5, 5, 7]
    expected = np.array(kept_probabilities(logits.tolist(), row(params, tokens, num_prompt=2)))
    expected = expected / expected.sum() * 19_968
    counts = np.zeros(12)
    for first in range(0, 19_968, 64):
        at = [row(params, tokens, num_prompt=2, index=first + i) for i in range(64)]
        counts += np.bincount(sample(logits.repeat(64, 1), at), minlength=12)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert (
        statistic
        < {1: 10.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3, 8: 26.1, 9: 27.9, 10: 29.6, 11: 31.3}[
            int(possible.sum()) - 1
        ]
    )


# --- edges ----------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_first_of_the_best():
    assert draw([0.0, 3.0, 3.0, 1.0], GREEDY) == 1


def test_greedy_heeds_penalties_but_no_filter():
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0, top_k=1)
    assert draw([0.0, 3.0, 2.5], params, tokens=[1]) == 2


def test_repetition_counts_the_prompt_and_the_others_do_not():
    logits = [0.0, 3.0, 2.5]
    assert draw(logits, SamplingParams(temperature=0.0, repetition_penalty=2.0), tokens=[1], num_prompt=1) == 2
    assert draw(logits, SamplingParams(temperature=0.0, presence_penalty=2.0), tokens=[1], num_prompt=1) == 1


def test_repetition_lowers_negative_logits_too():
    assert draw([-1.0, -1.5], SamplingParams(temperature=0.0, repetition_penalty=2.0), tokens=[0], num_prompt=1) == 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-12])
def test_tiny_temperatures_are_almost_greedy(temperature):
    """They must not divide by zero or overflow."""
    assert draw([-3.0, 900.0, 2.0], SamplingParams(temperature=temperature, seed=9)) == 1


@pytest.mark.parametrize("params", [SamplingParams(top_p=0.0), SamplingParams(top_k=1), SamplingParams(min_p=1.0)])
def test_the_narrowest_filters_leave_the_best(params):
    assert draw([0.0, 0.1, 0.2, 0.0], params) == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_p=0.9), SamplingParams(presence_penalty=1.0)])
def test_unusable_logits_fail_their_row_alone(params, bad):
    """NaN or infinity in one request's logits: that row says so, its neighbours get their tokens."""
    good, broken = [0.0, 9.0, -1.0], [0.0, bad, 1.0]
    at = [row(params, [0], 0) for _ in range(3)]
    first, second, third = sample(torch.tensor([good, broken, good]), at)
    assert second == UNUSABLE
    assert first == third == draw(good, params, tokens=[0])


def test_nothing_to_draw_is_unusable():
    assert draw([-math.inf] * 3, SamplingParams()) == UNUSABLE
    assert draw([-math.inf] * 3, GREEDY) == UNUSABLE


def test_a_token_of_minus_infinity_is_never_drawn():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).repeat(64, 1)
    drawn = sample(logits, [row(SamplingParams(seed=seed, top_k=4)) for seed in range(64)])
    assert set(drawn) == {1, 3}


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_unit_interval_pick_possible_tokens(monkeypatch, number):
    """The smallest and the largest uniform number must not fall on tokens of probability 0 at the ends."""
    monkeypatch.setattr("worker.sampler.uniform", lambda seed, index: number)
    logits = [-math.inf, *[0.1 * i for i in range(50)], -math.inf]
    assert draw(logits, SamplingParams()) == (1 if number == 0.0 else 50)
