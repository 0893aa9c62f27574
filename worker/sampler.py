"""Draws the next token of each row from its logits.

A row's token depends on that row alone: its logits, its parameters, its tokens so far, its seed and the index of the
token to draw. Nothing is carried from step to step, so a request draws the same tokens alone, in a full batch, after
preemption and after a restart, wherever its logits have the same bits. Rows are handled together, with row-wise
operators only. Runs on the engine thread, on the device of the logits.
"""

import torch

from worker.batch import SampleRow

UNUSABLE = -1
"""The answer for a row whose logits are not numbers: the scheduler fails that request alone."""

TOP_CANDIDATES = 1024
"""Candidates that top_k and top_p look at before a row's whole vocabulary is sorted."""

_MASK64 = (1 << 64) - 1


def uniform(seed: int, index: int) -> float:
    """Return the random number in [0, 1) for the `index`-th token of a request with this seed; a pure function.

    Two rounds of SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014): the first
    turns the seed into a stream, the second picks the index-th number of it. 53 bits, as many as a double holds.
    """
    stream = _splitmix64(seed & _MASK64)
    return (_splitmix64((stream + index * 0x9E3779B97F4A7C15) & _MASK64) >> 11) * 2.0**-53


def _splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    """Return one token id for each row of float logits [R, vocab_size]; UNUSABLE where a row holds no numbers.

    The order is that of transformers: penalties, temperature, top_k, top_p, min_p. Changes the logits in place.
    """
    logits = logits.float()
    for at, row in enumerate(rows):
        if row.params.penalised:
            _penalise(logits[at], row)
    best, tokens = logits.max(-1)
    drawn = [at for at, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        tokens[drawn] = _draw(logits[drawn], [rows[at] for at in drawn])
    return torch.where(torch.isfinite(best), tokens, UNUSABLE).tolist()


def _penalise(logits: torch.Tensor, row: SampleRow) -> None:
    """Apply the penalties to one row of logits [vocab_size], in place.

    repetition_penalty (Keskar et al., CTRL, 2019) counts prompt and answer, the other two the answer alone (OpenAI).
    """
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(row.tokens, device=logits.device).unique()
        scores = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    if params.presence_penalty or params.frequency_penalty:
        generated = torch.tensor(row.tokens[row.num_prompt :], dtype=torch.int64, device=logits.device)
        seen, counts = generated.unique(return_counts=True)
        logits[seen] -= params.presence_penalty + params.frequency_penalty * counts


def _draw(logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """Return token ids int64 [R] drawn from logits [R, vocab_size] by inverting the cumulative distribution."""
    device = logits.device
    temperatures = torch.tensor([row.params.temperature for row in rows], device=device)
    # A tiny temperature makes infinities of the logits themselves, but never of their distance from the best.
    scores = (logits - logits.amax(-1, keepdim=True)) / temperatures[:, None]
    cutoffs = _min_p_cutoffs(rows, device)
    limited = [at for at, row in enumerate(rows) if row.params.top_k or row.params.top_p < 1.0]
    if limited:
        limits = _top_cutoffs(scores[limited], [rows[at] for at in limited])
        cutoffs[limited] = torch.maximum(cutoffs[limited], limits)
    weights = torch.where(scores >= cutoffs[:, None], torch.exp(scores), 0.0)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    uniforms = torch.tensor([[uniform(row.params.seed, row.index)] for row in rows], dtype=torch.float64, device=device)
    tokens = torch.searchsorted(cumulative, uniforms * total, right=True)
    # Rounding may put the product at the very end, past the last token with any weight.
    last = torch.searchsorted(cumulative, total, right=False)
    return torch.minimum(tokens, last)[:, 0]


def _min_p_cutoffs(rows: list[SampleRow], device: torch.device) -> torch.Tensor:
    """Return for each row the lowest score [R] that min_p keeps; scores are at most 0."""
    min_p = torch.tensor([row.params.min_p for row in rows], device=device)
    return torch.log(min_p)


def _top_cutoffs(scores: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """Return for each row of scores [R, vocab_size] the lowest score [R] that top_k and top_p keep."""
    vocab_size = scores.shape[-1]
    total = torch.exp(scores).sum(-1, dtype=torch.float64)
    candidates = scores.topk(min(TOP_CANDIDATES, vocab_size)).values
    cutoffs = [_top_cutoff(candidates[at], total[at], row, vocab_size) for at, row in enumerate(rows)]
    for at, row in enumerate(rows):
        if cutoffs[at] is None:  # the candidates were too few: sort this row's whole vocabulary
            everything = scores[at].sort(descending=True).values
            cutoffs[at] = _top_cutoff(everything, total[at], row, vocab_size)
    return torch.stack([cutoff for cutoff in cutoffs if cutoff is not None])


def _top_cutoff(candidates: torch.Tensor, total: torch.Tensor, row: SampleRow, vocab_size: int) -> torch.Tensor | None:
    """Return the lowest score that this row keeps, or None when it may lie below the given candidates.

    candidates: the row's best scores, falling. total: the sum of exp(score) over the vocabulary, float64.
    """
    top_k = min(row.params.top_k or vocab_size, vocab_size)
    complete = len(candidates) == vocab_size
    if top_k <= len(candidates):
        candidates = candidates[:top_k]
    elif not complete and row.params.top_k:
        return None
    if row.params.top_p >= 1.0:
        return candidates[-1]
    weights = torch.exp(candidates).double()
    if row.params.top_k:
        total = weights.sum()
    before = weights.cumsum(0) - weights
    kept = int((before < row.params.top_p * total).sum())
    if kept == len(candidates) and not complete and not row.params.top_k:
        return None
    return candidates[max(kept, 1) - 1]
