"""The same faults as clients of the API see them: the real application, real Gunicorn, real wire; a fake runner."""

import http.client
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_tokenizer
from tests.support.link_rig import MakeRig, Rig, rig_maker
from tests.support.processes import wait_for

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["gevent", "gthread"])
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeRig]:
    yield from rig_maker(tmp_path, request.param, "web.app:create_app()")


def start(make_rig: MakeRig, tmp_path: Path, web: dict[str, Any] | None = None, **worker: Any) -> Rig:
    model = tiny_tokenizer.write(tmp_path / "model")
    vocab_size = tiny_tokenizer.build().get_vocab_size()
    return make_rig(web=web, worker={"model_path": model, "vocab_size": vocab_size, "step_delay_s": 0.01, **worker})


def ask(rig: Rig, max_tokens: int, stream: bool, text: str = "hello") -> http.client.HTTPConnection:
    messages = [{"role": "user", "content": text}]
    body = {"model": "fake", "messages": messages, "max_tokens": max_tokens, "stream": stream, "temperature": 0}
    return rig.post("/v1/chat/completions", body)


def data_lines(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of each SSE event, as it comes."""
    while line := response.readline():
        if line.startswith(b"data: "):
            yield line[6:].decode().strip()


def text_of(lines: list[str]) -> str:
    """The joined deltas of a stream."""
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def whole_answer(rig: Rig, max_tokens: int, text: str = "hello") -> str:
    response = ask(rig, max_tokens, stream=False, text=text).getresponse()
    body = json.loads(response.read())
    assert response.status == 200, body
    content: str = body["choices"][0]["message"]["content"]
    return content


def test_restarted_worker_is_an_error_event_a_503_and_then_nothing(make_rig: MakeRig, tmp_path: Path) -> None:
    """A stream ends with one error event and [DONE], a whole answer is a 503, and requests that follow are served."""
    rig = start(make_rig, tmp_path)
    streamed = ask(rig, 5000, stream=True).getresponse()
    lines = data_lines(streamed)
    first = next(lines)
    unstreamed = ask(rig, 5000, stream=False)
    rig.observer.wait_until(running=2)
    rig.kill_worker()
    rig.start_worker()
    rest = [first, *lines]
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["error"]["code"] == "worker_lost"
    assert sum('"error"' in line for line in rest) == 1
    response = unstreamed.getresponse()
    assert response.status == 503
    assert json.loads(response.read())["error"]["code"] == "worker_lost"
    rig.wait_ready()
    whole_answer(rig, 5)
    rig.observer.wait_idle()


def test_ready_follows_the_worker_and_health_does_not(make_rig: MakeRig, tmp_path: Path) -> None:
    """/ready is 503 while the worker is gone and again while it loads, then 200; /health is 200 throughout."""
    rig = start(make_rig, tmp_path, web={"heartbeat_timeout_s": 0.5}, load_delay_s=1)
    rig.kill_worker()
    wait_for(lambda: rig.get("/ready")[0] == 503, 10, "503 from /ready")
    assert rig.get("/health")[0] == 200
    assert ask(rig, 5, stream=True).getresponse().status == 503
    rig.start_worker()
    wait_for(lambda: b"loading" in rig.get("/ready")[1], 20, "a worker that is loading")
    assert rig.get("/health")[0] == 200
    rig.wait_ready()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_client_that_leaves_frees_everything(make_rig: MakeRig, tmp_path: Path, phase: str, stream: bool) -> None:
    """Queued, in prefill or in decode, streaming or not: running, waiting and blocks fall to what the others hold."""
    settings: dict[str, dict[str, Any]] = {
        "queued": {"max_batch_size": 1},
        "prefill": {"max_batch_tokens": 16, "step_delay_s": 0.05},
        "decode": {},
    }
    rig = start(make_rig, tmp_path, **settings[phase])
    bystander = ask(rig, 5000, stream=True) if phase == "queued" else None
    if bystander is not None:
        rig.observer.wait_until(running=1)
    leaver = ask(rig, 5000, stream, text="hello " * 2000 if phase == "prefill" else "hello")
    if phase == "queued":
        rig.observer.wait_until(running=1, waiting=1)
    else:
        rig.observer.wait_until(running=1)
    assert leaver.sock is not None
    leaver.sock.close()
    rig.observer.wait_until(running=1 if bystander else 0, waiting=0)
    if bystander is not None:
        next(data_lines(bystander.getresponse()))  # it is still served
        assert bystander.sock is not None
        bystander.sock.close()
        bystander.close()
    rig.observer.wait_idle()


def test_frozen_web_process_loses_no_text(make_rig: MakeRig, tmp_path: Path) -> None:
    """SIGSTOP for 5 s in the middle of a stream: the joined deltas are the whole answer."""
    rig = start(make_rig, tmp_path, step_delay_s=0.002)
    whole = whole_answer(rig, 2000)
    lines = data_lines(ask(rig, 2000, stream=True).getresponse())
    received = [next(lines) for _ in range(20)]
    rig.signal_web(signal.SIGSTOP)
    time.sleep(5)
    rig.signal_web(signal.SIGCONT)
    received += lines
    assert received[-1] == "[DONE]"
    assert text_of(received) == whole


def test_sigterm_ends_a_long_stream_with_an_error_event(make_rig: MakeRig, tmp_path: Path) -> None:
    """The stream that outlasts the grace ends with `draining` and [DONE]; Gunicorn ends with 0."""
    rig = start(make_rig, tmp_path, web={"graceful_timeout_s": 1})
    lines = data_lines(ask(rig, 50_000, stream=True).getresponse())
    received = [next(lines)]
    assert rig.web is not None
    rig.web.terminate()
    received += lines
    assert received[-1] == "[DONE]"
    assert json.loads(received[-2])["error"]["code"] == "draining"
    assert rig.web.wait(20) == 0
    rig.observer.wait_idle()
