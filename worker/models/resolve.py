"""From what the user names (--model) to a folder that transformers loads, fetching and converting as needed.

Runs in the thread that starts the worker. Refuses weights and code that could run anything, unless settings allow them.
Never imports torch itself (converting a GGUF file does).
"""

import json
from dataclasses import dataclass
from pathlib import Path

from common.config import WorkerConfig
from common.errors import ModelError
from worker.models.catalogue import load_catalogue
from worker.models.gguf_convert import convert, converted_folder
from worker.models.progress import Report
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

    Raises ModelError when it cannot be found, fetched or converted, or is refused.
    """
    name, path = _locate(config, report)
    return ResolvedModel(config.served_model_name or name, path)


def _locate(config: WorkerConfig, report: Report) -> tuple[str, Path]:
    """Return the name that clients use unless another is set, and the folder."""
    name, cache_dir = config.model, config.cache_path
    entry = load_catalogue().find(name)
    path = Path(name).expanduser()
    if entry is not None and not path.exists():
        folder = converted_folder(Path(entry.file), cache_dir, entry.sha256)
        if not folder.is_dir():
            folder = convert(pull_entry(entry, cache_dir, report), cache_dir, report, entry.sha256)
        return entry.name, folder
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is a file but not a .gguf; name a folder with config.json, or a .gguf file")
        return path.stem, convert(path, cache_dir, report)
    if path.is_dir():
        check_folder(path, config)
        return path.resolve().name, path
    if not _is_hub_id(name):
        known = ", ".join(e.name for e in load_catalogue().entries)
        raise ModelError(f"{name} is no file or folder here, no hub id (owner/name) and not in the catalogue ({known})")
    folder = _from_hub(config)
    check_folder(folder, config)
    return name, folder


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
    parts = name.split("/")
    return len(parts) == 2 and all(part and part[0] not in ".~-" for part in parts) and "\\" not in name


def _from_hub(config: WorkerConfig) -> Path:
    from worker.models.hub import fetch_snapshot

    patterns = list(_SAFE_PATTERNS)
    if config.allow_pickle:
        patterns += _PICKLE_PATTERNS
    if config.trust_remote_code:
        patterns += _CODE_PATTERNS
    return fetch_snapshot(config.model, patterns)
