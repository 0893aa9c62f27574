"""Virtual environments for client programs, one for each, made once and kept outside any checkout.

A client brings libraries of its own, and must be tried as its users install it, not next to the server's.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

from common.config import default_cache_dir
from worker.models.files import file_lock, remove

INSTALL_TIMEOUT_S = 900


def client_python(name: str, requirements: list[str]) -> Path:
    """Return the interpreter of an environment with these requirements, installing it with pip when there is none."""
    wanted = "\n".join([sys.version, *requirements])
    folder = Path(default_cache_dir()) / "test-clients" / f"{name}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    python, whole = folder / "bin" / "python", folder / "whole"
    with file_lock(folder.with_suffix(".lock"), on_wait=lambda: None):
        if not whole.exists():
            remove(folder)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=INSTALL_TIMEOUT_S)
            install = [str(python), "-m", "pip", "install", "--quiet", *requirements]
            subprocess.run(install, check=True, timeout=INSTALL_TIMEOUT_S)
            whole.touch()
    return python
