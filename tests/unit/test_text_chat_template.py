"""Chat templates: what they find in their environment, what they may refuse, what they cannot do."""

import pytest

from common.errors import ErrorCode, RequestError
from tests.support.tiny_tokenizer import STRICT
from web.text.chat_template import ChatTemplate

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, *messages: tuple[str, str]) -> str:
    return ChatTemplate(source, NAMED).render([{"role": role, "content": content} for role, content in messages])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hé</s>"),
        ("{{ messages[0]['role'] | upper }}", "USER"),
        ("{{ {'a': messages[0].content, 'b': '<'} | tojson }}", '{"a": "hé", "b": "<"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "13"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{{ 'yes' if add_generation_prompt else 'no' }}", "yes"),
        ("{{ 'tools' if tools else 'plain' }}{{ 'docs' if documents else '' }}", "plain"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ unk_token is defined }}", "False"),
    ],
)
def test_the_environment_is_that_of_transformers(source, expected):
    """Templates written for transformers find its filters, functions, variables and white-space rules."""
    assert render(source, ("user", "hé")) == expected


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([("system", "x"), ("user", "x")], "System role not supported"),
        ([("user", "x"), ("user", "x")], "Conversation roles must alternate user/assistant/user/assistant/..."),
    ],
)
def test_a_refusal_reaches_the_client(messages, reason):
    """What the template says to raise_exception is what the client reads."""
    with pytest.raises(RequestError) as refused:
        render(STRICT, *messages)
    assert (refused.value.code, refused.value.message, refused.value.param) == (
        ErrorCode.INVALID_REQUEST,
        reason,
        "messages",
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].content.nothing() }}",
        "{% for x in range(10 ** 9) %}x{% endfor %}",
    ],
)
def test_a_template_that_trips_is_no_server_error(source):
    """Whatever goes wrong inside, also what the sandbox forbids, is a 400 without the trace of it."""
    with pytest.raises(RequestError, match="chat template cannot take these messages"):
        render(source, ("user", "x"))


def test_broken_jinja_is_found_when_loading():
    """Not with the first user's request."""
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("a\n{% if %}", NAMED)
