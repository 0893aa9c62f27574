"""A live server for client programs to talk to."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import end_family, free_port
from tests.support.serve import Serve
from tests.support.tiny_folder import write_model


@dataclass(frozen=True)
class TinyServer:
    """A server of a tiny model in float32. url: its base URL; folder: the model's."""

    url: str
    model: str
    folder: Path


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    """`tokenloom serve` as its users start it."""
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny-chat")
    port = free_port()
    server = Serve(
        tmp_path_factory.mktemp("serve"), "--model", str(folder), "--port", str(port), "--quantization", "none"
    )
    try:
        server.wait_ready()
        yield TinyServer(f"http://127.0.0.1:{port}", "tiny-chat", folder)
    finally:
        end_family(server.process)
