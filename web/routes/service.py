"""What all routes work with: the link to the worker and the text side of the model it serves."""

import socket
from dataclasses import dataclass
from typing import Protocol

from common.errors import ErrorCode, RequestError
from common.wire import ModelInfo
from web.link.call import CallGroup, CallSpec
from web.text.model_text import ModelTexts


class WorkerLink(Protocol):
    """What is needed of web.link's Link."""

    @property
    def model(self) -> ModelInfo | None:
        """The served model, once known."""
        ...

    @property
    def ready(self) -> bool:
        """Whether a call would be taken."""
        ...

    def why_not_ready(self) -> str:
        """Say why not."""
        ...

    def open(self, specs: list[CallSpec], prefix: str, client_socket: socket.socket | None) -> CallGroup:
        """Submit the calls of one HTTP request."""
        ...


@dataclass(frozen=True, slots=True)
class Service:
    """See the module."""

    link: WorkerLink
    texts: ModelTexts

    @property
    def model(self) -> ModelInfo:
        """The served model. Raises RequestError while none is known."""
        model = self.link.model
        if model is None:
            raise RequestError(ErrorCode.NOT_READY, self.link.why_not_ready() or "the model is not loaded yet")
        return model
