"""Everything textual about the served model, and the one place that keeps it loaded.

`ModelTexts.of(model)` loads in a real thread, once, when a model is first asked about; requests meanwhile wait.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.errors import ErrorCode, RequestError
from common.wire import ModelInfo
from web.text.chat_template import ChatTemplate, Message, TemplateOptions, read_chat_template
from web.text.decode_stream import DecodeStream
from web.text.offload import offload
from web.text.tokenizer import TextTokenizer

log = logging.getLogger(__name__)


class ModelText:
    """Tokenizer and chat template of the model in a folder. Raises OSError or ValueError when they cannot be read."""

    def __init__(self, path: Path):
        self.tokenizer = TextTokenizer(path)
        source = read_chat_template(path)
        self._template = ChatTemplate(source, self.tokenizer.named_tokens) if source is not None else None

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded; a base model only continues text."""
        return self._template is not None

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a raw prompt. Control tokens written in it are control tokens."""
        return self.tokenizer.encode(text)

    def encode_chat(self, messages: list[Message], options: TemplateOptions | None = None) -> list[int]:
        """Return the ids of a conversation, up to where the answer begins. Control tokens in it are only letters.

        messages: maps with `role`, `content` and other strings. Raises RequestError when they cannot be rendered.
        """
        if self._template is None:
            raise RequestError(
                ErrorCode.INVALID_REQUEST,
                "this model has no chat template; use /v1/completions with a prompt instead",
                "messages",
            )
        hide = self.tokenizer.guard.hide
        hidden = [
            {key: hide(value) if key != "role" else value for key, value in message.items()} for message in messages
        ]
        options = options or TemplateOptions()
        options = replace(options, variables=_map_texts(hide, options.variables))
        return self.tokenizer.encode_guarded(self._template.render(hidden, options))

    def decode_stream(self, shown: frozenset[int] = frozenset()) -> DecodeStream:
        """Return what turns the ids of one answer into text. shown: control tokens that have text there."""
        return DecodeStream(self.tokenizer.decode, self.tokenizer.special_ids - shown)


def _map_texts(change: Callable[[str], str], value: Any) -> Any:
    """Return a JSON value with its strings changed; names stay."""
    if isinstance(value, dict):
        return {name: _map_texts(change, item) for name, item in value.items()}
    if isinstance(value, list):
        return [_map_texts(change, item) for item in value]
    return change(value) if isinstance(value, str) else value


class ModelTexts:
    """Keeps the text side of the model that was asked about last. folder: used in place of the model's own."""

    def __init__(self, folder: str = ""):
        self._folder = folder
        self._lock = threading.Lock()
        self._path = ""
        self._text: ModelText | None = None
        self._broken_path = ""

    def of(self, model: ModelInfo) -> ModelText:
        """Return the text side of a model. Raises RequestError when it cannot be loaded here."""
        path = self._folder or model.path
        with self._lock:
            if self._text is None or self._path != path:
                self._text, self._path = self._load(path), path
            return self._text

    def _load(self, path: str) -> ModelText:
        try:
            return offload(ModelText, Path(path).expanduser())
        except (OSError, ValueError) as error:
            if path != self._broken_path:
                self._broken_path = path
                log.error("the tokenizer in %s cannot be loaded: %s", path, error)
        raise RequestError(ErrorCode.NOT_READY, "the tokenizer of the model cannot be loaded")
