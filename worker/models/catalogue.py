"""The catalogue of models known by name: what file, from which sources, with which hash and licence.

Reads `catalogue.toml` beside this module. Never fetches anything.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ModelError

CATALOGUE_FILE = Path(__file__).with_name("catalogue.toml")


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One part of a file: a pinned requirement (`name==version`) and the member of its wheel."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A file cut into parts that lie in wheels of the configured package index; joined in order."""

    parts: tuple[WheelPart, ...]

    def __str__(self) -> str:
        return f"packages {self.parts[0].requirement} and {len(self.parts) - 1} more"


@dataclass(frozen=True, slots=True)
class HubSource:
    """A file in a repository of the model hub."""

    repo: str
    file: str

    def __str__(self) -> str:
        return f"model hub {self.repo}"


Source = WheelSource | HubSource


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One model file. `sha256` (lower-case hex) and `size_bytes` decide whether fetched bytes are accepted."""

    name: str
    aliases: tuple[str, ...]
    description: str
    file: str
    size_bytes: int
    sha256: str
    licence: str
    sources: tuple[Source, ...]


class Catalogue:
    """Entries by name or alias; names are compared without regard to case."""

    def __init__(self, entries: Iterable[CatalogueEntry]):
        self.entries = tuple(entries)
        self._by_name: dict[str, CatalogueEntry] = {}
        for entry in self.entries:
            for name in (entry.name, *entry.aliases):
                if self._by_name.setdefault(name.lower(), entry) is not entry:
                    raise ModelError(f"the catalogue names {name!r} twice")

    def find(self, name: str) -> CatalogueEntry | None:
        """Return the entry called `name`, or None."""
        return self._by_name.get(name.lower())

    def get(self, name: str) -> CatalogueEntry:
        """Return the entry called `name`; ModelError, listing the names there are, when there is none."""
        entry = self.find(name)
        if entry is None:
            known = ", ".join(e.name for e in self.entries)
            raise ModelError(f"no model {name!r} in the catalogue; it has {known}")
        return entry


def load_catalogue(path: Path = CATALOGUE_FILE) -> Catalogue:
    """Read a catalogue file. Raises ModelError when it is malformed."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return Catalogue(_entry(table) for table in data["model"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path.name} cannot be read as a catalogue: {type(error).__name__}: {error}") from error


def _entry(table: dict[str, Any]) -> CatalogueEntry:
    sha256 = table["sha256"]
    if len(sha256) != 64 or set(sha256) - set("0123456789abcdef"):
        raise ValueError(f"sha256 of {table['name']} is not 64 lower-case hex digits")
    if Path(table["file"]).name != table["file"]:
        raise ValueError(f"file of {table['name']} must be a plain name")
    return CatalogueEntry(
        name=table["name"],
        aliases=tuple(table.get("aliases", ())),
        description=table.get("description", ""),
        file=table["file"],
        size_bytes=int(table["size_bytes"]),
        sha256=sha256,
        licence=table["licence"],
        sources=tuple(_source(source) for source in table["sources"]),
    )


def _source(table: dict[str, Any]) -> Source:
    match table["kind"]:
        case "wheels":
            parts = tuple(WheelPart(part["requirement"], part["member"]) for part in table["parts"])
            if not parts or any("==" not in part.requirement for part in parts):
                raise ValueError("a wheels source needs parts with pinned requirements (name==version)")
            return WheelSource(parts)
        case "hub":
            return HubSource(table["repo"], table["file"])
        case kind:
            raise ValueError(f"unknown source kind {kind!r}")
