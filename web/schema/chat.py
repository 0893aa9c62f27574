"""The request of POST /v1/chat/completions."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from common.wire import MAX_LOGPROBS
from web.schema.base import BRANCH, Refused, RequestSchema, Text, complaint, neutral
from web.schema.generation import GenerationRequest
from web.text.chat_template import TemplateOptions


def _text_part(kind: str) -> str:
    if kind != "text":
        raise complaint("is not supported: this model takes parts of type text only")
    return kind


class TextPart(RequestSchema):
    """A part of a message's content. Pictures, sound and files are refused."""

    type: Annotated[str, AfterValidator(_text_part)]
    text: Text


Content = Annotated[
    Annotated[Text, Tag(BRANCH + "text")] | Annotated[list[TextPart], Field(min_length=1), Tag(BRANCH + "parts")],
    Discriminator(lambda value: BRANCH + ("parts" if isinstance(value, list) else "text")),
]


class Message(RequestSchema):
    """One message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content | None
    name: Text | None = None
    tool_calls: Annotated[Any, neutral([])] = None
    function_call: Refused = None
    audio: Refused = None

    @field_validator("content")
    @classmethod
    def _says_something(cls, content: Any, info: ValidationInfo) -> Any:
        """Only an assistant's content may be null."""
        if content is None and info.data.get("role") != "assistant":
            raise complaint("must be a string or a list of text parts")
        return content

    def for_template(self) -> dict[str, Any]:
        """Return what the chat template sees: parts joined, null as no text, the developer's role as system's."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}


def _conversation(messages: list[Message]) -> list[Message]:
    if all(message.role == "assistant" for message in messages):
        raise complaint("must have a message that is not the assistant's")
    return messages


def _tool_choice(value: Any) -> Any:
    """Without tools there is nothing to choose; "none" says just that."""
    if value is not None and value != "none":
        raise complaint("is only allowed when tools are given")
    return value


def _variables(values: dict[str, Any] | None) -> dict[str, Any] | None:
    if values and len(json.dumps(values)) > MAX_VARIABLES_CHARACTERS:
        raise complaint(f"must have at most {MAX_VARIABLES_CHARACTERS} characters as JSON")
    for name in RESERVED_VARIABLES & set(values or ()):
        raise complaint(f"must not set {name}, which has a field of its own or is the server's")
    return values


RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
MAX_VARIABLES_CHARACTERS = 16384


class ChatRequest(GenerationRequest):
    """Chat completion."""

    messages: Annotated[list[Message], Field(min_length=1), AfterValidator(_conversation)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    tools: Annotated[Any, neutral([])] = None
    tool_choice: Annotated[Any, AfterValidator(_tool_choice)] = None
    functions: Annotated[Any, neutral([])] = None
    function_call: Annotated[Any, neutral("none")] = None
    modalities: Annotated[Any, neutral(["text"])] = None
    audio: Refused = None
    prediction: Refused = None
    reasoning_effort: Annotated[Text, Field(min_length=1, max_length=64)] | None = None
    verbosity: Refused = None
    web_search_options: Refused = None
    echo: Annotated[Any, neutral(False)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: Annotated[Any, neutral(False)] = None
    documents: Refused = None
    chat_template: Refused = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, AfterValidator(_variables)] = None
    mm_processor_kwargs: Refused = None

    @model_validator(mode="after")
    def _chat_fields_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise complaint("is only allowed when logprobs is true", "top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise complaint("must not be true together with add_generation_prompt", "continue_final_message")
        if self.continue_final_message and not self.messages[-1].for_template()["content"]:
            raise complaint("needs a last message with text", "continue_final_message")
        return self

    def template_options(self) -> TemplateOptions:
        """Return how the chat template is rendered."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return TemplateOptions(
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            variables={**effort, **(self.chat_template_kwargs or {})},
        )

    @property
    def num_logprobs(self) -> int | None:
        """See GenerationRequest."""
        return (self.top_logprobs or 0) if self.logprobs else None
