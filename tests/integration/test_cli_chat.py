"""`tokenloom chat` against a scripted server: what is typed, what is printed, what is sent."""

import io
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cli.chat import ChatClient, repl
from tests.support.processes import free_port
from tests.support.scripted_server import ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


@pytest.fixture
def converse(server, monkeypatch, capsys):
    """Return a function that types lines and gives exit code, output and errors."""

    def run(*lines: str, model: str = "", system: str = "", url: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        code = repl(ChatClient(url or server.url), model, system, {"max_tokens": 3})
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
    assert err.startswith("tokenloom: ")
    assert "Traceback" not in err
