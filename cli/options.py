"""Command-line flags made from the fields of the configuration dataclasses.

A setting is declared once, in common.config. Here its field becomes a flag: name, type and help text come from the
field, and the flag's own default is None ("not given"), so that a TOKENLOOM_ variable can still supply the value.
Runs while the commands are being defined; never reads the environment.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any

import typer

from common.config import WireConfig, known_settings

Command = Callable[..., Any]


def settings_flags(
    *configs: type[WireConfig], exclude: Collection[str] = (), only: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Return a decorator that gives a command one flag for each field of `configs`.

    The command receives them in its `**flags`; a flag that was not given is None. A field that several of the
    configurations share becomes one flag. Fields named in `exclude` become none, nor does any other than those in
    `only` when that is given.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        skipped = {p.name for p in own} | set(exclude)
        flags: dict[str, inspect.Parameter] = {}
        for config in configs:
            for f in fields(config):
                if f.name not in skipped and f.name not in flags and (not only or f.name in only):
                    flags[f.name] = _parameter(f)
        command.__signature__ = signature.replace(parameters=[*own, *flags.values()])  # type: ignore[attr-defined]
        return command

    return decorate


def flags_for(config: type[WireConfig], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `flags` that are settings of `config`."""
    names = {f.name for f in fields(config)}
    return {name: value for name, value in flags.items() if name in names}


def flag_name(setting: str) -> str:
    """Return how a setting is spelled as a flag: `max_batch_tokens` is `--max-batch-tokens`."""
    return "--" + setting.replace("_", "-")


def _parameter(f: Field[Any]) -> inspect.Parameter:
    kind = known_settings()[f.name]
    flag = flag_name(f.name)
    spelling = f"{flag}/--no-{flag.removeprefix('--')}" if kind is bool else flag
    option = typer.Option(spelling, help=f.metadata["help"] + _shown_default(f))
    return inspect.Parameter(
        f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _shown_default(f: Field[Any]) -> str:
    """Return the default as `--help` shows it after the help text; nothing when the text says it already."""
    default = f.default_factory() if f.default_factory is not MISSING else f.default
    if default is None or default == "":
        return ""
    if isinstance(default, bool):
        default = "on" if default else "off"
    return f" (default: {default})"
