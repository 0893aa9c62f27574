"""Draws the next tokens of a step from its logits, each row by its own parameters.

Vectorised over the rows, yet a row's token depends on its own logits, parameters, tokens, seed and index alone. Runs on
the engine thread.

The order is that of transformers: what changes logits (worker/logits.py), temperature, what leaves tokens out
(worker/filters.py); then one uniform number picks from what is left by the inverse of its cumulative distribution.

Logits that are NaN or infinitely large cannot be sampled from. Such a row gives UNUSABLE, which fails its request; the
other rows go on. Minus infinity is a token that cannot be drawn.
"""

import torch

from worker.batch import SampleRow
from worker.filters import apply_filters, column
from worker.logits import apply_rules
from worker.random_numbers import uniform

UNUSABLE = -1
"""In place of a token id: the row's logits were not finite. The scheduler fails the request."""

MIN_TEMPERATURE = 1e-6
"""Lower ones than this, but above 0, count as this: they would divide by zero in float32."""


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    """Return one token id, or UNUSABLE, for each row of `logits` (float32 [rows, vocabulary]; may be changed)."""
    apply_rules(logits, rows)
    top = logits.amax(-1)  # NaN when any logit is
    tokens = logits.argmax(-1)
    drawn = [at for at, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        chosen = logits if len(drawn) == len(rows) else logits.index_select(0, index)
        tokens.index_copy_(0, index, _draw(chosen, [rows[at] for at in drawn]))
    return torch.where(torch.isfinite(top), tokens, UNUSABLE).tolist()


def _draw(logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """Return a token id for each row, int64; logits are penalised already."""
    params = [row.params for row in rows]
    # The largest becomes 0 before the division, so that no temperature, however low, makes it overflow.
    logits = logits - logits.amax(-1, keepdim=True)
    logits /= column([max(p.temperature, MIN_TEMPERATURE) for p in params], logits)
    probabilities = torch.softmax(logits, -1)
    apply_filters(probabilities, rows)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    numbers = column([uniform(row.params.seed, row.index) for row in rows], cumulative)
    # Strictly below the total, so that rounding can never pick a token of probability 0 behind the last one.
    wanted = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, wanted, right=True).clamp_(max=logits.shape[-1] - 1)[:, 0]
