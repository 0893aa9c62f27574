"""What Gunicorn is told, from the TOKENLOOM_ variables."""

import runpy
from typing import Any

import pytest

from common.errors import ConfigError


def settings(monkeypatch: pytest.MonkeyPatch, **variables: str) -> dict[str, Any]:
    """The names of the configuration module, read as Gunicorn reads it."""
    for name, value in variables.items():
        monkeypatch.setenv(f"TOKENLOOM_{name.upper()}", value)
    return runpy.run_module("web.gunicorn_conf")


def test_settings_come_from_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting of the web tier reaches Gunicorn."""
    names = settings(
        monkeypatch, host="0.0.0.0", port="8123", web_workers="3", web_worker_class="gthread", web_threads="9"
    )
    assert names["bind"] == "0.0.0.0:8123"
    assert (names["workers"], names["worker_class"], names["threads"]) == (3, "gthread", 9)


def test_address_with_colons_is_bracketed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An IPv6 address and a port cannot be told apart otherwise."""
    assert settings(monkeypatch, host="::1", port="80")["bind"] == "[::1]:80"


def test_limits_leave_room_for_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gunicorn must not cut what the link still ends with an answer, nor stop accepting below our limit."""
    names = settings(monkeypatch, graceful_timeout_s="12.5", max_open_requests="2000")
    assert names["graceful_timeout"] > 12.5
    assert names["worker_connections"] > 2000
    assert names["preload_app"] is False


def test_bad_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong value stops the start with the name of the setting."""
    with pytest.raises(ConfigError, match="web_workers"):
        settings(monkeypatch, web_workers="none")
