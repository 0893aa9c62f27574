"""Log-probabilities of generated and of prompt tokens, by the model's own logits: before sampling changes them.

Runs on the engine thread, around the sampler, which changes logits in place.
"""

from collections.abc import Callable

import torch

from common.wire import Logprobs
from worker.batch import SampleRow, ScoreRow

LOWEST = -9999.0
"""In place of minus infinity, which JSON does not have."""


def start_logprobs(logits: torch.Tensor, rows: list[SampleRow]) -> Callable[[list[int]], dict[int, Logprobs]]:
    """Look at the logits (float32 [rows, vocabulary]) before they are changed.

    Returns what gives the log-probabilities once the tokens are drawn, by index of the row, for the rows that ask.
    """
    which = [at for at, row in enumerate(rows) if row.num_logprobs is not None]
    if not which:
        return lambda token_ids: {}
    logprobs = _logprobs(logits[which])
    most = max(rows[at].num_logprobs or 0 for at in which)
    top = logprobs.topk(most)

    def tell(token_ids: list[int]) -> dict[int, Logprobs]:
        own = logprobs.gather(1, torch.tensor([[max(token_ids[at], 0)] for at in which], device=logprobs.device))
        told = zip(which, own[:, 0].tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
        return {
            at: Logprobs(value, ids[: rows[at].num_logprobs], values[: rows[at].num_logprobs])
            for at, value, ids, values in told
            if token_ids[at] >= 0
        }

    return tell


def score(logits: torch.Tensor, rows: list[ScoreRow]) -> list[Logprobs]:
    """Return the log-probabilities of given tokens, one for each row of `logits` (float32 [rows, vocabulary])."""
    found = []
    for row, own in zip(rows, logits, strict=False):  # one at a time: in double precision a row is a megabyte or two
        logprobs = _logprobs(own[None])[0]
        top = logprobs.topk(row.num_logprobs)
        found.append(Logprobs(float(logprobs[row.token]), top.indices.tolist(), top.values.tolist()))
    return found


def _logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities in double precision."""
    # One row after another: a sum over several at once has other last bits than over one.
    return torch.stack([row - row.logsumexp(-1) for row in logits.double()]).clamp_(min=LOWEST)
