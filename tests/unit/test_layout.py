"""Who may import whom, and what no file may name."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("common", "web", "worker", "cli")

TORCH_HALF = {
    "worker.activation",
    "worker.assemble",
    "worker.attention",
    "worker.attention_step",
    "worker.filters",
    "worker.linear",
    "worker.logits",
    "worker.logprobs",
    "worker.memory",
    "worker.model_loader",
    "worker.models.gguf_weights",
    "worker.probe",
    "worker.quantization",
    "worker.runner",
    "worker.sampler",
}
"""The worker's modules that may import torch; every other one must work without."""


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Yield the full name of every module that a file imports, wherever in the file it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def importers(package: str, *folders: str) -> set[str]:
    return {
        module_name(path)
        for path in sources(*folders)
        if any(name == package or name.startswith(package + ".") for name in imports(path))
    }


def in_torch_half(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in TORCH_HALF)


@pytest.mark.parametrize(
    ("side", "forbidden"),
    [
        ("web", ("torch", "transformers", "worker", "cli")),
        ("worker", ("flask", "gunicorn", "gevent", "web", "cli")),
        ("common", ("torch", "transformers", "flask", "zmq", "web", "worker", "cli", "numpy")),
        ("cli", ("torch", "transformers", "flask", "gevent", "zmq")),
    ],
)
def test_each_side_keeps_to_its_own(side, forbidden):
    """web -> common <- worker: neither knows the other, and the command line only starts them."""
    for package in forbidden:
        assert importers(package, side) == set(), f"{side} imports {package}"


def test_common_needs_only_the_standard_library_and_msgpack():
    """What both sides share must install anywhere."""
    allowed = set(sys.stdlib_module_names) | {"msgpack", "common"}
    for path in sources("common"):
        assert {name.partition(".")[0] for name in imports(path)} <= allowed, path


def test_one_file_a_side_knows_zmq():
    """Sockets have one owner on each side."""
    assert importers("zmq", "web") <= {"web.link.socket"}
    assert importers("zmq", "worker") <= {"worker.channel"}
    assert importers("zmq", "web", "worker") == {"web.link.socket", "worker.channel"}


def test_flask_stays_at_the_edge():
    """Only the application, its routes and its error handlers know Flask."""
    for module in importers("flask", "web"):
        assert module in {"web.app", "web.errors"} or module.startswith("web.routes"), module


def test_nothing_is_pickled():
    """Pickle runs what it reads; nothing here may read it."""
    for package in ("pickle", "cloudpickle", "dill", "shelve", "marshal"):
        assert importers(package, *SIDES) == set()


def test_everything_but_the_models_half_imports_without_torch():
    """In an environment without torch, where importing it fails, the web tier and the scheduler still import.

    One fresh interpreter imports all of them, and says which one failed.
    """
    modules = [name for name in map(module_name, sources(*SIDES)) if not in_torch_half(name)]
    modules = [name for name in modules if name not in {"cli.__main__"}]
    program = (
        "import importlib, sys\n"
        "sys.modules['torch'] = None\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ImportError as error:\n"
        "        sys.exit(f'{name}: {error}')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *modules], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_the_torch_half_is_what_it_says():
    """A module that stops needing torch, or goes, leaves the list."""
    missing = {name for name in TORCH_HALF if not any(module_name(path) == name for path in sources("worker"))}
    assert missing == set()


def tracked_files() -> list[Path]:
    """Return the project's own files: what git tracks, or, outside a git checkout, what is in its folders."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file() and not any(p.startswith(".") for p in path.parts)]


def test_no_file_names_a_package_registry():
    """Packages come through the user's own pip, apt and npm configuration, by name; no host is written down."""
    hosts = ("pypi" + r"\.org", "pythonhosted" + r"\.org", "npmjs" + r"\.(org|com)", "deb" + r"\.debian\.org")
    hosts += ("download" + r"\.pytorch\.org",)
    pattern = re.compile("|".join(hosts))
    for path in tracked_files():
        text = path.read_text(encoding="utf-8", errors="ignore")
        found = pattern.search(text)
        assert found is None, f"{path.relative_to(ROOT)} names {found.group()}"


def test_files_and_functions_stay_small():
    """A file past 400 lines or a function past 60 holds more than one idea."""
    for path in sources(*SIDES):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 420, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= 65, f"{path.relative_to(ROOT)}: {node.name} has {length} lines"
