"""Converting a GGUF file once into a folder that transformers loads, kept in the cache.

Runs in the calling thread. The folder appears by one rename when it is whole; a lock keeps two processes from doing the
same work. Torch is imported only when there is something to convert.
"""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ModelError
from worker.models.files import file_lock, staging_folder
from worker.models.progress import Progress, Report

if TYPE_CHECKING:
    from worker.models.gguf_file import GGUFFile

CONVERTER_VERSION = 1
"""Raised whenever the converter's output changes, so that old folders are not used any more."""


def converted_folder(gguf: Path, cache_dir: Path, sha256: str | None = None) -> Path:
    """Return where the conversion of `gguf` lies or will lie.

    The name holds the file's hash where it is known, else its path, size and time of change.
    """
    if sha256 is None:
        stat = gguf.stat()
        identity = f"{gguf.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
        sha256 = hashlib.sha256(identity.encode("utf-8", errors="surrogateescape")).hexdigest()
    return cache_dir / "models" / f"{gguf.stem}-{sha256[:12]}-v{CONVERTER_VERSION}"


def convert(gguf: Path, cache_dir: Path, report: Report, sha256: str | None = None) -> Path:
    """Return the folder with `gguf` converted, converting it when it is not there. Raises ModelError."""
    target = converted_folder(gguf, cache_dir, sha256)
    if target.is_dir():
        return target
    waiting = Progress("convert", 0, 0, f"another process is converting {gguf.name}; waiting for it")
    try:
        with file_lock(target.parent / f".{target.name}.lock", lambda: report(waiting)):
            if target.is_dir():
                return target
            with staging_folder(target.parent, f".{target.name}.staging-") as staging:
                write_folder(gguf, staging, report)
                os.replace(staging, target)
            return target
    except OSError as error:
        raise ModelError(f"{gguf.name} cannot be converted in {target.parent}: {error}") from error


def write_folder(gguf: Path, folder: Path, report: Report) -> None:
    """Write the converted model to the existing folder `folder`. Raises ModelError for what cannot be converted."""
    from worker.models.gguf_file import read_gguf
    from worker.models.gguf_tokenizer import read_vocabulary, write_generation_config, write_tokenizer

    started_s = time.monotonic()
    report(Progress("convert", 0, 0, f"reading {gguf.name}"))
    file = read_gguf(gguf)
    if int(file.metadata.get("split.count", 1)) > 1:
        raise ModelError(
            f"{gguf.name} is one part of a split GGUF file; join the parts first (llama-gguf-split --merge)"
        )
    vocabulary = read_vocabulary(file)
    context_length = file.get("context_length")
    if context_length is None:
        raise ModelError(f"the GGUF file lacks {file.architecture}.context_length")
    report(Progress("convert", 0, 0, f"building the tokenizer of {gguf.name}"))
    write_tokenizer(file, vocabulary, int(context_length), folder)
    config = _write_model(gguf, file, folder, report)
    config |= {"eos_token_id": vocabulary.end_token_ids(), "bos_token_id": vocabulary.ids.get("bos_token_id")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_generation_config(vocabulary, folder)
    report(Progress("convert", 0, 0, f"converted {gguf.name} in {time.monotonic() - started_s:.0f} s"))


def _write_model(gguf: Path, file: "GGUFFile", folder: Path, report: Report) -> dict[str, Any]:
    """Write the weights and return the configuration that goes with them."""
    from worker.models.gguf_config import ARCHITECTURES, build_config

    message = f"converting {gguf.name}"
    report(Progress("convert", 0, 0, message))
    if file.architecture not in ARCHITECTURES:
        from worker.models.gguf_transformers import write_with_transformers

        return write_with_transformers(gguf, file, folder)
    from worker.models.gguf_weights import write_weights

    config = build_config(file)
    write_weights(file, config, folder, lambda done, total: report(Progress("convert", done, total, message)))
    return config
