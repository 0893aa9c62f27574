"""What chat and text completions have in common: length, sampling, stop strings, streaming, and what is refused.

The names are OpenAI's, then those that vLLM's and llama-server's clients send.
"""

from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from common.ids import new_seed
from common.params import SamplingParams
from web.schema.base import BRANCH, Refused, RequestSchema, Text, complaint, in_range, neutral

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024

RANDOM_SEED = -1
"""What vLLM and llama-server take for no seed."""

SEED_BITS = (1 << 63) - 1


def _stop_string(text: str) -> str:
    if not text:
        raise complaint("must not be empty")
    if len(text) > MAX_STOP_CHARACTERS:
        raise complaint(f"must have at most {MAX_STOP_CHARACTERS} characters")
    return text


StopString = Annotated[Text, AfterValidator(_stop_string)]
Stop = Annotated[
    Annotated[StopString, Tag(BRANCH + "string")]
    | Annotated[list[StopString], Field(max_length=MAX_STOPS), Tag(BRANCH + "list")],
    Discriminator(lambda value: BRANCH + ("list" if isinstance(value, list) else "string")),
]


class StreamOptions(RequestSchema):
    """How a stream is sent."""

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[bool | None, neutral(False)] = None


class UnsupportedFields(RequestSchema):
    """Fields that would change the answer and are not supported yet; see docs/API.md."""

    logit_bias: Annotated[Any, neutral({})] = None
    use_beam_search: Annotated[Any, neutral(False)] = None
    length_penalty: Annotated[Any, neutral(1)] = None
    early_stopping: Annotated[Any, neutral(False)] = None
    min_tokens: Annotated[Any, neutral(0)] = None
    stop_token_ids: Annotated[Any, neutral([])] = None
    include_stop_str_in_output: Annotated[Any, neutral(False)] = None
    skip_special_tokens: Annotated[Any, neutral(True)] = None
    spaces_between_special_tokens: Annotated[Any, neutral(True)] = None
    truncate_prompt_tokens: Refused = None
    prompt_logprobs: Annotated[Any, neutral(False)] = None
    allowed_token_ids: Refused = None
    bad_words: Annotated[Any, neutral([])] = None
    logits_processors: Refused = None
    return_tokens_as_token_ids: Annotated[Any, neutral(False)] = None
    return_token_ids: Annotated[Any, neutral(False)] = None
    response_format: Annotated[Any, neutral({"type": "text"})] = None
    structured_outputs: Refused = None
    structural_tag: Refused = None
    guided_json: Refused = None
    guided_regex: Refused = None
    guided_choice: Refused = None
    guided_grammar: Refused = None
    guided_json_object: Annotated[Any, neutral(False)] = None
    guided_decoding_backend: Refused = None
    guided_whitespace_pattern: Refused = None
    grammar: Annotated[Any, neutral("")] = None
    json_schema: Refused = None
    cache_salt: Refused = None
    priority: Annotated[Any, neutral(0)] = None
    kv_transfer_params: Refused = None
    lora: Annotated[Any, neutral([])] = None
    n_predict: Refused = None
    n_probs: Annotated[Any, neutral(0)] = None
    n_keep: Annotated[Any, neutral(0)] = None
    samplers: Refused = None
    repeat_penalty: Annotated[Any, neutral(1)] = None
    typical_p: Annotated[Any, neutral(1)] = None
    top_n_sigma: Annotated[Any, neutral(-1)] = None
    xtc_probability: Annotated[Any, neutral(0)] = None
    dry_multiplier: Annotated[Any, neutral(0)] = None
    dynatemp_range: Annotated[Any, neutral(0)] = None
    mirostat: Annotated[Any, neutral(0)] = None


class GenerationRequest(UnsupportedFields):
    """The common part of both endpoints."""

    model: Text | None = None
    max_tokens: Annotated[int | None, Field(ge=1, le=2**31 - 1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=2**31 - 1)] = None
    temperature: Annotated[float | None, in_range("temperature")] = None
    top_p: Annotated[float | None, in_range("top_p")] = None
    top_k: Annotated[int | None, Field(ge=-1, le=2**31 - 1)] = None
    min_p: Annotated[float | None, in_range("min_p")] = None
    presence_penalty: Annotated[float | None, in_range("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, in_range("frequency_penalty")] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=10)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    best_of: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    stop: Stop | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise complaint("is only allowed when stream is true", "stream_options")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise complaint("must not differ from max_tokens when both are given", "max_completion_tokens")
        if self.best_of not in (None, self.num_choices):
            raise complaint("is not supported beyond n", "best_of")
        return self

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def limit(self) -> tuple[str, int] | None:
        """The field that limits the answer and its value in tokens, or None."""
        for name, value in (("max_completion_tokens", self.max_completion_tokens), ("max_tokens", self.max_tokens)):
            if value is not None:
                return name, value
        return None

    @property
    def stops(self) -> list[str]:
        """The stop strings, each once."""
        stop = self.stop or []
        return [stop] if isinstance(stop, str) else list(dict.fromkeys(stop))

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling_params(self) -> list[SamplingParams]:
        """Return the sampling parameters of each answer to a prompt; the seeds follow on the one sent, or a random one.

        So the first is the one that n = 1 gives.
        """
        default = SamplingParams()
        params = SamplingParams(
            temperature=_or(self.temperature, default.temperature),
            top_p=_or(self.top_p, default.top_p),
            top_k=max(_or(self.top_k, default.top_k), 0),
            min_p=_or(self.min_p, default.min_p),
            presence_penalty=_or(self.presence_penalty, default.presence_penalty),
            frequency_penalty=_or(self.frequency_penalty, default.frequency_penalty),
            repetition_penalty=_or(self.repetition_penalty, default.repetition_penalty),
            seed=new_seed() if self.seed in (None, RANDOM_SEED) else self.seed or 0,
        )
        return [replace(params, seed=(params.seed + at) & SEED_BITS) for at in range(self.num_choices)]


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
