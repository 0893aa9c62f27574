"""Flags come from the configuration's fields; what is wrong is said in one line that names the key."""

import dataclasses
import os
import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import cli.main
from cli.options import flag_name, settings_flags
from cli.web_process import gunicorn_command
from common import __version__
from common.config import OneOf, WebConfig, WorkerConfig, load
from tests.support.processes import ROOT
from worker.models.catalogue import load_catalogue

TIMEOUT_S = 60


def run_cli(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does, with only the TOKENLOOM_ variables given."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOKENLOOM_")}
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments],
        cwd=ROOT,
        env={**clean, "COLUMNS": "200", "NO_COLOR": "1", **env},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.fixture
def received() -> dict[str, object]:
    return {}


@pytest.fixture
def app(received: dict[str, object]) -> typer.Typer:
    app = typer.Typer()

    @app.command()
    @settings_flags(WorkerConfig, exclude=("log_level",))
    def command(name: str, **flags: object) -> None:
        received.update(flags, name=name)

    return app


def test_flags_arrive_as_text_and_none_when_not_given(app, received):
    """A flag that was not given must stay None, or it would win over its variable. The configuration reads the text."""
    result = CliRunner().invoke(app, ["x", "--block-size", "3", "--no-prefix-caching"])
    assert result.exit_code == 0, result.output
    assert received["name"] == "x"
    assert received["block_size"] == "3"
    assert load(WorkerConfig, received, {}).block_size == 3
    assert received["prefix_caching"] is False
    assert received["heartbeat_interval_s"] is None
    assert received["submit_endpoint"] is None
    assert "log_level" not in received


@pytest.mark.parametrize(
    "arguments", [["--block-size"], ["--prefix-caching=maybe"], ["--log-level", "info"], ["--nope"]]
)
def test_a_flag_of_the_wrong_form_or_name_is_a_usage_error(app, received, arguments):
    """Refused with exit code 2 before the command runs."""
    assert CliRunner().invoke(app, ["x", *arguments]).exit_code == 2
    assert received == {}


@pytest.mark.parametrize(("command", "config"), [("worker", WorkerConfig), ("web", WebConfig)])
def test_every_setting_is_a_flag_of_its_command(command, config):
    """A setting that is added to the configuration has a flag at once, with its help."""
    shown = run_cli(command, "--help").stdout
    for field in dataclasses.fields(config):
        assert re.search(rf"{flag_name(field.name)}\b", shown), field.name


def test_serve_has_the_flags_of_both_but_no_endpoints():
    """The sockets between the two are the supervisor's own."""
    shown = run_cli("serve", "--help").stdout
    assert "--block-size" in shown
    assert "--web-workers" in shown
    assert "--submit-endpoint" not in shown
    assert "--no-continuous-batching" in shown


@pytest.mark.parametrize(
    ("arguments", "env", "named"),
    [
        (["serve", "--block-size", "0"], {}, "--block-size"),
        (["serve", "--port", "70000"], {}, "--port"),
        (["serve", "a", "--model", "b"], {}, "--model"),
        (["serve"], {"TOKENLOOM_BLOCKSIZE": "16"}, "TOKENLOOM_BLOCKSIZE"),
        (["serve"], {"TOKENLOOM_MAX_BATCH_SIZE": "many"}, "TOKENLOOM_MAX_BATCH_SIZE: must be an integer"),
        (["serve"], {"TOKENLOOM_PORT": "abc"}, "TOKENLOOM_PORT: must be an integer"),
        (["serve"], {"TOKENLOOM_PREFIX_CACHING": "maybe"}, "TOKENLOOM_PREFIX_CACHING: must be true or false"),
        (["serve", "--port", "abc"], {}, "--port: must be an integer, not 'abc'"),
        (["serve", "--port", "-1"], {}, "--port: must be between 0 and 65535"),
        (["serve", "--graceful-timeout-s", "x"], {}, "--graceful-timeout-s: must be a number, not 'x'"),
        (["serve", "--heartbeat-interval-s", "5"], {}, "--heartbeat-interval-s: must be shorter than"),
        (["worker", "--dtype", "float8"], {}, "--dtype"),
        (["web"], {"TOKENLOOM_WEB_WORKERS": "0"}, "TOKENLOOM_WEB_WORKERS: must be between"),
        (["pull", "no-such-model"], {}, "no-such-model"),
    ],
)
def test_a_bad_setting_ends_in_one_line_that_names_it(arguments, env, named):
    """No traceback, no start: one line on standard error and exit code 2."""
    result = run_cli(*arguments, **env)
    assert result.returncode == 2
    assert result.stdout == ""
    assert named in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["chat", "--max-tokens", "x"], "'--max-tokens': must be an integer, not 'x'"),
        (["chat", "--max-tokens", "0"], "'--max-tokens': must be at least 1, not '0'"),
        (["chat", "--temperature", "nan"], "'--temperature': must be a finite number, not 'nan'"),
        (["bench", "--requests", "1.5"], "must be an integer, not '1.5'"),
        (["bench", "--rate", "-1"], "'--rate': must be at least"),
        (["bench", "--endpoint", "x"], "--endpoint"),
    ],
)
def test_flags_of_the_clients_say_what_they_expect(arguments, said):
    """Flags that are no settings speak the same language, and no library's."""
    result = run_cli(*arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Input should" not in result.stderr


@pytest.mark.parametrize("command", ["serve", "worker", "web", "chat", "bench", "pull", "models"])
def test_help_can_be_read_at_80_columns(command):
    """Flags and their choices are whole, whatever their length."""
    shown = run_cli(command, "--help", COLUMNS="80").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    for config in {"serve": (WorkerConfig, WebConfig), "worker": (WorkerConfig,), "web": (WebConfig,)}.get(command, ()):
        for field in dataclasses.fields(config):
            if command == "serve" and field.name in cli.main.ENDPOINTS:
                continue
            line = next(line for line in shown.splitlines() if re.search(rf" {flag_name(field.name)}( |$)", line))
            if isinstance(field.metadata["check"], OneOf):
                assert "|".join(field.metadata["check"].allowed) in line


def test_a_flag_wins_over_its_variable():
    """The variable is bad here, so the command could only fail on it if the flag did not win."""
    result = run_cli("serve", "--web-workers", "0", TOKENLOOM_WEB_WORKERS="x")
    assert "must be between 1 and 256" in result.stderr


def test_version():
    """`tokenloom --version` prints the version and nothing else."""
    assert run_cli("--version").stdout == f"tokenloom {__version__}\n"


def test_models_lists_the_catalogue():
    """The names that MODEL takes can be looked up."""
    assert "qwen2.5-coder-0.5b-instruct" in run_cli("models").stdout


def test_a_tilde_in_the_cache_folder_is_the_users_home(tmp_path):
    """Variables in files that no shell reads keep their `~`; every command looks where the worker does."""
    entry = load_catalogue().get("default")
    (tmp_path / "cache" / "downloads").mkdir(parents=True)
    (tmp_path / "cache" / "downloads" / entry.file).touch()
    shown = run_cli("models", HOME=str(tmp_path), TOKENLOOM_CACHE_DIR="~/cache").stdout
    assert next(line for line in shown.splitlines() if entry.name in line).split()[4] == "yes", shown


def test_the_web_tier_is_gunicorn_with_the_projects_configuration():
    """`tokenloom web` and the supervisor start the same thing; a socket of the supervisor's replaces the address."""
    command = gunicorn_command()
    assert command[1:] == ["-m", "gunicorn", "--config", "python:web.gunicorn_conf", "web.app:create_app()"]
    assert gunicorn_command(listen_fd=7)[-3:] == ["--bind", "fd://7", "web.app:create_app()"]


def test_errors_name_the_setting_as_a_flag():
    """The key of an error is what the user would type."""
    from common.errors import ConfigError

    assert cli.main.describe(ConfigError("max_batch_size", "is odd")) == "--max-batch-size: is odd"
    assert cli.main.describe(ConfigError("TOKENLOOM_X", "is odd")) == "TOKENLOOM_X: is odd"
