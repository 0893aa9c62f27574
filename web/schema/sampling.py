"""The fields that say how tokens are drawn, under OpenAI's, vLLM's and llama-server's names."""

from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from common.checks import MAX_TOKEN_ID
from common.ids import new_seed
from common.params import MAX_BIAS, MAX_LISTED, SamplingParams
from web.schema.base import RequestSchema, Text, complaint, in_range

MAX_CHOICES = 128
MAX_BREAKERS = 64
MAX_BREAKER_CHARACTERS = 64

RANDOM_SEED = -1
"""What vLLM and llama-server take for no seed."""

SEED_BITS = (1 << 63) - 1

DRY_BREAKERS = ["\n", ":", '"', "*"]
"""llama-server's default."""


def _bias(value: Any) -> Any:
    """Take the ids of a JSON object, which are strings, for numbers."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LISTED:
        raise complaint(f"must have at most {MAX_LISTED} items")
    return {_token_id(key): bias for key, bias in value.items()}


def _token_id(key: Any) -> int:
    if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID):
        raise complaint(f"has the key {str(key)[:40]!r}, which is no token id")
    return int(key)


TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
LogitBias = Annotated[
    dict[int, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]],
    BeforeValidator(_bias),
]
Breaker = Annotated[Text, Field(min_length=1, max_length=MAX_BREAKER_CHARACTERS)]


class SamplingFields(RequestSchema):
    """See the module. null and absence mean the default."""

    temperature: Annotated[float | None, in_range("temperature")] = None
    top_p: Annotated[float | None, in_range("top_p")] = None
    top_k: Annotated[int | None, Field(ge=-1, le=2**31 - 1)] = None
    min_p: Annotated[float | None, in_range("min_p")] = None
    typical_p: Annotated[float | None, in_range("typical_p")] = None
    presence_penalty: Annotated[float | None, in_range("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, in_range("frequency_penalty")] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=10)] = None
    repeat_penalty: Annotated[float | None, Field(gt=0, le=10)] = None
    xtc_probability: Annotated[float | None, in_range("xtc_probability")] = None
    xtc_threshold: Annotated[float | None, in_range("xtc_threshold")] = None
    dry_multiplier: Annotated[float | None, in_range("dry_multiplier")] = None
    dry_base: Annotated[float | None, in_range("dry_base")] = None
    dry_allowed_length: Annotated[int | None, in_range("dry_allowed_length")] = None
    dry_penalty_last_n: Annotated[int | None, Field(ge=-1, le=2**31 - 1)] = None
    dry_sequence_breakers: Annotated[list[Breaker] | None, Field(max_length=MAX_BREAKERS)] = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: Annotated[list[TokenId] | None, Field(min_length=1, max_length=MAX_LISTED)] = None
    min_tokens: Annotated[int | None, in_range("min_tokens")] = None
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    best_of: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None

    @model_validator(mode="after")
    def _sampling_fields_agree(self) -> Self:
        both = (self.repetition_penalty, self.repeat_penalty)
        if None not in both and both[0] != both[1]:
            raise complaint("must not differ from repetition_penalty when both are given", "repeat_penalty")
        if self.best_of not in (None, self.num_choices):
            raise complaint("is not supported beyond n", "best_of")
        return self

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def breakers(self) -> list[str]:
        """The strings that DRY does not look across; none where it is off."""
        if not self.dry_multiplier:
            return []
        return DRY_BREAKERS if self.dry_sequence_breakers is None else self.dry_sequence_breakers

    def sampling_params(self, dry_breakers: tuple[int, ...] = ()) -> list[SamplingParams]:
        """Return the sampling parameters of each answer to a prompt; the seeds follow on the one sent, or a random one.

        So the first is the one that n = 1 gives. dry_breakers: `breakers` as token ids.
        """
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "typical_p": self.typical_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repeat_penalty if self.repetition_penalty is None else self.repetition_penalty,
            "xtc_probability": self.xtc_probability,
            "xtc_threshold": self.xtc_threshold,
            # llama-server's way to say that DRY looks at no token at all.
            "dry_multiplier": 0.0 if self.dry_penalty_last_n == 0 else self.dry_multiplier,
            "dry_base": self.dry_base,
            "dry_allowed_length": self.dry_allowed_length,
            "dry_range": None if self.dry_penalty_last_n is None else max(self.dry_penalty_last_n, 0),
            "dry_breakers": dry_breakers,
            "logit_bias": tuple((self.logit_bias or {}).items()),
            "allowed_token_ids": tuple(self.allowed_token_ids or ()),
            "min_tokens": self.min_tokens,
            "seed": new_seed() if self.seed in (None, RANDOM_SEED) else (self.seed or 0) & SEED_BITS,
        }
        params = SamplingParams(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
        return [replace(params, seed=(params.seed + at) & SEED_BITS) for at in range(self.num_choices)]
