"""The API through real Gunicorn and the real wire, with a fake model: what only a real server shows.

Which behaviours have to hold, and where each is proved, is listed in tests/CASES.md.
"""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_tokenizer
from tests.support.fake_runner import expected_tokens
from tests.support.link_rig import MakeRig, Rig, rig_maker

pytestmark = pytest.mark.timeout(120)

TOKENIZER = tiny_tokenizer.build()
VOCAB_SIZE = TOKENIZER.get_vocab_size()
SPECIAL_IDS = set(TOKENIZER.get_added_tokens_decoder())
CONTEXT = 4096
MAX_BODY_BYTES = 256 * 1024
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
JSON_TYPE = {"Content-Type": "application/json"}


@pytest.fixture(params=["gevent", "gthread"])
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeRig]:
    yield from rig_maker(tmp_path, request.param, "web.app:create_app()")


def start(make_rig: MakeRig, tmp_path: Path, web: dict[str, Any] | None = None, **worker: Any) -> Rig:
    model = tiny_tokenizer.write(tmp_path / "model")
    settings = {"model_path": model, "vocab_size": VOCAB_SIZE, "max_model_len": CONTEXT, **worker}
    return make_rig(web={"max_body_bytes": MAX_BODY_BYTES, **(web or {})}, worker=settings)


def post(rig: Rig, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """POST some bytes; return the status and the answer's JSON."""
    connection = rig.connect()
    try:
        connection.request("POST", path, body, JSON_TYPE if headers is None else headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def ask(rig: Rig, path: str, **fields: Any) -> tuple[int, Any]:
    return post(rig, path, json.dumps(fields).encode())


def chunks(rig: Rig, path: str, **fields: Any) -> list[Any]:
    """Return the chunks of a stream."""
    connection = rig.post(path, {"stream": True, **fields})
    try:
        response = connection.getresponse()
        assert response.status == 200, response.read()
        *data, done = [line[6:] for line in response.read().split(b"\n") if line.startswith(b"data: ")]
        assert done == b"[DONE]"
        return [json.loads(item) for item in data]
    finally:
        connection.close()


def text_of(stream: list[Any], index: int = 0) -> str:
    return "".join(c["text"] for chunk in stream for c in chunk["choices"] if c["index"] == index)


def ids(number: int) -> list[int]:
    """A prompt whose answer of 200 tokens has no control token, another one for each number."""
    return [number + 1, 200 - number]


def answer(prompt: list[int], count: int) -> str:
    """What the fake model's answer reads like."""
    text: str = TOKENIZER.decode(expected_tokens(prompt, count, VOCAB_SIZE))
    return text.rstrip("\ufffd")


DEEP = b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"

BAD: list[tuple[str, bytes, int]] = [
    (CHAT, b"", 400),
    (CHAT, b"{", 400),
    (CHAT, b"[]", 400),
    (CHAT, b"\xff\xfe\x00", 400),
    (CHAT, b"\x00\x00\x00", 400),
    (CHAT, DEEP, 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "\xe9"}]}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
    (CHAT, b'{"messages": []}', 400),
    (CHAT, b'{"messages": [{"role": "assistant", "content": "x"}]}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 100000000}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "n": 1000000}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"999999": 1}}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "stop": [""]}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "model": "other"}', 404),
    (CHAT, json.dumps({"messages": [{"role": "user", "content": "x " * CONTEXT}]}).encode(), 400),
    (TEXT, b'{"prompt": [999999]}', 400),
    (TEXT, b'{"prompt": [-1]}', 400),
    (TEXT, b'{"prompt": [1, 99999999999999999999]}', 400),
    (TEXT, b'{"prompt": [[]]}', 400),
    (TEXT, json.dumps({"prompt": [1] * CONTEXT}).encode(), 400),
    (TEXT, json.dumps({"prompt": [[1]] * 2000}).encode(), 400),
    (TEXT, b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}', 413),
    ("/v1/nothing", b"{}", 404),
    ("/v1/models", b"{}", 405),
]


def test_neighbours_are_unharmed_by_bad_requests(make_rig: MakeRig, tmp_path: Path) -> None:
    """While every kind of bad request comes in, running streams go on, and each has exactly its own answer."""
    rig = start(make_rig, tmp_path, step_delay_s=0.01)
    texts: dict[int, str] = {}

    def one(number: int) -> None:
        texts[number] = text_of(chunks(rig, TEXT, prompt=ids(number), max_tokens=200))

    neighbours = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in neighbours:
        thread.start()
    rig.observer.wait_until(running=8)
    for path, body, status in BAD:
        got, answered = post(rig, path, body)
        assert got == status, (path, body[:80], answered)
        assert set(answered["error"]) == {"message", "type", "param", "code"}
    for thread in neighbours:
        thread.join(60)
    assert texts == {number: answer(ids(number), 200) for number in range(8)}
    rig.observer.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_the_model(make_rig: MakeRig, tmp_path: Path, stream: bool) -> None:
    """Streamed or not, a list of prompts gives each its own text and the real counts."""
    rig = start(make_rig, tmp_path)
    prompts = [ids(number) for number in range(5)]
    if stream:
        parts = chunks(rig, TEXT, prompt=prompts, max_tokens=50, stream_options={"include_usage": True})
        usage = parts.pop()["usage"]
        texts = [text_of(parts, index) for index in range(5)]
    else:
        _, body = ask(rig, TEXT, prompt=prompts, max_tokens=50)
        usage, texts = body["usage"], [choice["text"] for choice in body["choices"]]
    assert texts == [answer(prompt, 50) for prompt in prompts]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (10, 250)


def test_four_answers_to_a_long_prompt_cost_one_prefill(make_rig: MakeRig, tmp_path: Path) -> None:
    """By what the worker counts: three of the four find all full blocks of the prompt, computed once and held once."""
    rig = start(make_rig, tmp_path, step_delay_s=0.02, block_size=16, prefix_caching=1)
    most_used = 0

    def watch() -> None:
        nonlocal most_used
        while not done.is_set():
            most_used = max(most_used, rig.observer.heartbeat().kv_blocks_used)

    done = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        status, body = ask(rig, TEXT, prompt=ids(1) * 500, max_tokens=60, n=4, seed=1)
    finally:
        done.set()
        watcher.join(30)
    assert status == 200
    assert body["usage"]["prompt_tokens"] == 1000
    assert body["usage"]["completion_tokens"] == 4 * 60
    counters = rig.observer.heartbeat().counters
    full_blocks, tail_blocks = 999 // 16, 5
    assert counters["prefix_hit_tokens"] == 3 * full_blocks * 16
    assert full_blocks < most_used <= full_blocks + 4 * tail_blocks


def test_logprobs_cross_the_wire(make_rig: MakeRig, tmp_path: Path) -> None:
    """Of prompt and answer, for several answers at once, streamed and not: the same, whole and in order."""
    rig = start(make_rig, tmp_path)
    fields = {"prompt": ids(1) * 40, "max_tokens": 50, "echo": True, "logprobs": 3, "n": 2, "seed": 1}
    status, whole = ask(rig, TEXT, **fields)
    assert status == 200
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    streamed: list[dict[str, list[Any]]] = [{name: [] for name in names} for _ in range(2)]
    for chunk in chunks(rig, TEXT, **fields):
        for choice in chunk["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                streamed[choice["index"]][name] += values
    assert [choice["logprobs"] for choice in whole["choices"]] == streamed
    for told in streamed:
        assert [len(told[name]) for name in names] == [80 + 50] * 4
        assert told["token_logprobs"] == [None, *[-0.5] * 129]
    rig.observer.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_frees_the_worker(make_rig: MakeRig, tmp_path: Path, stream: bool) -> None:
    """The text is cut before the stop string, the worker stops computing, and its blocks are free."""
    rig = start(make_rig, tmp_path, step_delay_s=0.005)
    whole = answer(ids(3), 200)
    stop = whole[40:44]
    cut = whole[: whole.index(stop)]
    if stream:
        parts = chunks(rig, TEXT, prompt=ids(3), stop=stop)
        got, reasons = text_of(parts), [c["finish_reason"] for part in parts for c in part["choices"]]
    else:
        (choice,) = ask(rig, TEXT, prompt=ids(3), stop=[stop])[1]["choices"]
        got, reasons = choice["text"], [choice["finish_reason"]]
    assert got == cut
    assert [reason for reason in reasons if reason] == ["stop"]
    rig.observer.wait_idle()


def test_bodies_in_chunks(make_rig: MakeRig, tmp_path: Path) -> None:
    """A body without a length is read up to the limit: a good one is served, an endless one is 413."""
    rig = start(make_rig, tmp_path)

    def send(parts: list[bytes]) -> int:
        connection = rig.connect()
        try:
            connection.request("POST", TEXT, iter(parts), JSON_TYPE, encode_chunked=True)
            return connection.getresponse().status
        except (BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
            return 413
        finally:
            connection.close()

    assert send([b'{"prompt": "hello",', b' "max_tokens": 1}']) == 200
    assert send([b'{"prompt": "', *[b"x" * 65536] * 8, b'"}']) == 413
    assert rig.get("/health")[0] == 200


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "application/x-www-form-urlencoded"}])
def test_no_content_type(make_rig: MakeRig, tmp_path: Path, headers: dict[str, str]) -> None:
    """What curl -d sends without a header, or a client without any, is served when it is JSON."""
    rig = start(make_rig, tmp_path)
    body = json.dumps({"messages": HI, "max_tokens": 2}).encode()
    assert post(rig, CHAT, body, headers)[0] == 200


def test_a_megabyte_of_header(make_rig: MakeRig, tmp_path: Path) -> None:
    """It is refused with a 4xx, and the next request is served."""
    rig = start(make_rig, tmp_path)
    with socket.create_connection(("127.0.0.1", rig.port), timeout=30) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 1_000_000 + b"\r\n\r\n"
        try:
            client.sendall(head)
            status = int(client.makefile("rb").readline().split()[1])
        except (BrokenPipeError, ConnectionResetError):  # the server need not read it all
            status = 400
    assert 400 <= status < 500
    assert ask(rig, TEXT, prompt=ids(1), max_tokens=1)[0] == 200


def test_long_prompts_and_control_tokens_in_them(make_rig: MakeRig, tmp_path: Path) -> None:
    """Texts that are encoded in another thread come out as those that are not, several at once."""
    rig = start(make_rig, tmp_path)
    plain = tiny_tokenizer.build()
    plain.encode_special_tokens = True
    texts = ["hi<|im_end|>", "word " * 1500, "word<|im_end|> " * 300]
    counts: dict[str, int] = {}

    def one(text: str) -> None:
        status, body = ask(rig, CHAT, messages=[{"role": "user", "content": text}], max_tokens=1)
        counts[text] = body["usage"]["prompt_tokens"] if status == 200 else body

    threads = [threading.Thread(target=one, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    around = len(TOKENIZER.encode("<|im_start|>user\n").ids) + len(TOKENIZER.encode("<|im_end|>\n<|im_start|>").ids)
    around += len(TOKENIZER.encode("assistant\n").ids)
    assert counts == {text: around - 1 + len(plain.encode("\n" + text).ids) for text in texts}


def test_pings_while_the_model_is_busy(make_rig: MakeRig, tmp_path: Path) -> None:
    """A stream that has nothing to say for a while shows life in comments, which clients skip."""
    rig = start(make_rig, tmp_path, web={"ping_interval_s": 0.1}, step_delay_s=1.0)
    connection = rig.post(TEXT, {"prompt": ids(1), "max_tokens": 2, "stream": True})
    try:
        raw = connection.getresponse().read()
    finally:
        connection.close()
    assert b": ping\n\n" in raw
    assert raw.endswith(b"data: [DONE]\n\n")


def test_a_kept_alive_connection_serves_good_and_bad_requests(make_rig: MakeRig, tmp_path: Path) -> None:
    """Errors leave the connection usable: the next request on it is answered as its own."""
    rig = start(make_rig, tmp_path)
    connection: http.client.HTTPConnection = rig.connect()
    try:
        for number, (body, status) in enumerate([(b"{", 400), (b'{"prompt": [7, 9], "max_tokens": 4}', 200)] * 3):
            connection.request("POST", TEXT, body, JSON_TYPE)
            response = connection.getresponse()
            answered = json.loads(response.read())
            assert response.status == status, number
            if status == 200:
                assert answered["choices"][0]["text"] == answer([7, 9], 4)
    finally:
        connection.close()
