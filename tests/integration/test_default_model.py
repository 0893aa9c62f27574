"""The default model behind the real server: Gunicorn, ZeroMQ, worker, over HTTP, many streams at once."""

import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.serve import Serve

pytestmark = pytest.mark.model

TIMEOUT_S = 240.0
MAX_TOKENS = 32

SUBJECTS = (
    "the sea in Chinese characters",
    "a list of ten emoji",
    "日本の春について日本語で",
    "用中文写一首关于月亮的诗",
    "한국어로 자기소개",
    "a Python function that adds two numbers",
    "🎉🚀🌍 and what these emoji mean, using them",
    "a limerick",
    "the word naïve in French, with accents",
    "five kinds of cheese",
    "an SQL query that counts rows",
    "the Greek alphabet in Greek letters",
    "a haiku about rain",
    "Привет и пока по-русски",
    "the numbers from one to twenty",
    "a Rust main function",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    serve = Serve(tmp_path_factory.mktemp("default-model"), "--port", "0").wait_ready()
    yield serve
    serve.process.terminate()
    assert serve.process.wait(30) == 0


def post(server, body):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    return response


def chat_body(subject, **fields):
    return {"messages": [{"role": "user", "content": f"Write {subject}."}], "max_tokens": MAX_TOKENS, **fields}


def whole(server, body):
    """Return the text and the finish reason of an answer that is not streamed."""
    choice = json.load(post(server, body))["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


def streamed(server, body, start=None):
    """Return the same of a stream, after `start` lets it begin."""
    if start is not None:
        start.wait(TIMEOUT_S)
    deltas, finish_reasons, last = [], [], b""
    for line in post(server, {**body, "stream": True}):
        if line.startswith(b"data: {"):
            chunk = json.loads(line.removeprefix(b"data: "))
            choice = chunk["choices"][0]
            deltas.append(choice["delta"].get("content") or "")
            if choice["finish_reason"]:
                finish_reasons.append(choice["finish_reason"])
        last = line.strip() or last
    assert last == b"data: [DONE]"
    assert len(finish_reasons) == 1
    assert not any("\ufffd" in delta for delta in deltas)
    return "".join(deltas), finish_reasons[0]


def at_once(server, bodies):
    """Stream all of them at the same time."""
    start = threading.Barrier(len(bodies))
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: streamed(server, body, start), bodies))


def test_sixteen_streams_at_once_equal_their_answers_alone(server):
    """Each of 16 concurrent greedy streams has the text of its own answer asked for alone, CJK and emoji whole."""
    bodies = [chat_body(subject, temperature=0) for subject in SUBJECTS]
    together = at_once(server, bodies)
    alone = [whole(server, body) for body in bodies]
    assert together == alone
    text = "".join(answer for answer, _ in together)
    assert any("\u4e00" <= character <= "\u9fff" for character in text), "no CJK came, so nothing was shown of it"
    assert any(character >= "\U0001f000" for character in text), "no emoji came, so nothing was shown of them"


def test_a_seeded_request_draws_the_same_alone_and_in_a_crowd(server):
    """At temperature 1 with a seed, 16 at once give the texts that they give one by one."""
    bodies = [chat_body(subject, temperature=1, seed=1000 + at) for at, subject in enumerate(SUBJECTS)]
    together = at_once(server, bodies)
    alone = [whole(server, body) for body in bodies]
    same = sum(a == b for a, b in zip(together, alone, strict=True))
    print(f"\nseeded requests with the same text alone and among 16: {same} of {len(bodies)}")
    assert same == len(bodies)
    again = at_once(server, bodies)
    assert again == together


def test_a_shared_prompt_is_found_in_the_prefix_cache(server):
    """The second request with the same long prompt says how much of it was cached, and answers the same."""
    body = chat_body("a story. " + "Once upon a time there was a fox. " * 30, temperature=0)
    answers = [json.load(post(server, body)) for _ in range(2)]
    first, second = (answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    assert second > first
    assert second >= answers[1]["usage"]["prompt_tokens"] - 2 * 32
    assert answers[0]["choices"] == answers[1]["choices"]
