"""The `openai` package against a real server (Gunicorn, wire, fake model): used as its documentation shows."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support import tiny_tokenizer
from tests.support.link_rig import Rig, rig_maker

pytestmark = pytest.mark.timeout(120)

HI: Any = [{"role": "user", "content": "hi"}]
CONTEXT = 2048


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("rig")
    makers = rig_maker(folder, "gevent", "web.app:create_app()")
    model = tiny_tokenizer.write(folder / "model")
    vocab_size = tiny_tokenizer.build().get_vocab_size()
    worker = {"model_path": model, "vocab_size": vocab_size, "max_model_len": CONTEXT}
    worker |= {"model_id": "org/tiny", "step_delay_s": 0.002}
    for make in makers:
        yield make(worker=worker)


@pytest.fixture
def client(rig: Rig) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{rig.port}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    """The list gives the name that requests use, also one with a slash."""
    (model,) = client.models.list().data
    assert model.id == "org/tiny"
    assert client.models.retrieve("org/tiny").id == "org/tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client: openai.OpenAI) -> None:
    """A whole answer and a streamed one with the same seed are the same text; both count tokens."""
    asked: Any = {"model": "org/tiny", "messages": HI, "max_tokens": 40, "seed": 1}
    whole = client.chat.completions.create(**asked)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 40
    assert whole.usage.prompt_tokens_details is not None
    assert (whole.choices[0].finish_reason, whole.choices[0].message.role) == ("length", "assistant")
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["length"]


def test_the_chat_stream_helper(client: openai.OpenAI) -> None:
    """`chat.completions.stream`, which puts the chunks together by index and finish reason, is content with them."""
    asked: Any = {"model": "org/tiny", "messages": HI}
    text = client.chat.completions.create(**asked, max_tokens=60).choices[0].message.content or ""
    stop = text[len(text) // 2 :][:4]
    with client.chat.completions.stream(**asked, stop=[stop]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].message.content == text[: text.index(stop)]


def test_completions(client: openai.OpenAI) -> None:
    """Text, texts and token ids, streamed and not."""
    whole = client.completions.create(model="org/tiny", prompt=["one", "two"], max_tokens=10)
    assert [choice.index for choice in whole.choices] == [0, 1]
    parts = list(client.completions.create(model="org/tiny", prompt=["one", "two"], max_tokens=10, stream=True))
    for index in range(2):
        text = "".join(c.text for part in parts for c in part.choices if c.index == index)
        assert text == whole.choices[index].text
    assert client.completions.create(model="org/tiny", prompt=[5, 6, 7], max_tokens=2).usage.prompt_tokens == 3  # type: ignore[union-attr]


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    """Each status becomes the exception that programs catch, with code and param to read."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="org/tiny", messages=HI, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model="org/tiny", messages=[{"role": "user", "content": "x " * 3000}])
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4o", messages=HI)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(
            model="org/tiny", messages=HI, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert tools.value.param == "tools"


def test_leaving_a_stream(client: openai.OpenAI, rig: Rig) -> None:
    """Closing a stream after its first chunk frees what the worker held for it."""
    with client.chat.completions.create(model="org/tiny", messages=HI, stream=True) as stream:
        next(iter(stream))
    rig.observer.wait_idle()


def test_a_failure_in_a_stream_is_an_exception(client: openai.OpenAI, rig: Rig) -> None:
    """An error event is raised as APIError by the client, not taken for the end of the answer."""
    stream = client.chat.completions.create(model="org/tiny", messages=HI, stream=True)
    next(iter(stream))
    rig.kill_worker()
    rig.start_worker()
    with pytest.raises(openai.APIError, match="restarted"):
        list(stream)
    rig.wait_ready()
