"""nginx with the project's own configuration, on the loopback address.

Only what differs between a container and a test is changed: where it listens, where the web tier is, where it writes.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.processes import ROOT, free_port, wait_for_port

START_TIMEOUT_S = 20.0


def nginx_program() -> str:
    """Return nginx's path, or skip the test with the reason."""
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip("nginx is not installed (on Debian: apt install nginx-light)")
    return found


def configuration(listen_port: int, web_port: int, directory: Path) -> str:
    """Return deploy/nginx.conf for a test; every change must find its place."""
    text = (ROOT / "deploy" / "nginx.conf").read_text()
    changes = {
        "listen 8080 ": f"listen 127.0.0.1:{listen_port} ",
        "server web:8000 ": f"server 127.0.0.1:{web_port} ",
        "/tmp/": f"{directory}/",
        "worker_processes auto;": "worker_processes 1;",
        "worker_connections 8192;": "worker_connections 512;",
    }
    for old, new in changes.items():
        assert old in text, f"deploy/nginx.conf no longer has {old!r}"
        text = text.replace(old, new)
    return text


@contextmanager
def running_nginx(web_port: int, directory: Path) -> Iterator[int]:
    """Run nginx in front of a web tier; gives the port it listens on."""
    program = nginx_program()
    port = free_port()
    path = directory / "nginx.conf"
    path.write_text(configuration(port, web_port, directory))
    # As root it would drop its rights and then not reach the test's folder; in the container it never is root.
    globals_ = "daemon off; user root;" if os.geteuid() == 0 else "daemon off;"
    command = [program, "-e", "stderr", "-p", str(directory), "-c", str(path), "-g", globals_]
    with open(directory / "nginx.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for_port(port, START_TIMEOUT_S)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=START_TIMEOUT_S)
