"""The bits of a token's logits depend on its own request alone.

Neither on the others in the step nor on how the request was cut into steps: so a seeded request gives the same tokens
alone, in a full batch, after a preemption, a prefix hit or a restart.
"""

import pytest
import torch

from common.params import SamplingParams
from tests.support.tiny_models import answers, packed_model, prompt_of, tiny_engine
from worker.batch import Scheduled, build_batch
from worker.request import RequestState
from worker.runner import TorchRunner

LENGTH = 220
SEEN = 16

pytestmark = pytest.mark.usefixtures("two_threads")


def request(length: int, seed: int, number: int, block_size: int) -> RequestState:
    made = RequestState(f"r{seed}", prompt_of(length, seed), length, SamplingParams(), 1)
    blocks = 512 // block_size + 1
    made.block_table = list(range(number * blocks, (number + 1) * blocks))
    return made


def last_logits(runner: TorchRunner, chunks: list[int], others: int = 0) -> torch.Tensor:
    """Return the logits of the last SEEN positions of a request that is computed in these chunks, next to others.

    The others' contexts are shorter and longer than its own.
    """
    block_size = runner.cache.block_size
    main = request(LENGTH, seed=1, number=0, block_size=block_size)
    company = [request(30 + 31 * at, 50 + at, 1 + at, block_size) for at in range(others)]
    for each in company:
        runner.run(build_batch([Scheduled(each, each.num_tokens - 1)], block_size))
        each.num_computed = each.num_tokens - 1
    found = []
    for length in chunks:
        before, after = company[: others // 2], company[others // 2 :]
        plan = [*(Scheduled(each, 1) for each in before), Scheduled(main, length)]
        batch = build_batch([*plan, *(Scheduled(each, 1) for each in after)], block_size)
        first = max(0, LENGTH - SEEN - main.num_computed)
        with torch.inference_mode():
            found.append(runner.forward(batch, [len(before) + at for at in range(first, length)] or [0]))
        main.num_computed += length
    return torch.cat(found)[-SEEN:]


@pytest.mark.parametrize("quantization", ["none", "fp16", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "mistral", "gpt2"])
@pytest.mark.parametrize("block_size", [5, 8, 16, 32])
def test_bits_of_logits(family, quantization, block_size):
    """Whole, in chunks, token by token, alone or among 15 others: always the same bits, whatever the block size."""
    runner = TorchRunner(packed_model(family, quantization), 16 * (512 // block_size + 1), block_size)
    whole = last_logits(runner, [LENGTH])
    assert torch.equal(last_logits(runner, [128, 92]), whole)
    assert torch.equal(last_logits(runner, [31] * 7 + [3]), whole)
    assert torch.equal(last_logits(runner, [1, 2, 4, 6, 9, 12] + [31] * 6, others=3), whole)
    assert torch.equal(last_logits(runner, [LENGTH - SEEN] + [1] * SEEN), whole)
    assert torch.equal(last_logits(runner, [LENGTH - SEEN] + [1] * SEEN, others=15), whole)
    assert torch.equal(last_logits(runner, [LENGTH - SEEN] + [4] * (SEEN // 4), others=15), whole)


@pytest.mark.parametrize("quantization", ["none", "fp16", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "phi3"])
def test_seeded_request_alone_and_among_16_others(family, quantization):
    """At temperature 1 the last bit of a probability could turn a choice; the tokens are exactly the same."""
    params = SamplingParams(temperature=1.0, seed=1234)
    prompt = prompt_of(37, seed=3)
    [alone] = answers(tiny_engine(family, quantization=quantization), [prompt], 48, params)
    others = [prompt_of(5 + 6 * at, seed=100 + at) for at in range(16)]
    mixed = [SamplingParams(temperature=at % 3 * 0.7, top_p=1 - at % 2 * 0.2, seed=at) for at in range(16)]
    crowd = answers(
        tiny_engine(family, quantization=quantization, num_blocks=90, max_batch_tokens=33),
        [*others[:8], prompt, *others[8:]],
        48,
        [*mixed[:8], params, *mixed[8:]],
    )
    assert crowd[8].tokens == alone.tokens
    assert len(set(alone.tokens)) > 20
