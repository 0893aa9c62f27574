"""The requests of POST /tokenize and POST /detokenize, in the forms of vLLM's clients and of llama-server's."""

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, model_validator

from web.schema.base import RequestSchema, Text, complaint
from web.schema.completions import TokenIds


class TokenizeRequest(RequestSchema):
    """A text (`prompt`, or llama-server's `content`), or the messages of a chat with what their template needs."""

    model: Text | None = None
    prompt: Text | None = None
    content: Text | None = None
    messages: Any = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("prompt", "content", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise complaint("give exactly one of prompt, content and messages", given[1] if given else "prompt")
        return self

    @property
    def text(self) -> str | None:
        """The text, or None for a chat."""
        return self.content if self.prompt is None else self.prompt

    @property
    def with_special_tokens(self) -> bool:
        """Whether the tokenizer's own BOS belongs to a text; vLLM says so by default, llama-server does not."""
        if self.prompt is not None:
            return self.add_special_tokens is not False
        return bool(self.add_special)


def _not_empty(ids: Any) -> Any:
    """An empty list is the empty text."""
    return None if ids == [] else ids


class DetokenizeRequest(RequestSchema):
    """Token ids."""

    model: Text | None = None
    tokens: Annotated[TokenIds | None, BeforeValidator(_not_empty)]
