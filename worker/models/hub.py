"""The model hub, through huggingface_hub and its own settings (cache folder, token, offline switch).

The only module that imports huggingface_hub. Runs in the calling thread.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from common.errors import ModelError

T = TypeVar("T")

_DUPLICATES = ["*/*", "consolidated*"]


def fetch_file(repo: str, file: str, folder: Path) -> Path:
    """Download one file of a repository into `folder` and return its path. Raises ModelError."""
    import huggingface_hub

    return Path(_call(repo, lambda: huggingface_hub.hf_hub_download(repo, file, local_dir=folder)))


def fetch_snapshot(repo: str, allow_patterns: list[str]) -> Path:
    """Download a repository's files that match `allow_patterns` into the hub's own cache; returns the folder.

    Subfolders and `consolidated*` hold the same weights in other formats and are left out.
    Works from the cache alone when the hub cannot be reached. Raises ModelError.
    """
    import huggingface_hub

    def download() -> str:
        return str(huggingface_hub.snapshot_download(repo, allow_patterns=allow_patterns, ignore_patterns=_DUPLICATES))

    folder = Path(_call(repo, download))
    if not folder.is_dir():
        raise ModelError(f"{repo} on the model hub has none of the files that a model is loaded from")
    return folder


def _call(repo: str, action: Callable[[], T]) -> T:
    """Run a hub call and turn its many errors into one that says what happened."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return action()
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ModelError(f"the model hub cannot be reached for {repo}: {_first_line(error)}") from error
    except HfHubHTTPError as error:
        raise ModelError(f"the model hub refused {repo}: {_first_line(error)}") from error
    except Exception as error:  # among them those of the HTTP library, which differs from version to version
        raise ModelError(f"{repo} cannot be fetched from the model hub: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
