"""From what the user names (--model) to a folder that transformers loads, fetching and converting as needed.

Runs in the thread that starts the worker. Refuses weights and code that could run anything, unless settings allow them.
Never imports torch itself (converting a GGUF file does).
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from common.config import WorkerConfig
from common.errors import ConfigError, ModelError
from worker.models.catalogue import CatalogueEntry, load_catalogue
from worker.models.gguf_convert import convert, converted_folder
from worker.models.progress import Progress, Report
from worker.models.pull import pull_entry

_SAFE_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_PICKLE_PATTERNS = ["*.bin", "*.pt", "*.pth", "*.ckpt"]
_CODE_PATTERNS = ["*.py"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The name clients use for a model and the folder it is loaded from."""

    id: str
    path: Path


def resolve_model(config: WorkerConfig, report: Report) -> ResolvedModel:
    """Return the folder of `config.model`: a catalogue name, a .gguf file, a local folder or a hub id.

    Raises ConfigError for a name that is nothing, ModelError when it cannot be fetched or converted, or is refused.
    """
    name, path = _fetch(find_source(config), config, report)
    return ResolvedModel(config.served_model_name or name, path)


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository of the model hub: owner/name."""

    name: str


def find_source(config: WorkerConfig) -> CatalogueEntry | Path | HubId:
    """Return what `config.model` names: a catalogue entry, a .gguf file or folder here, or a repository of the hub.

    Looks at this machine only, in milliseconds, so a server can ask before it starts anything. Raises ConfigError for a
    name that can be none of these, and ModelError for a folder that holds no model that may be loaded.
    """
    name = config.model
    try:
        path = Path(name).expanduser()
        is_file, is_dir = path.is_file(), path.is_dir()
    except (OSError, RuntimeError) as error:  # a name too long for a path; ~ of a user that does not exist
        raise ConfigError("model", f"{name!r}: {error}") from None
    entry = load_catalogue().find(name)
    if entry is not None and not is_file and not is_dir:
        return entry
    if is_file:
        if path.suffix.lower() != ".gguf":
            raise ConfigError(
                "model", f"{path} is a file but not a .gguf; name a folder with config.json, or a .gguf file"
            )
        return path
    if is_dir:
        check_folder(path, config)
        return path
    if not _is_hub_id(name):
        known = ", ".join(e.name for e in load_catalogue().entries)
        raise ConfigError(
            "model",
            f"{name!r} is not in the catalogue ({known}) and no file or folder here; "
            "give a name that `tokenloom models` lists, a path, or a hub id (owner/name)",
        )
    return HubId(name)


def _fetch(source: CatalogueEntry | Path | HubId, config: WorkerConfig, report: Report) -> tuple[str, Path]:
    """Return the name that clients use unless another is set, and the folder, fetched and converted as needed."""
    cache_dir = config.cache_path
    match source:
        case CatalogueEntry():
            folder = converted_folder(Path(source.file), cache_dir, source.sha256)
            if not folder.is_dir():
                folder = convert(pull_entry(source, cache_dir, report), cache_dir, report, source.sha256)
            return source.name, folder
        case HubId():
            report(Progress("download", 0, 0, f"fetching {source.name} from the model hub"))
            folder = _from_hub(config)
            check_folder(folder, config)
            return source.name, folder
        case _:
            is_folder = source.is_dir()
            name = source.resolve().name if is_folder else source.stem
            return name, source if is_folder else convert(source, cache_dir, report)


def check_folder(folder: Path, config: WorkerConfig) -> None:
    """Raise ModelError unless `folder` holds a model that may be loaded under `config`."""
    names = [file.name for file in folder.iterdir()]
    if "config.json" not in names:
        ggufs = sorted(name for name in names if name.lower().endswith(".gguf"))
        if ggufs:
            raise ModelError(f"{folder} holds GGUF files; name the file itself: {folder / ggufs[0]}")
        raise ModelError(f"{folder} has no config.json, so it is not a model folder")
    _check_code(folder, config)
    if any(name.endswith(".safetensors") for name in names):
        return
    if any(_is_pickle(name) for name in names):
        if config.allow_pickle:
            return
        raise ModelError(f"{folder} has only pickled weights, which can run code; --allow-pickle loads them anyway")
    raise ModelError(f"{folder} has no weights in *.safetensors; if there are pickled ones, see --allow-pickle")


def _check_code(folder: Path, config: WorkerConfig) -> None:
    if config.trust_remote_code:
        return
    for name in ("config.json", "tokenizer_config.json"):
        try:
            settings = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder / name} cannot be read: {error}") from error
        if isinstance(settings, dict) and "auto_map" in settings:
            raise ModelError(f"{folder / name} asks to run code of its own; --trust-remote-code allows it")


def _is_pickle(name: str) -> bool:
    return Path(name).suffix in {pattern.removeprefix("*") for pattern in _PICKLE_PATTERNS}


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name, re.ASCII) is not None and not name.lower().endswith(".gguf")


def _from_hub(config: WorkerConfig) -> Path:
    from worker.models.hub import fetch_snapshot

    patterns = list(_SAFE_PATTERNS)
    if config.allow_pickle:
        patterns += _PICKLE_PATTERNS
    if config.trust_remote_code:
        patterns += _CODE_PATTERNS
    return fetch_snapshot(config.model, patterns)
