"""nginx in front of the whole: what docker-compose.yml starts, by the same commands and the same nginx.conf."""

from collections.abc import Iterator

import pytest

from tests.support.nginx import running_nginx
from tests.support.processes import end_family
from tests.support.serve import Serve

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serve, int]]:
    """A server that computes one request at a time, and the port of nginx in front of it."""
    directory = tmp_path_factory.mktemp("serve")
    running = Serve(directory, "--port", "0", "--no-continuous-batching", "--graceful-timeout-s", "1")
    try:
        running.wait_ready()
        with running_nginx(running.port, tmp_path_factory.mktemp("nginx")) as port:
            yield running, port
    finally:
        end_family(running.process)


def test_a_stream_passes_whole(stack):
    """The stream through nginx is the stream without it."""
    running, port = stack
    connection, response = running.stream(8, port)
    assert response.status == 200
    assert response.getheader("Content-Type", "").startswith("text/event-stream")
    events = [line for line in response.read().splitlines() if line.startswith(b"data: ")]
    assert events[-1] == b"data: [DONE]"
    assert len(events) >= 8
    connection.close()


def test_a_client_that_leaves_frees_its_place_in_the_worker(stack):
    """One long stream holds the only place; when its client leaves nginx, the next request gets it.

    If the leaving went unnoticed, the second answer would come only after thousands of tokens, past the time-out.
    """
    running, port = stack
    first, response = running.stream(8000, port)
    assert response.readline().startswith(b"data: ")
    response.close()
    first.close()
    second, response = running.stream(2, port)
    assert response.read().rstrip().endswith(b"data: [DONE]")
    second.close()


def test_readiness_and_health_pass(stack):
    """What healthchecks ask is answered through nginx as well."""
    running, port = stack
    assert running.status("/health", port) == 200
    assert running.status("/ready", port) == 200
