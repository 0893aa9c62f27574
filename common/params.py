"""Sampling parameters of one request, as they cross the wire and reach the sampler."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. The defaults are OpenAI's; `seed` is always set before a request is submitted.

    temperature: 0 means greedy. top_k: 0 means off. top_p, typical_p and repetition_penalty: 1 means off.
    logit_bias: (token id, what is added to its logit). allowed_token_ids: the only ones that may be drawn; none means
    all. min_tokens: generated tokens before which the answer cannot end.
    xtc_probability, xtc_threshold: how often, and from which probability on, all of the likeliest tokens but the last
    are left out (XTC, "exclude top choices"). dry_*: "don't repeat yourself": a token that would go on with a sequence
    seen before loses dry_multiplier * dry_base ** (length of the sequence - dry_allowed_length) from
    dry_allowed_length on, looking back dry_range tokens (0: all), and never over a token in dry_breakers.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0
    dry_breakers: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """True when the logits depend on the tokens so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def problem(self) -> tuple[str, str] | None:
        """Return (field, what is wrong with it) for the first bad field, or None when all are in range."""
        for name, (low, high) in PARAM_RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int if name in INTEGER_PARAMS else (int, float)):
                return name, f"must be {'an integer' if name in INTEGER_PARAMS else 'a number'}"
            if not math.isfinite(value):
                return name, "must be a finite number"
            if not low <= value <= high:
                return name, f"must be between {low:g} and {high:g}"
        for name in ("dry_breakers", "allowed_token_ids"):
            if not _are_ids(getattr(self, name)):
                return name, f"must be at most {MAX_LISTED} token ids"
        if not _are_ids([pair[0] for pair in self.logit_bias if len(pair) == 2]):
            return "logit_bias", f"must name at most {MAX_LISTED} token ids"
        if not all(len(pair) == 2 and _is_bias(pair[1]) for pair in self.logit_bias):
            return "logit_bias", f"must have values between -{MAX_BIAS} and {MAX_BIAS}"
        if self.repetition_penalty == 0.0:
            return "repetition_penalty", "must be greater than 0"
        return None

    def largest_id(self) -> int:
        """Return the largest token id that is named anywhere, or -1."""
        listed = (*self.dry_breakers, *self.allowed_token_ids, *(token_id for token_id, _ in self.logit_bias))
        return max(listed, default=-1)


def _are_ids(values: Sequence[object]) -> bool:
    return len(values) <= MAX_LISTED and all(type(value) is int and 0 <= value < 2**31 for value in values)


def _is_bias(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and -MAX_BIAS <= value <= MAX_BIAS  # type: ignore[operator]


MAX_LISTED = 16384
"""Token ids that one field may name."""

MAX_BIAS = 100
"""OpenAI's bound; it bans or forces a token."""

INTEGER_PARAMS = frozenset({"top_k", "seed", "min_tokens", "dry_allowed_length", "dry_range"})
"""Fields of SamplingParams that hold integers."""

PARAM_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 10.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (1.0, 4.0),
    "dry_allowed_length": (0, 2**31 - 1),
    "dry_range": (0, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "seed": (0, 2**63 - 1),
}
"""Inclusive range of each numeric field; web and worker both check against it."""
