"""Log-probabilities of generated tokens, by the model's own logits: before penalties, bias, temperature and filters.

Runs on the engine thread, around the sampler, which changes logits in place.
"""

from collections.abc import Callable

import torch

from common.wire import Logprobs
from worker.batch import SampleRow

LOWEST = -9999.0
"""In place of minus infinity, which JSON does not have."""


def start_logprobs(logits: torch.Tensor, rows: list[SampleRow]) -> Callable[[list[int]], dict[int, Logprobs]]:
    """Look at the logits (float32 [rows, vocabulary]) before they are changed.

    Returns what gives the log-probabilities once the tokens are drawn, by index of the row, for the rows that ask.
    """
    which = [at for at, row in enumerate(rows) if row.num_logprobs is not None]
    if not which:
        return lambda token_ids: {}
    chosen = logits[which].double()
    # One row after another: a sum over several at once has other last bits than over one.
    logprobs = torch.stack([row - row.logsumexp(-1) for row in chosen]).clamp_(min=LOWEST)
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
