"""Sampling parameters of one request, as they cross the wire and reach the sampler."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. The defaults are OpenAI's; `seed` is always set before a request is submitted.

    temperature: 0 means greedy. top_k: 0 means off. top_p and repetition_penalty: 1 means off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
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
        if self.repetition_penalty == 0.0:
            return "repetition_penalty", "must be greater than 0"
        return None


INTEGER_PARAMS = frozenset({"top_k", "seed"})
"""Fields of SamplingParams that hold integers."""

PARAM_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 10.0),
    "seed": (0, 2**63 - 1),
}
"""Inclusive range of each numeric field; web and worker both check against it."""
