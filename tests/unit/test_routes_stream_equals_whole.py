"""A streamed answer is the whole one in pieces, over hundreds of random requests."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.api import TOKENIZER, Api, events
from tests.support.tiny_tokenizer import IM_END

NUM_REQUESTS = 500
WORDS = ["hello", " world", " 😀", "你好", "\n\n", " é", "\u2028", "stop", " quick", "\t", "a", IM_END]


def random_ids(chooser: random.Random) -> list[int]:
    """Mostly text, with bytes that are no character, and control tokens, between."""
    ids: list[int] = []
    while len(ids) < chooser.randrange(1, 40):
        if chooser.random() < 0.15:
            ids.append(chooser.randrange(TOKENIZER.get_vocab_size()))
        else:
            ids += TOKENIZER.encode(chooser.choice(WORDS), add_special_tokens=False).ids
    return ids


def random_fields(chooser: random.Random, is_chat: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"seed": chooser.randrange(1000), "max_tokens": chooser.randrange(1, 50)}
    options: dict[str, Any] = {
        "stop": [chooser.choice(WORDS)[: chooser.randrange(1, 9)] or "x" for _ in range(chooser.randrange(1, 4))],
        "n": chooser.randrange(1, 4),
        "min_tokens": chooser.randrange(fields["max_tokens"] + 1),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "stop_token_ids": [chooser.randrange(TOKENIZER.get_vocab_size())],
        "ignore_eos": True,
        "logprobs": True if is_chat else chooser.randrange(3),
    }
    if not is_chat:
        options["echo"] = True
    return fields | {name: value for name, value in options.items() if chooser.random() < 0.35}


def joined(chunks: list[Any], index: int, is_chat: bool) -> dict[str, Any]:
    """Put one choice together from its chunks."""
    text, reason, logprobs = "", None, {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            assert reason is None, "something came after the finish reason"
            text += choice["delta"].get("content", "") if is_chat else choice["text"]
            reason = choice["finish_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                if values is not None:
                    logprobs.setdefault(name, []).extend(values)
    return {"text": text, "finish_reason": reason, "logprobs": logprobs}


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_every_random_request_streams_its_whole_answer(text_folder: Path, kind: str) -> None:
    """Text, finish reasons, log-probabilities and usage: stop strings, several answers, odd bytes included."""
    is_chat = kind == "chat"
    ask = Api.chat if is_chat else Api.text
    for number in range(NUM_REQUESTS // 2):
        chooser = random.Random(f"{kind}{number}")

        def next_id(spec: Any, done: list[int], number: int = number) -> int | None:
            ids = random_ids(random.Random(f"{number}/{spec.params.seed}"))
            return ids[len(done)] if len(done) < len(ids) else None

        fields = random_fields(chooser, is_chat) | ({} if is_chat else {"prompt": "hello 😀"})
        # What arrives together, and so the pieces, may differ from one time to the next.
        body = ask(Api(text_folder, next_id=next_id, per_step=chooser.choice([1, 3])), **fields).get_json()
        streaming = Api(text_folder, next_id=next_id, per_step=chooser.choice([1, 1, 2, 5, 100]))
        *chunks, last = events(ask(streaming, **fields, stream=True, stream_options={"include_usage": True}))
        assert last["usage"] == body["usage"], fields
        for choice in body["choices"]:
            streamed = joined(chunks, choice["index"], is_chat)
            text = choice["message"]["content"] if is_chat else choice["text"]
            whole = {name: values for name, values in (choice["logprobs"] or {}).items() if values}
            assert streamed["text"] == text, fields
            assert streamed["finish_reason"] == choice["finish_reason"], fields
            assert {name: values for name, values in streamed["logprobs"].items() if values} == whole, fields
