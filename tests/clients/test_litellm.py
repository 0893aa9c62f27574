"""LiteLLM against a live server: answers, streams, and errors in its own classes."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import TinyServer
from tests.support.client_env import client_python

pytestmark = pytest.mark.timeout(1200)

PROGRAM = Path(__file__).with_name("litellm_program.py")


def test_a_program_written_for_litellm(tiny_server: TinyServer) -> None:
    """A prompt that is too long is its ContextWindowExceededError, which it finds out from the message's words."""
    command = [str(client_python("litellm", ["litellm"])), str(PROGRAM), f"{tiny_server.url}/v1", tiny_server.model]
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["whole"] == seen["streamed"] != ""
    assert (seen["usage"], seen["too long"], seen["bad"]) == (20, 400, 400)
