"""Gunicorn's own log lines in the format of all others. Runs in Gunicorn's master and workers."""

from gunicorn.glogging import Logger

from common.logs import FORMAT, TIME_FORMAT


class GunicornLog(Logger):
    """Gunicorn's logger, which insists on a handler and a format of its own."""

    error_fmt = FORMAT.replace("%(name)s", "gunicorn")  # its name is "gunicorn.error", whatever the level
    datefmt = TIME_FORMAT
