"""Gunicorn's configuration, from the TOKENLOOM_ variables (`gunicorn -c python:web.gunicorn_conf`).

Gunicorn reads this module's names as its settings, in its master process, where no link to the worker may exist: each
process makes its own after the fork. The application is `web.app:create_app()`, with its Link in `extensions["link"]`.
"""

import contextlib
import logging
import math
import os
import resource
import signal
import socket
import time
import weakref
from types import FrameType
from typing import Any

from common.config import WebConfig, load
from common.logs import set_up_logging

log = logging.getLogger(__name__)

_config = load(WebConfig)

_KILL_MARGIN_S = 5
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
_LAST_LOOK_S = 2
"""Gunicorn looks once a second whether all connections have ended."""

_idle: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""The connections of this process that wait for their next request."""

wsgi_app = "web.app:create_app()"
bind = f"[{_config.host}]:{_config.port}" if ":" in _config.host else f"{_config.host}:{_config.port}"
workers = _config.web_workers
worker_class = _config.web_worker_class
threads = _config.web_threads if worker_class == "gthread" else 1
# Above max_open_requests, so that what is too much gets an answer instead of an unaccepted connection.
worker_connections = max(2 * _config.max_open_requests, 2 * threads) + 256
# Longer than proxies keep an idle connection (nginx: 60 s), so that they never send on one that was just closed.
keepalive = 75
# Watches over the process, not over requests: both classes report that they live while requests run.
timeout = 60
# The link ends what is open after graceful_timeout_s; Gunicorn kills only what does not end even then.
graceful_timeout = math.ceil(_config.graceful_timeout_s) + _KILL_MARGIN_S
preload_app = False
accesslog = None
logger_class = "web.gunicorn_log.GunicornLog"
# What it says at "info" of its own start and end is for those who debug it.
loglevel = "warning" if _config.log_level == "info" else _config.log_level
control_socket_disable = True


def on_starting(server: Any) -> None:
    """Allow as many open files as the system lets us: each connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _let_signals_end_a_starting_process()


def when_ready(server: Any) -> None:
    """Say where it listens, unless it was handed the socket by someone who has said so."""
    set_up_logging(_config.log_level)
    if not any(address.startswith("fd://") for address in server.cfg.bind):
        log.info("%d processes at %s", workers, ", ".join(map(str, server.LISTENERS)))


def post_worker_init(worker: Any) -> None:
    """Start the link, once the process is forked, patched by gevent where it is used, and has its application."""
    set_up_logging(_config.log_level)
    link = worker.wsgi.extensions["link"]
    link.start()
    _drain_on_sigterm(worker, link)


def worker_exit(server: Any, worker: Any) -> None:
    """Stop the link; the process has served its last request, or is made to end."""
    application = getattr(worker, "wsgi", None)
    if application is not None:
        application.extensions["link"].stop()


def pre_request(worker: Any, req: Any) -> None:
    """Note that a connection is in use."""
    _idle.discard(req.unreader.sock)


def post_request(worker: Any, req: Any, environ: dict[str, Any], resp: Any) -> None:
    """Note that a connection waits for its next request."""
    _idle.add(environ["gunicorn.socket"])


def _let_signals_end_a_starting_process() -> None:
    """Let a process that Gunicorn has just forked obey the master's signals at once.

    Until it has set its own handlers it has copies of the master's, which only put the signal into a queue that nobody
    reads there; the master sends it once and would then wait for all of graceful_timeout.
    """

    def in_child() -> None:
        for number in _STOP_SIGNALS:
            signal.signal(number, lambda signum, frame: os._exit(0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)

    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS),
        after_in_child=in_child,
    )


def _drain_on_sigterm(worker: Any, link: Any) -> None:
    gunicorns_own = signal.getsignal(signal.SIGTERM)

    def on_sigterm(signum: int, frame: FrameType | None) -> None:
        signalled_s = time.monotonic()
        link.drain(lambda: _end_waiting(worker, time.monotonic() - signalled_s))
        if callable(gunicorns_own):
            gunicorns_own(signum, frame)

    signal.signal(signal.SIGTERM, on_sigterm)


def _end_waiting(worker: Any, waited_s: float) -> None:
    """End Gunicorn's waiting when nothing is open any more: it would wait for idle connections too."""
    for connection in list(_idle):
        # Its handler reads the end and closes. Shut down through a twin: on the socket itself gevent would raise in
        # the handler that waits for it. One that was closed meanwhile is fine too.
        with contextlib.suppress(OSError):
            with socket.socket(fileno=os.dup(connection.fileno())) as twin:
                twin.shutdown(socket.SHUT_RD)
    worker.cfg.set("graceful_timeout", math.ceil(waited_s) + _LAST_LOOK_S)
