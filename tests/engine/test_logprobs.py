"""Log-probabilities: the model's own, whatever the sampler does, alone and in a crowd."""

import pytest
import torch

from common.params import SamplingParams
from common.wire import Logprobs, PromptLogprobs, Submit, Tokens
from tests.support.tiny_models import prompt_of, tiny_engine, tiny_model
from worker.batch import SampleRow
from worker.engine import Engine
from worker.logprobs import LOWEST, start_logprobs

ODD = SamplingParams(
    temperature=1.5, top_k=50, presence_penalty=1.0, repetition_penalty=1.3, logit_bias=((5, 10.0),), seed=3
)


def score_prompts(
    engine: Engine,
    prompts: list[list[int]],
    num_logprobs: int = 2,
    scored: tuple[int, ...] | None = None,
    count: int = 4,
) -> list[list[Logprobs]]:
    """Run the prompts together; return the log-probabilities of those whose number is in `scored` (None: all)."""
    found: list[list[Logprobs]] = [[] for _ in prompts]
    generated: set[str] = set()
    for at, prompt in enumerate(prompts):
        asks = scored is None or at in scored
        engine.add(
            Submit(
                str(at),
                "p/0123456789abcdef/",
                prompt,
                SamplingParams(temperature=0.0),
                count,
                ignore_eos=True,
                num_logprobs=num_logprobs if asks else None,
                prompt_logprobs=asks,
            )
        )
    while engine.has_work:
        engine.step()
        for event in engine.take_events():
            if isinstance(event, Tokens):
                generated.add(event.id)
            elif isinstance(event, PromptLogprobs):
                assert event.id not in generated, "after the first token"
                assert not found[int(event.id)], "told twice"
                found[int(event.id)] = event.logprobs
    return found


def run(prompts: list[list[int]], num_logprobs: list[int | None], params: SamplingParams, count: int = 12):
    """Return (tokens, logprobs) of each prompt, run together."""
    engine = tiny_engine("llama", max_batch_tokens=32)
    found: dict[str, tuple[list[int], list[Logprobs]]] = {}
    for at, (prompt, asked) in enumerate(zip(prompts, num_logprobs, strict=True)):
        found[str(at)] = ([], [])
        engine.add(Submit(str(at), "p/0123456789abcdef/", prompt, params, count, ignore_eos=True, num_logprobs=asked))
    while engine.has_work:
        engine.step()
        for event in engine.take_events():
            if isinstance(event, Tokens):
                found[event.id][0].extend(event.ids)
                found[event.id][1].extend(event.logprobs)
    return list(found.values())


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), ODD], ids=["greedy", "odd"])
def test_they_are_those_of_a_plain_forward_pass(params):
    """Before penalties, bias, temperature and filters; the drawn token's own too when it is none of the likeliest."""
    prompt = prompt_of(20, seed=4)
    [(tokens, logprobs)] = run([prompt], [5], params)
    with torch.no_grad():
        logits = tiny_model("llama")(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    exact = logits.double().log_softmax(-1)
    assert len(logprobs) == len(tokens) == 12
    for token, told, row in zip(tokens, logprobs, exact, strict=True):
        assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
        top = row.topk(5)
        assert told.top_ids == top.indices.tolist()
        assert told.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-4)


def test_who_asks_gets_as_many_as_asked_and_changes_nothing():
    """The tokens are those of requests that ask for none, and the figures those of a request alone, to the bit."""
    prompts = [prompt_of(10 + 7 * at, seed=at) for at in range(5)]
    asked = [None, 0, 3, 20, None]
    together = run(prompts, asked, ODD)
    for (tokens, logprobs), count, prompt in zip(together, asked, prompts, strict=True):
        assert [len(told.top_ids) for told in logprobs] == ([] if count is None else [count] * 12)
        [(alone, alone_logprobs)] = run([prompt], [count], ODD)
        assert (tokens, logprobs) == (alone, alone_logprobs)
        assert run([prompt], [None], ODD)[0][0] == tokens


@pytest.mark.parametrize("max_batch_tokens", [7, 32, 256])
def test_prompts_are_scored_as_by_a_plain_forward_pass(max_batch_tokens):
    """Every token after the first, in chunks or whole, next to requests that ask for nothing."""
    prompts = [prompt_of(10 + 9 * at, seed=at) for at in range(5)]
    engine = tiny_engine("llama", max_batch_tokens=max_batch_tokens)
    found = score_prompts(engine, prompts, scored=(0, 2, 4))
    for at, (prompt, told) in enumerate(zip(prompts, found, strict=True)):
        assert len(told) == (0 if at in (1, 3) else len(prompt) - 1)
        with torch.no_grad():
            exact = tiny_model("llama")(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
        for position, entry in enumerate(told):
            assert entry.logprob == pytest.approx(float(exact[position, prompt[position + 1]]), abs=1e-4)
            top = exact[position].topk(2)
            assert (entry.top_ids, entry.top_logprobs) == (
                top.indices.tolist(),
                pytest.approx(top.values.tolist(), abs=1e-4),
            )


def test_a_cached_prompt_is_scored_all_the_same():
    """Cached blocks have no logits, so they are computed again; the figures are the same to the bit."""
    engine, prompt = tiny_engine("llama"), prompt_of(60, seed=1)
    [first] = score_prompts(engine, [prompt])
    assert len(first) == 59
    assert score_prompts(engine, [prompt]) == [first]
    assert score_prompts(engine, [prompt, prompt, prompt], scored=(0, 2)) == [first, [], first]
    assert engine.stats.kv_blocks_used == 0


def test_preemption_changes_no_score():
    """What was scored before it is not scored again."""
    prompts = [prompt_of(50, seed=at) for at in range(8)]
    roomy = score_prompts(tiny_engine("llama", num_blocks=400), prompts, count=60)
    tight = tiny_engine("llama", num_blocks=40, max_batch_tokens=20)
    assert score_prompts(tight, prompts, count=60) == roomy
    assert tight.stats.counters["preemptions"] > 3


def test_a_prompt_of_one_token_has_nothing_to_score():
    assert score_prompts(tiny_engine("llama"), [[5]]) == [[]]


def test_what_cannot_be_has_a_number_that_json_has():
    logits = torch.tensor([[0.0, float("-inf"), 1.0]])
    tell = start_logprobs(logits, [SampleRow(0, 0, SamplingParams(), [], 0, num_logprobs=3)])
    told = tell([1])[0]
    assert (told.logprob, told.top_logprobs[-1]) == (LOWEST, LOWEST)


def test_an_unusable_row_has_none():
    tell = start_logprobs(torch.full((1, 3), float("nan")), [SampleRow(0, 0, SamplingParams(), [], 0, num_logprobs=1)])
    assert tell([-1]) == {}
