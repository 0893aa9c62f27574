"""What is done to a row's logits before anything is drawn: penalties, bias, tokens that may not come now.

In this order: repetition, presence and frequency penalties; DRY; bias; what is not allowed; ends that come too early.
Each works in place on those rows alone that ask for it. Runs on the engine thread.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch

from worker.batch import SampleRow

DRY_MAX_LENGTH = 50
"""Longer repeats are not told apart: the penalty is out of reach by then."""


def apply_rules(logits: torch.Tensor, rows: list[SampleRow]) -> None:
    """Change `logits` (float32 [rows, vocabulary]) in place as each row's parameters ask."""
    for asks, rule in _RULES:
        which = [at for at, row in enumerate(rows) if asks(row)]
        if which:
            rule(logits, which, rows)


def _penalise(logits: torch.Tensor, which: list[int], rows: list[SampleRow]) -> None:
    """Lower the logits of tokens that were seen.

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


def _dry(logits: torch.Tensor, which: list[int], rows: list[SampleRow]) -> None:
    for at in which:
        penalties = dry_penalties(rows[at])
        if penalties:
            index = torch.tensor(list(penalties), device=logits.device)
            logits[at, index] -= torch.tensor(list(penalties.values()), device=logits.device)


def dry_penalties(row: SampleRow) -> dict[int, float]:
    """Return what DRY subtracts from the logits of some tokens.

    A token is penalised by the longest sequence that ends the text so far and stands somewhere before it, with that
    token next. (DRY is p-e-w's, text-generation-webui pull request 5677, 2024.)
    """
    params = row.params
    tokens = np.asarray(row.tokens[-params.dry_range :] if params.dry_range else row.tokens, np.int64)
    breaks = np.isin(tokens, params.dry_breakers)
    if len(tokens) < 2 or breaks[-1]:
        return {}
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # where the last token stood before
    ends = ends[~breaks[ends + 1]]
    lengths: dict[int, int] = {}
    length = 1
    while len(ends):
        for token in np.unique(tokens[ends + 1]):
            lengths[int(token)] = length
        if length == DRY_MAX_LENGTH:
            break
        last = tokens[-1 - length] if length < len(tokens) and not breaks[-1 - length] else -1
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == last]
        length += 1
    return {
        token: params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
        for token, length in lengths.items()
        if length >= params.dry_allowed_length
    }


def _bias(logits: torch.Tensor, which: list[int], rows: list[SampleRow]) -> None:
    for at in which:
        ids, values = zip(*rows[at].params.logit_bias, strict=True)
        logits[at, torch.tensor(ids, device=logits.device)] += torch.tensor(values, device=logits.device)


def _allow(logits: torch.Tensor, which: list[int], rows: list[SampleRow]) -> None:
    for at in which:
        allowed = torch.tensor(rows[at].params.allowed_token_ids, device=logits.device)
        kept = logits[at, allowed]
        logits[at] = float("-inf")
        logits[at, allowed] = kept


def _forbid_the_end(logits: torch.Tensor, which: list[int], rows: list[SampleRow]) -> None:
    for at in which:
        logits[at, _index(rows[at].end_ids, logits)] = float("-inf")


def _index(ids: Iterable[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.tensor(sorted(ids), dtype=torch.int64, device=logits.device)


_RULES: tuple[tuple[Callable[[SampleRow], bool], Callable[[torch.Tensor, list[int], list[SampleRow]], None]], ...] = (
    (lambda row: row.params.penalised, _penalise),
    (lambda row: bool(row.params.dry_multiplier), _dry),
    (lambda row: bool(row.params.logit_bias), _bias),
    (lambda row: bool(row.params.allowed_token_ids), _allow),
    (lambda row: row.index < row.params.min_tokens, _forbid_the_end),
)
