"""Start Gunicorn with the web application, in place of the process that asks.

Settings travel as TOKENLOOM_ variables, because Gunicorn's own processes read them. Never imports web.
"""

import os
import sys

from common.config import WebConfig, to_env


def gunicorn_command(listen_fd: int | None = None) -> list[str]:
    """Return the command line of the web tier. `listen_fd` is a listening socket that the process inherits."""
    command = [sys.executable, "-m", "gunicorn", "--config", "python:web.gunicorn_conf"]
    if listen_fd is not None:
        command += ["--bind", f"fd://{listen_fd}"]
    return [*command, "web.app:create_app()"]


def become_gunicorn(config: WebConfig, listen_fd: int | None = None) -> None:
    """Replace this process by Gunicorn; returns only by raising OSError."""
    command = gunicorn_command(listen_fd)
    os.execvpe(command[0], command, {**os.environ, **to_env(config)})
