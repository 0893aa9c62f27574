"""`tokenloom chat` against a scripted server: what is typed, what is printed, what is sent."""

import io
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cli import chat
from cli.chat import ChatClient, repl
from common.errors import ConfigError
from tests.support.processes import ROOT, free_port
from tests.support.scripted_server import ScriptedServer

TIMEOUT_S = 60.0


class Typed(io.StringIO):
    """What a person types at a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


@pytest.fixture
def converse(server, monkeypatch, capsys):
    """Return a function that types lines and gives exit code, output and errors."""

    def run(
        *lines: str, model: str = "", system: str = "", url: str = "", terminal: bool = True, wait_s: float = 0.0
    ) -> tuple[int, str, str]:
        kind = Typed if terminal else io.StringIO
        monkeypatch.setattr(sys, "stdin", kind("".join(line + "\n" for line in lines)))
        code = repl(ChatClient(url or server.url), model, system, {"max_tokens": 3}, wait_s)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_conversation_goes_on_with_what_was_said(server, converse):
    """The second question carries the first and its answer; leaving is exit code 0."""
    code, out, _ = converse("one", "two", "/quit", system="be brief")
    assert code == 0
    assert out.count(" t0 t1 t2\n") == 2
    roles = [(message["role"], message["content"]) for message in server.bodies[1]["messages"]]
    assert roles == [("system", "be brief"), ("user", "one"), ("assistant", " t0 t1 t2"), ("user", "two")]
    assert server.bodies[1]["stream"] is True
    assert server.bodies[1]["model"] == "good", "the first model listed is the default"


def test_reset_forgets_all_but_the_system_message(server, converse):
    """/reset starts over, and the end of the input leaves."""
    code, _, _ = converse("one", "/reset", "", "two", system="be brief")
    assert code == 0
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["be brief", "two"]


@pytest.mark.parametrize(
    ("model", "said"), [("busy", "429: queue full"), ("error_event", "boom"), ("no_done", "before it was done")]
)
def test_a_failed_answer_is_said_and_forgotten(server, converse, model, said):
    """The question is not kept without an answer, and the conversation can go on."""
    code, _, err = converse("one", "two", model=model)
    assert code == 0
    assert err.count(said) == 2
    assert [[m["content"] for m in body["messages"]] for body in server.bodies] == [["one"], ["two"]]


def test_no_server_is_one_line_and_exit_code_one(converse):
    """Nothing listening is said in words."""
    code, _, err = converse("one", url=f"http://127.0.0.1:{free_port()}")
    assert code == 1
    assert "cannot reach the server" in err
    assert len(err.splitlines()) == 1


def test_a_pipe_gets_the_answers_alone(server, converse):
    """`echo hi | tokenloom chat` is used in scripts: no prompt, no greeting, and the exit code tells of failures."""
    assert converse("one", "two", terminal=False) == (0, " t0 t1 t2\n" * 2, "")
    code, out, err = converse("one", model="busy", terminal=False)
    assert (code, out) == (1, "")
    assert err == "tokenloom: the server answered 429: queue full\n"


@pytest.mark.parametrize("reader", ["cat", "true"])
def test_the_command_in_a_pipeline(server, reader):
    """The command itself, with its input and output in pipes, one of which may close early."""
    command = f"printf 'one\ntwo\n' | {sys.executable} -m cli chat --url {server.url} --max-tokens 3 | {reader}"
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert result.stderr == ""
    if reader == "cat":
        assert (result.returncode, result.stdout) == (0, " t0 t1 t2\n" * 2)


def test_it_waits_for_a_server_that_is_not_there_yet(converse, monkeypatch):
    """`make chat` typed right after `make serve`: one line says what it waits for, then the conversation begins."""
    late = ScriptedServer(port=free_port(), not_ready_answers=2)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            late.__enter__()

    monkeypatch.setattr(chat.time, "sleep", sleep)
    try:
        code, out, err = converse("one", url=f"http://127.0.0.1:{late.port}", terminal=False, wait_s=100.0)
    finally:
        late.__exit__(None, None, None)
    assert (code, out) == (0, " t0 t1 t2\n")
    assert len(slept) == 4, "twice nobody listened, twice the model was loading"
    (line,) = err.splitlines()
    assert "nothing listens there; waiting for it, up to 100 s" in line


def test_waiting_has_an_end(server, converse):
    """A server that never becomes ready is an error after all, with its reason."""
    server.not_ready_answers = 10**6
    code, out, err = converse("one")
    assert (code, out) == (1, "")
    assert err == "tokenloom: the server is not ready: the worker is loading the model\n"


def test_ctrl_c_ends_the_waiting(converse, monkeypatch):
    """Without a traceback, like everywhere."""

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(chat.time, "sleep", interrupted)
    code, _, err = converse("one", url=f"http://127.0.0.1:{free_port()}", wait_s=100.0)
    assert code == 0
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("url", ["", "http://", "http://127.0.0.1:abc", "http://127.0.0.1:99999", "ftp://127.0.0.1"])
def test_what_is_no_address_is_a_configuration_error(url):
    """It names the flag, and nothing is connected to."""
    with pytest.raises(ConfigError) as caught:
        ChatClient(url)
    assert caught.value.key == "url"


def test_input_that_is_no_text_is_said_in_one_line(server, converse, monkeypatch):
    """A file piped in by mistake is no reason for a traceback."""
    monkeypatch.setattr(io, "StringIO", lambda text: io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8"))
    code, _, err = converse("one", terminal=False)
    assert code == 1
    assert err == "tokenloom: the input is not text in UTF-8\n"


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_address_may_end_as_the_user_likes(server, suffix):
    """Users paste the base URL of the API as often as the server's."""
    assert ChatClient(server.url + suffix).models() == ["good"]


@pytest.mark.parametrize("answer", [b"hello, I am a web page", b'{"data": 5}', b"[]", b'data: "x"\n\n', b"data: 7\n\n"])
@pytest.mark.parametrize("model", ["", "given"])
def test_what_is_no_model_server_is_said_without_a_traceback(converse, answer, model):
    """Any other web server that answers 200 is told apart in one line."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_GET

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        _, _, err = converse("one", model=model, url=f"http://127.0.0.1:{page.server_port}")
        page.shutdown()
    (line,) = err.splitlines()
    assert line.startswith("tokenloom: ")
