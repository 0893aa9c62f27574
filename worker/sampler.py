"""Draws the next tokens of a step from its logits, each row by its own parameters.

Vectorised over the rows, yet a row's token depends on its own logits, parameters, tokens, seed and index alone. Runs on
the engine thread.

The order is that of transformers: penalties, temperature, top_k, top_p, min_p; then one uniform number picks from what
is left by the inverse of its cumulative distribution. A filter is a threshold on the probabilities: tokens that tie
with the last one kept are kept too, so the result does not depend on how a sort orders them.

Logits that are NaN or infinitely large cannot be sampled from. Such a row gives UNUSABLE, which fails its request; the
other rows go on. Minus infinity is a token that cannot be drawn.
"""

import numpy as np
import torch

from common.params import SamplingParams
from worker.batch import SampleRow

UNUSABLE = -1
"""In place of a token id: the row's logits were not finite. The scheduler fails the request."""

NUM_CANDIDATES = 1024
"""The most likely tokens that are looked at first for top_k and top_p; only a row that needs more is sorted whole."""

MIN_TEMPERATURE = 1e-6
"""Lower ones than this, but above 0, count as this: they would divide by zero in float32."""

_MASK64 = 2**64 - 1


def uniform(seed: int, index: int) -> float:
    """Return the random number in [0, 1) of token `index` of a request: a pure function of the two.

    SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), applied to the seed and then
    to the stream it names; the top 53 bits of the result make the number.
    """
    return (_mix(_mix(seed) + (index + 1) * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """SplitMix64's finaliser (Stafford's variant 13), one to one on 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    """Return one token id, or UNUSABLE, for each row of `logits` (float32 [rows, vocabulary]; may be changed)."""
    penalised = [at for at, row in enumerate(rows) if row.params.penalised]
    if penalised:
        _penalise(logits, penalised, rows)
    top = logits.amax(-1)  # NaN when any logit is
    tokens = logits.argmax(-1)
    drawn = [at for at, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        chosen = logits if len(drawn) == len(rows) else logits.index_select(0, index)
        tokens.index_copy_(0, index, _draw(chosen, [rows[at] for at in drawn]))
    return torch.where(torch.isfinite(top), tokens, UNUSABLE).tolist()


def _penalise(logits: torch.Tensor, which: list[int], rows: list[SampleRow]) -> None:
    """Lower the logits of tokens that were seen, in place.

    repetition_penalty (Keskar et al., CTRL, 2019) looks at prompt and output; presence and frequency, OpenAI's, look
    at the output only.
    """
    at_rows, at_tokens, repetition, subtracted = [], [], [], []
    for at in which:
        row = rows[at]
        seen, occurrence = np.unique(np.asarray(row.tokens, np.int64), return_inverse=True)
        generated = np.bincount(occurrence[row.num_prompt :], minlength=len(seen))
        params = row.params
        at_rows.append(np.full(len(seen), at))
        at_tokens.append(seen)
        repetition.append(np.full(len(seen), params.repetition_penalty, np.float32))
        subtracted.append(
            (params.frequency_penalty * generated + params.presence_penalty * (generated > 0)).astype(np.float32)
        )
    index = tuple(torch.from_numpy(np.concatenate(part)).to(logits.device) for part in (at_rows, at_tokens))
    factor, offset = (torch.from_numpy(np.concatenate(part)).to(logits.device) for part in (repetition, subtracted))
    values = logits[index]
    logits[index] = torch.where(values > 0, values / factor, values * factor) - offset


def _draw(logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """Return a token id for each row, int64; logits are penalised already."""
    params = [row.params for row in rows]
    # The largest becomes 0 before the division, so that no temperature, however low, makes it overflow.
    logits = logits - logits.amax(-1, keepdim=True)
    logits /= _column([max(p.temperature, MIN_TEMPERATURE) for p in params], logits)
    probabilities = torch.softmax(logits, -1)
    filtered = [at for at, p in enumerate(params) if p.top_k or p.top_p < 1.0 or p.min_p]
    if filtered:
        index = torch.tensor(filtered, device=logits.device)
        part = probabilities.index_select(0, index)
        lowest = _lowest_kept(part, [params[at] for at in filtered])
        probabilities.index_copy_(0, index, part.masked_fill_(part < lowest, 0.0))
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    numbers = _column([uniform(row.params.seed, row.index) for row in rows], cumulative)
    # Strictly below the total, so that rounding can never pick a token of probability 0 behind the last one.
    wanted = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, wanted, right=True).clamp_(max=logits.shape[-1] - 1)[:, 0]


def _lowest_kept(probabilities: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Return [rows, 1], the lowest probability that top_k, top_p and min_p leave."""
    candidates = min(NUM_CANDIDATES, probabilities.shape[-1])
    lowest, enough = _cut(probabilities.topk(candidates).values, params)
    whole = [at for at, known in enumerate(enough) if not known]
    if whole and candidates < probabilities.shape[-1]:
        index = torch.tensor(whole, device=probabilities.device)
        ordered = _descending(probabilities.index_select(0, index))
        lowest.index_copy_(0, index, _cut(ordered, [params[at] for at in whole])[0])
    return lowest


def _cut(ordered: torch.Tensor, params: list[SamplingParams]) -> tuple[torch.Tensor, list[bool]]:
    """Return the lowest kept of each row's largest probabilities, and whether these were enough to know it.

    ordered: [rows, candidates], falling. top_p looks at what top_k leaves, min_p at the most likely token. The most
    likely token always stays. Sums are running ones: a plain sum of one row takes another order than one of several.
    """
    width = ordered.shape[-1]
    top_k = torch.tensor([[p.top_k or width + 1] for p in params], device=ordered.device)
    within = torch.arange(width, device=ordered.device) < top_k
    mass = (ordered.double() * within).cumsum(-1)
    total = torch.where(top_k <= width, mass[:, -1:], 1.0)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    top_p = _column([p.top_p if p.top_p < 1.0 else float("inf") for p in params], mass)
    min_p = _column([p.min_p for p in params], ordered)
    kept = within & (before < top_p * total) & (ordered >= min_p * ordered[:, :1])
    count = kept.sum(-1, keepdim=True).clamp_(min=1)
    counts = count[:, 0].tolist()
    enough = [n < width if not p.top_k else p.top_k <= width for n, p in zip(counts, params, strict=True)]
    return ordered.gather(1, count - 1), enough


def _descending(logits: torch.Tensor) -> torch.Tensor:
    """Return the rows sorted, largest first. NumPy sorts on the CPU: without indices it is ten times torch's speed."""
    if logits.device.type == "cpu":
        return torch.from_numpy(-np.sort(-logits.numpy(), axis=-1))
    return logits.sort(-1, descending=True).values


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
