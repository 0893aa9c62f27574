"""Log-probabilities: the model's own, whatever the sampler does, alone and in a crowd."""

import pytest
import torch

from common.params import SamplingParams
from common.wire import Logprobs, Submit, Tokens
from tests.support.tiny_models import prompt_of, tiny_engine, tiny_model
from worker.batch import SampleRow
from worker.logprobs import LOWEST, start_logprobs

ODD = SamplingParams(
    temperature=1.5, top_k=50, presence_penalty=1.0, repetition_penalty=1.3, logit_bias=((5, 10.0),), seed=3
)


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


def test_what_cannot_be_has_a_number_that_json_has():
    logits = torch.tensor([[0.0, float("-inf"), 1.0]])
    tell = start_logprobs(logits, [SampleRow(0, 0, SamplingParams(), [], 0, num_logprobs=3)])
    told = tell([1])[0]
    assert (told.logprob, told.top_logprobs[-1]) == (LOWEST, LOWEST)


def test_an_unusable_row_has_none():
    tell = start_logprobs(torch.full((1, 3), float("nan")), [SampleRow(0, 0, SamplingParams(), [], 0, num_logprobs=1)])
    assert tell([-1]) == {}
