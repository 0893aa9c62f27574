"""Logging, set up in one way in every process, so that what they write to one terminal reads as one log.

Called once, when a process starts. Configures nothing but the root logger.
"""

import logging

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


def set_up_logging(level: str) -> None:
    """Write records from `level` (as in the setting log_level) on to standard error; a set-up there is stays."""
    logging.basicConfig(level=level.upper(), format=FORMAT, datefmt=TIME_FORMAT)
