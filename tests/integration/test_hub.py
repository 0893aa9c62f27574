"""Models of the hub, with the hub's real library against a hub on loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_hub import FakeHub, serving
from tests.support.processes import ROOT

pytest.importorskip("huggingface_hub", reason="the hub's library comes with the worker's dependencies")
pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import json, sys
from common.config import WorkerConfig
from common.errors import TokenloomError
from worker.models.resolve import resolve_model
try:
    found = resolve_model(WorkerConfig(**json.loads(sys.argv[1])), lambda progress: None)
    print(json.dumps([found.id, sorted(file.name for file in found.path.iterdir()), str(found.path)]))
except TokenloomError as error:
    print(json.dumps(str(error)))
"""

WHOLE = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(range(256)) * 4096,
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"a pickle",
    "modeling.py": b"code",
    "onnx/model.safetensors": b"another copy",
    "consolidated.safetensors": b"another copy",
}


def resolve(hub: FakeHub, home: Path, **settings: object):
    """Resolve a hub id in a process of its own: the library reads its settings when it is imported."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TOKENLOOM_", "HF_"))}
    env |= {"PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(settings)], env=env, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_repository_is_fetched_without_pickles_code_and_copies(tmp_path):
    """And served from the hub's cache when the hub is gone."""
    with serving(FakeHub({"owner/model": WHOLE})) as hub:
        name, files, path = resolve(hub, tmp_path, model="owner/model")
        assert (name, files) == ("owner/model", ["config.json", "model.safetensors", "tokenizer.json"])
        assert (Path(path) / "model.safetensors").read_bytes() == WHOLE["model.safetensors"]
        assert {name for name, _ in hub.fetched} == set(files)
    assert resolve(hub, tmp_path, model="owner/model") == [name, files, path]


def test_a_download_that_broke_off_is_finished(tmp_path):
    """By asking for the rest, or again for the whole; never by taking half a file for a whole one."""
    with serving(FakeHub({"owner/model": WHOLE}, cut={"model.safetensors"})) as hub:
        answer = resolve(hub, tmp_path, model="owner/model")
        if isinstance(answer, str):  # the library gave up; the next start goes on
            answer = resolve(hub, tmp_path, model="owner/model")
        assert (Path(answer[2]) / "model.safetensors").read_bytes() == WHOLE["model.safetensors"]
        assert [name for name, _ in hub.fetched].count("model.safetensors") == 2


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("owner/missing", "owner/missing"),
        ("owner/gated", "owner/gated"),
        ("owner/pickled", "--allow-pickle"),
        ("owner/code", "run code of its own"),
        ("owner/empty", "none of the files"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(tmp_path, model, said):
    repositories = {
        "owner/pickled": {"config.json": b"{}", "pytorch_model.bin": b"a pickle"},
        "owner/code": {**WHOLE, "config.json": b'{"auto_map": {"AutoModel": "modeling.Model"}}'},
        "owner/empty": {"README.md": b"nothing here"},
    }
    with serving(FakeHub(repositories)) as hub:
        answer = resolve(hub, tmp_path, model=model)
        assert isinstance(answer, str)
        assert said in answer
        assert len(answer.splitlines()) == 1
        assert not {name for name, _ in hub.fetched} & {"pytorch_model.bin", "modeling.py"}


def test_pickles_are_fetched_when_a_flag_allows_them(tmp_path):
    repositories = {"owner/pickled": {"config.json": b"{}", "pytorch_model.bin": b"a pickle"}}
    with serving(FakeHub(repositories)) as hub:
        _, files, _ = resolve(hub, tmp_path, model="owner/pickled", allow_pickle=True)
        assert files == ["config.json", "pytorch_model.bin"]


def test_a_hub_that_cannot_be_reached_is_a_clear_error(tmp_path):
    hub = FakeHub({}, url="http://127.0.0.1:9")
    answer = resolve(hub, tmp_path, model="owner/model")
    assert "owner/model" in answer
    assert "hub" in answer
