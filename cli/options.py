"""Command-line flags made from the fields of the configuration dataclasses.

A setting is declared once, in common.config. Here its field becomes a flag: name and help text come from the field, and
the flag's own default is None ("not given"), so that a TOKENLOOM_ variable can still supply the value. Values stay
text: common.config reads flags and variables alike, and says in one way what is wrong with them. `integer` and `number`
do so for the flags of commands that have no settings.
Runs while the commands are being defined; never reads the environment.
"""

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields
from functools import partial
from typing import Annotated, Any

import typer

from common.config import OneOf, WireConfig, known_settings

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


def integer(low: int) -> Callable[[Any], int]:
    """Return a parser for a flag that takes an integer of at least `low`. It raises typer.BadParameter."""
    return partial(_at_least, low, int, "an integer")


def number(low: float) -> Callable[[Any], float]:
    """Return a parser for a flag that takes a finite number of at least `low`. It raises typer.BadParameter."""
    return partial(_at_least, low, float, "a number")


def _at_least(low: Any, kind: Callable[[Any], Any], kind_name: str, value: Any) -> Any:
    try:
        parsed = kind(value)
    except ValueError:
        raise typer.BadParameter(f"must be {kind_name}, not {value!r}") from None
    if not math.isfinite(parsed):
        raise typer.BadParameter(f"must be a finite number, not {value!r}")
    if parsed < low:
        raise typer.BadParameter(f"must be at least {low:g}, not {value!r}")
    return parsed


def _parameter(f: Field[Any]) -> inspect.Parameter:
    kind = known_settings()[f.name]
    flag = flag_name(f.name)
    if kind is bool:
        option = typer.Option(f"{flag}/--no-{flag.removeprefix('--')}", help=f.metadata["help"] + _shown_default(f))
    else:
        option = typer.Option(flag, metavar=_metavar(f), help=f.metadata["help"] + _shown_default(f))
    return inspect.Parameter(
        f.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[(bool if kind is bool else str) | None, option],
    )


def _metavar(f: Field[Any]) -> str:
    """Return what `--help` shows for the value: the choices where they are listed, else what kind of value it is."""
    check = f.metadata["check"]
    if isinstance(check, OneOf):
        return "|".join(check.allowed)
    if f.name.endswith("_s"):
        return "SECONDS"
    return {int: "N", float: "NUMBER"}.get(known_settings()[f.name], "TEXT")


def _shown_default(f: Field[Any]) -> str:
    """Return the default as `--help` shows it after the help text; nothing when the text says it already."""
    default = f.default_factory() if f.default_factory is not MISSING else f.default
    if default is None or default == "":
        return ""
    if isinstance(default, bool):
        default = "on" if default else "off"
    return f" (default: {default})"
