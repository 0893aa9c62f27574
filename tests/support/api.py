"""A client of the web application with a worker in memory: what the tests of the routes share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from common.config import WebConfig
from common.wire import ModelInfo
from tests.support import tiny_tokenizer
from tests.support.fake_link import FakeLink, say
from web.app import create_app

TOKENIZER = tiny_tokenizer.build()
CONTEXT = 512
HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ANSWER = "hello 😀 你好 world\u2028 the end"


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


HELLO = ids_of("hello")


class Api:
    """A client of an application whose worker says what the test wants."""

    def __init__(self, folder: Path, **link: Any):
        model = ModelInfo("tiny", str(folder), CONTEXT, TOKENIZER.get_vocab_size() + 8)
        self.link = FakeLink(**{"model": model, "next_id": say(ids_of(ANSWER)), **link})
        self.app = create_app(WebConfig(max_body_bytes=64 * 1024), self.link)
        self.client: FlaskClient = self.app.test_client()

    def chat(self, **fields: Any) -> TestResponse:
        return self.client.post(CHAT, json={"messages": HI, **fields})

    def text(self, prompt: Any = "hi", **fields: Any) -> TestResponse:
        return self.client.post(TEXT, json={"prompt": prompt, **fields})

    @property
    def spec(self) -> Any:
        (spec,) = self.link.groups[-1].specs
        return spec


MakeApi = Callable[..., Api]


def events(response: TestResponse) -> list[Any]:
    """Return the events of a stream; checks its form and that [DONE] is last."""
    assert response.status_code == 200, response.get_data()
    blocks = response.get_data().decode().split("\n\n")
    assert blocks.pop() == ""
    assert all((block.startswith("data: ") and "\n" not in block) or block == ": ping" for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks if block != ": ping"]
    assert data.pop() == "[DONE]"
    return [json.loads(item) for item in data]


def joined(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks if "error" not in chunk for choice in chunk["choices"]]
    return "".join(
        (choice["delta"].get("content", "") if "delta" in choice else choice["text"])
        for choice in choices
        if choice["index"] == index
    )


def finish_reasons(chunks: list[Any]) -> list[tuple[int, str]]:
    choices = [choice for chunk in chunks if "error" not in chunk for choice in chunk["choices"]]
    return [(choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"] is not None]


def check_error(response: TestResponse, status: int, param: str | None = None, code: str | None = None) -> Any:
    error = response.get_json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert code is None or error["code"] == code
    return error
