"""openai-python, the newest version and the last of the major version before it, against a live server."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import TinyServer
from tests.support.client_env import client_python

pytestmark = pytest.mark.timeout(1200)

PROGRAM = Path(__file__).with_name("openai_python_program.py")


@pytest.mark.parametrize("requirement", ["openai", "openai==1.109.1"])
def test_a_program_written_for_openai(tiny_server: TinyServer, requirement: str) -> None:
    """Whole and streamed answers, usage, choices, logprobs, echo, models and errors arrive in the client's types."""
    python = client_python("openai-python", [requirement])
    command = [str(python), str(PROGRAM), f"{tiny_server.url}/v1", tiny_server.model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout)
    if "==" in requirement:
        assert seen["version"] == requirement.partition("==")[2]
    assert seen["models"] == [seen["model"]] == [tiny_server.model]
    assert seen["whole"] == seen["streamed"]
    assert (seen["usage"], seen["stream_usage"], seen["finish"], seen["role"]) == (20, 20, "length", "assistant")
    # The tiny model writes what it likes, broken characters among it.
    told = seen["logprobs"].encode("latin-1").decode("utf-8", "replace")
    assert told.rstrip("\ufffd") == seen["whole"].rstrip("\ufffd")
    assert seen["several"] == [0, 1, 2]
    assert seen["text"] == seen["text_tokens"]
    assert seen["text"].startswith("hello")
    assert seen["errors"] == {
        "parameter": ["BadRequestError", 400, "temperature", "invalid_request"],
        "model": ["NotFoundError", 404, "model", "model_not_found"],
        "context": ["BadRequestError", 400, "prompt", "context_length_exceeded"],
    }
