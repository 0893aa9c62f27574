"""A model's chat template: messages to the text that the model was trained on.

Jinja in a sandbox, with what templates written for transformers expect of their environment. A template comes with the
model and is the operator's choice; the messages are a stranger's.
"""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ErrorCode, RequestError

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """How a conversation is rendered.

    add_generation_prompt: end with the beginning of the assistant's turn. continue_final_message: end in the middle of
    the last message, where the answer goes on. variables: further names that the template may look at.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = field(default_factory=dict)


class _Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}` marks the assistant's tokens for training; here it means nothing."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. named_tokens: bos_token and its like, by name. Raises ValueError for broken Jinja."""

    def __init__(self, source: str, named_tokens: dict[str, str]):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = time.strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is broken in line {error.lineno}: {error.message}") from None
        self._named_tokens = named_tokens

    def render(self, messages: list[Message], options: TemplateOptions | None = None) -> str:
        """Return the prompt's text, up to where the assistant's answer begins or goes on.

        Raises RequestError when the template refuses the messages, with its reason.
        """
        options = options or TemplateOptions()
        names = {
            **options.variables,
            **self._named_tokens,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": options.add_generation_prompt and not options.continue_final_message,
        }
        try:
            text = self._template.render(names)
            return _cut_after(text, messages[-1]["content"]) if options.continue_final_message else text
        except _Refused as refusal:
            reason = str(refusal)
        except Exception as error:  # noqa: BLE001  a template is a program; what it trips over is in the messages
            reason = f"the model's chat template cannot take these messages ({type(error).__name__})"
        raise RequestError(ErrorCode.INVALID_REQUEST, reason, "messages")


def _cut_after(text: str, content: str) -> str:
    """Return the rendered text up to the end of the last message; templates may strip it."""
    for ending in (content, content.strip()):
        at = text.rfind(ending)
        if at >= 0:
            return text[: at + len(ending)]
    raise _Refused("the model's chat template does not show the last message as it is, so it cannot be continued")


def read_chat_template(path: Path) -> str | None:
    """Return the template of the model in a folder, or None when it has none."""
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    config = path / "tokenizer_config.json"
    template = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.exists() else None
    if isinstance(template, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


class _Refused(Exception):
    """The template called raise_exception."""


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
