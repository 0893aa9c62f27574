"""The `tokenloom` command: `serve`, `worker`, `web`, `pull`, `models`, `chat` and `bench`.

Each command turns flags into a configuration and calls the one function that does the work. Errors of configuration
and of models end with one line that names the key, and exit code 2, which tells a supervisor not to try again.
"""

import os
import sys
from typing import Annotated, Any

import typer

from cli import web_process
from cli.bench import bench
from cli.options import flag_name, flags_for, integer, number, settings_flags
from cli.restart import EXIT_CONFIG
from common import __version__
from common.config import WebConfig, WorkerConfig, check_together, load
from common.errors import ConfigError, ModelError

ENDPOINTS = ("submit_endpoint", "publish_endpoint")

app = typer.Typer(
    help="Serve language models over an OpenAI-compatible API.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # it could print settings, and logs want plain tracebacks
    rich_markup_mode=None,  # its tables cut the names of flags where a terminal has 80 columns
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tokenloom {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
@settings_flags(WorkerConfig, WebConfig, exclude=ENDPOINTS)
def serve(
    model_argument: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="What to serve; the same as --model.", show_default=False)
    ] = None,
    **flags: Any,
) -> None:
    """Start a worker and the web tier, print the URL when they are ready, and stop both on Ctrl-C."""
    from cli.serve import serve as run_serve

    if model_argument is not None:
        if flags["model"] not in (None, model_argument):
            raise ConfigError("model", f"given twice: {model_argument} and {flags['model']}")
        flags["model"] = model_argument
    worker = load(WorkerConfig, flags_for(WorkerConfig, flags))
    web = load(WebConfig, flags_for(WebConfig, flags))
    check_together(worker, web)
    raise typer.Exit(run_serve(worker, web))


@app.command()
@settings_flags(WorkerConfig)
def worker(**flags: Any) -> None:
    """Run one worker process: it loads a model and computes what web processes submit."""
    config = load(WorkerConfig, flags)
    from worker.main import run_worker

    raise typer.Exit(run_worker(config))


@app.command()
@settings_flags(WebConfig)
def web(
    listen_fd: Annotated[int | None, typer.Option("--listen-fd", hidden=True)] = None,
    **flags: Any,
) -> None:
    """Run the web tier: Gunicorn with the HTTP application, for a worker started by itself."""
    config = load(WebConfig, flags)
    web_process.become_gunicorn(config, listen_fd)


@app.command()
@settings_flags(WorkerConfig, only=("cache_dir",))
def pull(
    name: Annotated[
        str | None, typer.Argument(help="A name of the catalogue; by default the model that would be served.")
    ] = None,
    **flags: Any,
) -> None:
    """Fetch a catalogue model into the cache, or check that it is there."""
    from cli.pull import pull_model

    config = load(WorkerConfig, flags)
    pull_model(name or config.model, config.cache_path)


@app.command()
@settings_flags(WorkerConfig, only=("cache_dir",))
def models(**flags: Any) -> None:
    """List the models known by name."""
    from cli.pull import list_models

    list_models(load(WorkerConfig, flags).cache_path)


@app.command()
def chat(
    url: Annotated[str, typer.Option("--url", help="Address of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option("--model", help="Model to talk to; by default the first one listed.")] = "",
    system: Annotated[str, typer.Option("--system", help="System message.")] = "",
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", parser=integer(1), metavar="N", help="Length of an answer at most.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", parser=number(0), metavar="NUMBER", help="Randomness; 0 is greedy."),
    ] = None,
) -> None:
    """Chat with a running server in the terminal. The key for servers that need one is OPENAI_API_KEY."""
    from cli.chat import ChatClient, repl

    client = ChatClient(url, os.environ.get("OPENAI_API_KEY", ""))
    settings = {"max_tokens": max_tokens, "temperature": temperature}
    raise typer.Exit(repl(client, model, system, {k: v for k, v in settings.items() if v is not None}))


app.command()(bench)


def main() -> None:
    """Run the command line and exit."""
    try:
        app()
    except ConfigError as error:
        print(f"tokenloom: {describe(error)}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    except ModelError as error:
        print(f"tokenloom: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)


def describe(error: ConfigError) -> str:
    """Return the error's text with its key as the user can set it: the flag, or the variable when that was wrong."""
    text = str(error)
    return text if error.key.isupper() else text.replace(error.key, flag_name(error.key), 1)
