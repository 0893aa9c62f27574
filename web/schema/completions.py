"""The request of POST /v1/completions."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from common.checks import MAX_TOKEN_ID
from common.wire import MAX_LOGPROBS
from web.schema.base import BRANCH, Text, complaint, neutral
from web.schema.generation import GenerationRequest


def _token_ids(ids: list[int]) -> list[int]:
    if ids and not 0 <= min(ids) <= max(ids) <= MAX_TOKEN_ID:
        raise complaint("has token ids outside the vocabulary")
    return ids


def _prompt_branch(value: Any) -> str:
    """Tell the four forms of a prompt apart by the first item, so that the complaint is about the form meant."""
    if not isinstance(value, list):
        return BRANCH + "text"
    first = value[0] if value else None
    if isinstance(first, list):
        return BRANCH + "ids lists"
    return BRANCH + ("ids" if isinstance(first, int) else "texts")


# Their items are plain ints so that a million of them is quick; the range is checked at once.
TokenIds = Annotated[list[int], Field(min_length=1), AfterValidator(_token_ids)]
Prompt = Annotated[
    Annotated[Text, Tag(BRANCH + "text")]
    | Annotated[list[Text], Field(min_length=1), Tag(BRANCH + "texts")]
    | Annotated[TokenIds, Tag(BRANCH + "ids")]
    | Annotated[list[TokenIds], Field(min_length=1), Tag(BRANCH + "ids lists")],
    Discriminator(_prompt_branch),
]


def _no_logprobs(value: Any) -> Any:
    """Some clients say false for none."""
    return None if value is False else value


class CompletionRequest(GenerationRequest):
    """Text completion: one or several prompts, as text or as token ids."""

    prompt: Prompt
    echo: bool | None = None
    suffix: Annotated[Any, neutral("")] = None
    logprobs: Annotated[Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None, BeforeValidator(_no_logprobs)] = None
    add_special_tokens: Annotated[Any, neutral(True)] = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, however they were sent."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [prompt]  # type: ignore[list-item]
        return prompt  # type: ignore[return-value]

    @property
    def num_logprobs(self) -> int | None:
        """See GenerationRequest."""
        return self.logprobs

    @property
    def echoes(self) -> bool:
        """See GenerationRequest."""
        return bool(self.echo)
