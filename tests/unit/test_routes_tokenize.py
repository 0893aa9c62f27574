"""POST /tokenize and /detokenize, GET /version."""

from pathlib import Path
from typing import Any

import pytest
from werkzeug.test import TestResponse

from common import __version__
from tests.support import tiny_tokenizer
from tests.support.api import CONTEXT, HI, TOKENIZER, Api, check_error, ids_of
from tests.support.tiny_tokenizer import BOS, IM_END, IM_START


@pytest.fixture
def api(text_folder: Path) -> Api:
    return Api(text_folder)


def post(api: Api, path: str, body: Any) -> TestResponse:
    return api.client.post(path, json=body)


def test_a_text(tmp_path: Path) -> None:
    """With the tokenizer's BOS for vLLM's clients, without for llama-server's, unless they say otherwise."""
    api = Api(tiny_tokenizer.write(tmp_path, adds_bos=True))
    bare = ids_of("hello 😀")
    whole = [TOKENIZER.token_to_id(BOS), *bare]
    for body, ids in (
        ({"prompt": "hello 😀"}, whole),
        ({"prompt": "hello 😀", "add_special_tokens": False}, bare),
        ({"content": "hello 😀"}, bare),
        ({"content": "hello 😀", "add_special": True}, whole),
    ):
        found = post(api, "/tokenize", body).get_json()
        assert found == {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids}
    found = post(api, "/tokenize", {"prompt": "hi", "return_token_strs": True}).get_json()
    assert found["token_strs"][0] == BOS
    assert "".join(found["token_strs"][1:]) == "hi"


def test_a_chat_is_what_chat_completions_would_run(api: Api) -> None:
    for fields in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        ids = post(api, "/tokenize", {"messages": HI, **fields}).get_json()["tokens"]
        assert api.chat(**fields).status_code == 200
        assert api.link.groups[-1].specs[0].prompt_ids == ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False).endswith(f"{IM_START}user\nhi")


def test_there_and_back(api: Api) -> None:
    text = f"hello 😀{IM_END} 你好"
    ids = post(api, "/tokenize", {"content": text}).get_json()["tokens"]
    assert post(api, "/detokenize", {"tokens": ids}).get_json() == {"prompt": text, "content": text}
    assert post(api, "/detokenize", {"tokens": []}).get_json()["prompt"] == ""
    assert ids_of(IM_END)[-1] in ids


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", None),
        ("/tokenize", {"prompt": "a", "content": "b"}, "content", None),
        ("/tokenize", {"prompt": "a", "messages": HI}, "messages", None),
        ("/tokenize", {"prompt": 5}, "prompt", None),
        ("/tokenize", {"messages": []}, "messages", None),
        ("/tokenize", {"messages": "x"}, "messages", None),
        ("/tokenize", {"prompt": "word " * 10_000}, "prompt", "context_length_exceeded"),
        ("/detokenize", {}, "tokens", None),
        ("/detokenize", {"tokens": "x"}, "tokens", None),
        ("/detokenize", {"tokens": [-1]}, "tokens", None),
        ("/detokenize", {"tokens": [10**6]}, "tokens", None),
        ("/detokenize", {"tokens": [1.5]}, "tokens", None),
    ],
)
def test_bad_requests(api: Api, path: str, body: Any, param: str, code: str | None) -> None:
    check_error(post(api, path, body), 400, param, code)


def test_another_model(api: Api) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        check_error(post(api, path, {**body, "model": "other"}), 404, "model", "model_not_found")


def test_version(api: Api) -> None:
    assert api.client.get("/version").get_json() == {"version": __version__}
