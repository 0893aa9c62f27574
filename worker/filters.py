"""What leaves tokens out of the distribution before one is drawn: top_k, top_p, min_p, then typical_p, then XTC.

A filter is a threshold: tokens that tie with the last one kept are kept too, so the result does not depend on how a
sort orders them. Each row is filtered by its own parameters and numbers alone. Runs on the engine thread.
"""

import numpy as np
import torch

from common.params import SamplingParams
from worker.batch import SampleRow
from worker.random_numbers import XTC_STREAM, uniform

NUM_CANDIDATES = 1024
"""The most likely tokens that are looked at first for top_k and top_p; only a row that needs more is sorted whole."""


def apply_filters(probabilities: torch.Tensor, rows: list[SampleRow]) -> None:
    """Set the probability of what is left out to 0, in place; float32 [rows, vocabulary]."""
    params = [row.params for row in rows]
    filtered = [at for at, p in enumerate(params) if p.top_k or p.top_p < 1.0 or p.min_p]
    if filtered:
        index = torch.tensor(filtered, device=probabilities.device)
        part = probabilities.index_select(0, index)
        lowest = _lowest_kept(part, [params[at] for at in filtered])
        probabilities.index_copy_(0, index, part.masked_fill_(part < lowest, 0.0))
    # One row after another: logarithms of several at once have other last bits at other places.
    for at, p in enumerate(params):
        if p.typical_p < 1.0:
            _keep_typical(probabilities[at], p.typical_p)
    for at, (row, p) in enumerate(zip(rows, params, strict=True)):
        if p.xtc_probability and uniform(p.seed + XTC_STREAM, row.index) < p.xtc_probability:
            _exclude_top_choices(probabilities[at], p.xtc_threshold)


def _keep_typical(probabilities: torch.Tensor, mass: float) -> None:
    """Keep those tokens whose surprise is closest to the expected one, until they have this share of the probability.

    Meister et al., Locally Typical Sampling, 2022.
    """
    shares = probabilities.double()
    shares = shares / shares.cumsum(-1)[-1]
    surprise = -shares.log()
    expected = torch.where(shares > 0, shares * surprise, 0.0).cumsum(-1)[-1]
    deviation = (surprise - expected).abs()  # infinite where nothing is left
    ordered, order = deviation.sort()
    before = torch.nn.functional.pad(shares[order].cumsum(-1)[:-1], (1, 0))
    last = max(1, int((before < mass).sum())) - 1
    probabilities[deviation > ordered[last]] = 0.0


def _exclude_top_choices(probabilities: torch.Tensor, threshold: float) -> None:
    """Leave out every token of at least this share of the probability but the least likely of them.

    XTC is p-e-w's (text-generation-webui pull request 6335, 2024).
    """
    shares = probabilities.double()
    shares = shares / shares.cumsum(-1)[-1]
    top = (shares >= threshold) & (shares > 0)
    if int(top.sum()) > 1:
        probabilities[top & (shares > shares[top].min())] = 0.0


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
    top_p = column([p.top_p if p.top_p < 1.0 else float("inf") for p in params], mass)
    min_p = column([p.min_p for p in params], ordered)
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


def column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    """Return [rows, 1] of the type and on the device of another tensor."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
