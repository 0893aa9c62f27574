"""Files that several processes may want to make at once: a lock, a hash, and folders that appear whole or not at all.

Locks are flock(2) locks, so a killed process leaves none behind.
"""

import fcntl
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_CHUNK_BYTES = 4 * 1024 * 1024
_LOCK_POLL_S = 0.1


@contextmanager
def file_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on `path` (created when missing); `on_wait` is called once if another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as handle:
        waited = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waited:
                    on_wait()
                    waited = True
                time.sleep(_LOCK_POLL_S)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


def sha256_of(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file as lower-case hex; `on_bytes` gets the bytes read so far."""
    digest = hashlib.sha256()
    done = 0
    with open(path, "rb") as handle:
        while chunk := handle.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if on_bytes:
                on_bytes(done)
    return digest.hexdigest()


def remove(path: Path) -> None:
    """Delete a file or a folder; nothing happens when there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def staging_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a new folder `prefix*` in `parent`, first deleting those that killed processes left; delete it at the end.

    The caller holds the lock that goes with `prefix`.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"{prefix}*"):
        remove(left)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield folder
    finally:
        remove(folder)
