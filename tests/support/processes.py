"""Waiting for things and looking after processes in tests; every wait has a limit."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

ROOT = Path(__file__).resolve().parents[2]

T = TypeVar("T")


def wait_for(condition: Callable[[], T], timeout_s: float, what: str) -> T:
    """Return the first true value of `condition`; AssertionError when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.02)
    return value


def free_port() -> int:
    """Return a port of the loopback address that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_for_port(port: int, timeout_s: float) -> None:
    """Wait until something listens on a port of the loopback address."""

    def listening() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_for(listening, timeout_s, f"a listener on port {port}")


def alive(pid: int) -> bool:
    """Return whether a process runs; one that is dead but not yet waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family(process: subprocess.Popen[str]) -> list[int]:
    """Return the ids of a process and of everything below it."""
    try:
        top = psutil.Process(process.pid)
        return [top.pid, *(child.pid for child in top.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def end_family(process: subprocess.Popen[str]) -> None:
    """Kill a process and everything below it: what a test does at its end, whatever happened before."""
    for pid in family(process):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    process.wait(timeout=30)
