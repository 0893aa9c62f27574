"""Before serving: does this model really keep all its state in the paged cache, and what does a token cost there?

A few tokens are computed whole and again in parts, next to another sequence. A model with any memory of its own (a
recurrence, a convolution, a mask of its own making) gives something else the second time. This is also the first run of
every kernel. Runs in the thread that starts the worker.
"""

import torch

from common.errors import ModelError
from common.params import SamplingParams
from worker.batch import Scheduled, build_batch
from worker.model_loader import LoadedModel
from worker.request import RequestState
from worker.runner import TorchRunner

NUM_TOKENS = 24
"""Length of the sequence that is computed twice."""

PARTS = (17, 6, 1)
"""How it is cut the second time; the last is a decode."""

TOLERANCE = 0.25
"""How far the results may differ, in standard deviations of the logits; half precision makes a few hundredths."""


def probe(loaded: LoadedModel, block_size: int) -> int:
    """Return the bytes of cache a token takes. Raises ModelError for a model that cannot be served."""
    blocks = -(-NUM_TOKENS // block_size)
    runner = TorchRunner(loaded.model, 3 * blocks, block_size)
    name = type(loaded.model).__name__
    whole, parts, other = (_request(loaded.vocab_size, at, blocks) for at in range(3))
    other.tokens.reverse()
    try:
        expected = _logits(runner, [Scheduled(other, NUM_TOKENS - 5), Scheduled(whole, NUM_TOKENS)])
        for length in PARTS[:-1]:
            _logits(runner, [Scheduled(parts, length)])
            parts.num_computed += length
        other.num_computed = NUM_TOKENS - 5
        found = _logits(runner, [Scheduled(other, 5), Scheduled(parts, PARTS[-1])])
    except ModelError:
        raise
    except Exception as error:  # whatever a model does that this engine does not know
        raise ModelError(f"{name} does not work with continuous batching: {error}") from error
    _check_layers(loaded, runner)
    deviation = float((found - expected).abs().max() / expected.std().clamp(min=1e-6))
    if not deviation <= TOLERANCE:
        raise ModelError(
            f"{name} gives other results in parts than in one piece (by {deviation:.2g} standard deviations): it keeps "
            "state outside attention, which continuous batching cannot serve"
        )
    return runner.cache.bytes_per_token


def measure_step(loaded: LoadedModel, num_tokens: int, block_size: int) -> int:
    """Return the bytes of scratch memory that a step of `num_tokens` takes on a CUDA device.

    0 on the CPU, where the share of memory that the cache leaves free has room for a step many times over.
    """
    device = loaded.model.device
    if device.type != "cuda":
        return 0
    blocks = -(-num_tokens // block_size)
    runner = TorchRunner(loaded.model, blocks, block_size)
    request = RequestState("measure", [0] * num_tokens, num_tokens, SamplingParams(), 1)
    request.block_table = list(range(blocks))
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner.run(build_batch([Scheduled(request, num_tokens)], block_size))
    return max(0, torch.cuda.max_memory_allocated(device) - before)


def _request(vocab_size: int, at: int, blocks: int) -> RequestState:
    tokens = [(at_token * 7919 + 13) % vocab_size for at_token in range(NUM_TOKENS)]
    request = RequestState(f"probe-{at}", tokens, NUM_TOKENS, SamplingParams(temperature=0.0), 1)
    request.block_table = list(range(at * blocks, (at + 1) * blocks))
    return request


def _logits(runner: TorchRunner, plan: list[Scheduled]) -> torch.Tensor:
    """Compute a step and return the logits of its last row."""
    batch = build_batch(plan, runner.cache.block_size)
    with torch.inference_mode():
        return runner.forward(batch, [len(batch.input_ids) - 1])[0]


def _check_layers(loaded: LoadedModel, runner: TorchRunner) -> None:
    """Raise ModelError unless every decoder layer came through our attention, each with the window it should have."""
    calls, name = runner.cache.calls, type(loaded.model).__name__
    if set(calls) != set(range(loaded.num_layers)):
        raise ModelError(
            f"{name}: only {len(calls)} of {loaded.num_layers} layers call transformers' attention interface"
        )
    for layer, kind in enumerate(loaded.layer_types):
        if (kind == "sliding_attention") != (calls[layer].window is not None):
            raise ModelError(
                f"{name}: layer {layer} is of kind {kind}, but its attention is not told the window to use"
            )
    if loaded.window is not None and not any(call.window for call in calls.values()):
        raise ModelError(f"{name} has a sliding window, but its attention is not told so")
