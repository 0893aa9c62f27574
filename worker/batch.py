"""What one step computes, as plain integers: the form in which the scheduler's plan reaches a runner.

No torch here; the runner turns these lists into tensors. Runs on the engine thread.
"""

from dataclasses import dataclass, field
from typing import Protocol

from common.params import SamplingParams
from common.wire import Logprobs
from worker.request import RequestState


@dataclass(slots=True)
class Segment:
    """A run of consecutive tokens of one request in this step.

    Its tokens are rows `row .. row + length - 1` of the packed batch and stand at positions `start .. start +
    length - 1` of the request. `block_table` covers at least positions 0 .. start + length - 1.
    """

    row: int
    start: int
    length: int
    block_table: list[int]


@dataclass(slots=True)
class SampleRow:
    """One token to draw from the logits of packed row `row`.

    `index` is the index of the token to be drawn among the request's generated tokens: with the seed it fixes the
    random number. `tokens` is the request's whole token list (not a copy; the first `num_prompt` are the prompt).
    `end_ids` are the tokens that would end the request. `num_logprobs` is as in Submit.
    """

    row: int
    index: int
    params: SamplingParams
    tokens: list[int]
    num_prompt: int
    end_ids: frozenset[int] = frozenset()
    num_logprobs: int | None = None


@dataclass(slots=True)
class ScoreRow:
    """A prompt token whose log-probability is wanted: `token` is what follows packed row `row`."""

    row: int
    token: int
    num_logprobs: int


@dataclass(slots=True)
class StepBatch:
    """All the tokens of one step, packed one after another without padding.

    input_ids, positions, slots: one int per token; a slot is block id × block_size + offset in the block, where that
    token's key and value are written.
    """

    input_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    samples: list[SampleRow] = field(default_factory=list)
    scores: list[ScoreRow] = field(default_factory=list)


@dataclass(slots=True)
class StepResult:
    """What a step computed: one token id for each of the batch's samples, in order.

    logprobs: by index of the sample, where they were asked for. prompt_logprobs: one for each of the batch's scores.
    """

    token_ids: list[int]
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)


class Runner(Protocol):
    """Computes a step. The real one holds the model and the tensors of the KV cache; tests use small fakes."""

    def run(self, batch: StepBatch) -> StepResult:
        """Write keys and values, and draw a token for each of `batch.samples`."""
        ...


@dataclass(slots=True)
class Scheduled:
    """One request's share of a step: its tokens num_computed .. num_computed + num_new - 1."""

    request: RequestState
    num_new: int


def scored_positions(item: Scheduled) -> range:
    """Return the positions of a step's share whose next token is a prompt token that is to be scored."""
    request = item.request
    if not request.scores_prompt:
        return range(0)
    start = max(request.num_computed, len(request.prompt_logprobs))
    return range(start, min(request.num_computed + item.num_new, request.num_prompt - 1))


def build_batch(scheduled: list[Scheduled], block_size: int) -> StepBatch:
    """Pack the scheduled tokens. A request samples in this step when the step reaches its last token."""
    batch = StepBatch()
    for item in scheduled:
        request, start, length = item.request, item.request.num_computed, item.num_new
        row = len(batch.input_ids)
        end = start + length
        table = request.block_table
        batch.input_ids.extend(request.tokens[start:end])
        batch.positions.extend(range(start, end))
        batch.slots.extend(table[at // block_size] * block_size + at % block_size for at in range(start, end))
        batch.segments.append(Segment(row, start, length, table))
        batch.scores.extend(
            ScoreRow(row + at - start, request.tokens[at + 1], request.num_logprobs or 0)
            for at in scored_positions(item)
        )
        if end == request.num_tokens:
            batch.samples.append(
                SampleRow(
                    row + length - 1,
                    request.num_generated,
                    request.params,
                    request.tokens,
                    request.num_prompt,
                    request.end_ids,
                    request.num_logprobs,
                )
            )
    return batch
