"""What chat and text completions have in common: length, sampling, stop strings, streaming, and what is refused.

The names are OpenAI's, then those that vLLM's and llama-server's clients send.
"""

from typing import Annotated, Any, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from web.schema.base import BRANCH, Refused, RequestSchema, Text, complaint, neutral
from web.schema.sampling import SamplingFields, TokenId

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 1024


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

    use_beam_search: Annotated[Any, neutral(False)] = None
    length_penalty: Annotated[Any, neutral(1)] = None
    early_stopping: Annotated[Any, neutral(False)] = None
    prompt_logprobs: Annotated[Any, neutral(False)] = None
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
    kv_transfer_params: Refused = None
    lora: Annotated[Any, neutral([])] = None
    n_predict: Refused = None
    n_probs: Annotated[Any, neutral(0)] = None
    n_keep: Annotated[Any, neutral(0)] = None
    samplers: Refused = None
    top_n_sigma: Annotated[Any, neutral(-1)] = None
    dynatemp_range: Annotated[Any, neutral(0)] = None
    mirostat: Annotated[Any, neutral(0)] = None


class GenerationRequest(SamplingFields, UnsupportedFields):
    """The common part of both endpoints."""

    model: Text | None = None
    max_tokens: Annotated[int | None, Field(ge=1, le=2**31 - 1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=2**31 - 1)] = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId] | None, Field(max_length=MAX_STOP_TOKENS)] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, le=2**31 - 1)] = None
    priority: Annotated[int | None, Field(ge=-(2**31), le=2**31 - 1)] = None
    cache_salt: Annotated[Text | None, Field(min_length=1, max_length=256)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise complaint("is only allowed when stream is true", "stream_options")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise complaint("must not differ from max_tokens when both are given", "max_completion_tokens")
        if self.truncate_prompt_tokens == 0:
            raise complaint("must be at least 1, or -1 for what the context holds", "truncate_prompt_tokens")
        if self.limit and (self.min_tokens or 0) > self.limit[1]:
            raise complaint(f"must not be above {self.limit[0]}", "min_tokens")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told with each token, or None when no log-probability is."""
        raise NotImplementedError

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with its prompt."""
        return False

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
