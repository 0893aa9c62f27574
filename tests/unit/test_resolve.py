"""From --model to a folder: what is taken, under which name, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.config import WorkerConfig
from common.errors import ConfigError, ModelError
from worker.models import hub, resolve
from worker.models.catalogue import load_catalogue
from worker.models.gguf_convert import converted_folder
from worker.models.progress import Progress
from worker.models.resolve import ResolvedModel, resolve_model


def resolve_name(tmp_path: Path, model: str, **settings: Any) -> ResolvedModel:
    def report(progress: Progress) -> None:
        pass

    return resolve_model(WorkerConfig(model=model, cache_dir=str(tmp_path / "cache"), **settings), report)


def model_folder(tmp_path: Path, *files: str, **config: Any) -> Path:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    for name in files:
        (folder / name).write_bytes(b"")
    return folder


def test_a_folder_of_safetensors_is_taken_as_it_is(tmp_path: Path):
    """The client's name is the folder's, also when it is given with a slash or as '.'."""
    folder = model_folder(tmp_path, "model.safetensors")
    assert resolve_name(tmp_path, f"{folder}/") == ResolvedModel("my-model", folder)


def test_the_served_name_wins(tmp_path: Path):
    """--served-model-name is what clients use."""
    folder = model_folder(tmp_path, "model.safetensors")
    assert resolve_name(tmp_path, str(folder), served_model_name="mine").id == "mine"


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_pickled_weights_need_the_flag(tmp_path: Path, weights: str):
    """Loading a pickle can run code: refused by name of the flag, taken with it."""
    folder = model_folder(tmp_path, weights)
    with pytest.raises(ModelError, match="--allow-pickle"):
        resolve_name(tmp_path, str(folder))
    assert resolve_name(tmp_path, str(folder), allow_pickle=True).path == folder


def test_safetensors_beside_pickles_are_fine(tmp_path: Path):
    """Many repositories have both; the safe one is loaded."""
    assert resolve_name(tmp_path, str(model_folder(tmp_path, "pytorch_model.bin", "model.safetensors")))


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_code_of_the_model_needs_the_flag(tmp_path: Path, where: str):
    """auto_map in either file means Python of the model's author would run."""
    folder = model_folder(tmp_path, "model.safetensors")
    (folder / where).write_text(json.dumps({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}))
    with pytest.raises(ModelError, match="--trust-remote-code"):
        resolve_name(tmp_path, str(folder))
    assert resolve_name(tmp_path, str(folder), trust_remote_code=True).path == folder


def test_a_folder_with_only_gguf_files_names_the_file_to_give(tmp_path: Path):
    """The message is the command to type."""
    folder = tmp_path / "ggufs"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"name the file itself: .*a\.gguf"):
        resolve_name(tmp_path, str(folder))


@pytest.mark.parametrize(
    ("files", "message"),
    [((), "no weights"), (("config.json",), "cannot be read")],
    ids=["no weights", "broken config"],
)
def test_an_incomplete_folder_says_what_is_missing(tmp_path: Path, files: tuple[str, ...], message: str):
    """A folder without weights, or with an empty config.json."""
    with pytest.raises(ModelError, match=message):
        resolve_name(tmp_path, str(model_folder(tmp_path, *files)))


def test_a_folder_without_config_is_no_model(tmp_path: Path):
    """Any other folder."""
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_name(tmp_path, str(tmp_path))


def test_another_file_is_refused(tmp_path: Path):
    """Only .gguf files are models by themselves."""
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"not a \.gguf"):
        resolve_name(tmp_path, str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    "name",
    [
        "no-such-model",
        "./missing/folder",
        "/missing/folder",
        "../a",
        "~/x",
        "a/b/c",
        "a/",
        "a/b.gguf",
        "a b/c",
        "a/b:c",
    ],
)
def test_a_name_that_is_nothing_is_refused_before_the_hub_is_asked(tmp_path: Path, name: str):
    """A mistyped path or catalogue name does not become a request to the network."""
    with pytest.raises(ConfigError, match=r"not in the catalogue \(.*gemma-3-270m.*`tokenloom models`") as caught:
        resolve_name(tmp_path, name)
    assert caught.value.key == "model"


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "x" * 5000])
def test_a_name_that_no_path_can_have_is_refused(tmp_path: Path, name: str):
    """The system's refusal to look becomes an error that names the setting."""
    with pytest.raises(ConfigError) as caught:
        resolve_name(tmp_path, name)
    assert caught.value.key == "model"


def test_a_catalogue_model_that_was_converted_needs_no_file_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Later starts touch neither the network nor the downloaded file, which may be deleted."""
    entry = load_catalogue().get("gemma-3-270m")
    folder = converted_folder(Path(entry.file), tmp_path / "cache", entry.sha256)
    folder.mkdir(parents=True)
    monkeypatch.setattr(resolve, "pull_entry", lambda *args: pytest.fail("fetched again"))
    assert resolve_name(tmp_path, "Gemma-3-270M") == ResolvedModel("gemma-3-270m", folder)


def test_a_catalogue_model_is_fetched_then_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The folder's name comes from the hash, so any cache with the right bytes serves."""
    entry = load_catalogue().get("qwen2.5-coder")
    monkeypatch.setattr(resolve, "pull_entry", lambda entry, cache_dir, report: cache_dir / "downloads" / entry.file)
    monkeypatch.setattr(resolve, "convert", lambda gguf, cache, report, sha256: converted_folder(gguf, cache, sha256))
    found = resolve_name(tmp_path, "qwen2.5-coder")
    assert found.id == entry.name
    assert found.path == converted_folder(Path(entry.file), tmp_path / "cache", entry.sha256)


@pytest.mark.parametrize(
    ("settings", "extra"),
    [
        ({}, set()),
        ({"allow_pickle": True}, {"*.bin", "*.pt", "*.pth", "*.ckpt"}),
        ({"trust_remote_code": True}, {"*.py"}),
    ],
    ids=["plain", "pickle", "code"],
)
def test_a_hub_id_fetches_no_pickle_and_no_code_unless_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, bool], extra: set[str]
):
    """What is not allowed to run does not even reach the disk."""
    asked: list[tuple[str, set[str]]] = []
    folder = model_folder(tmp_path, "model.safetensors")

    def fetch_snapshot(repo: str, allow_patterns: list[str]) -> Path:
        asked.append((repo, set(allow_patterns)))
        return folder

    monkeypatch.setattr(hub, "fetch_snapshot", fetch_snapshot)
    assert resolve_name(tmp_path, "owner/name", **settings) == ResolvedModel("owner/name", folder)
    ((repo, patterns),) = asked
    assert repo == "owner/name"
    risky = {"*.bin", "*.pt", "*.pth", "*.ckpt", "*.py"}
    assert patterns & risky == extra
    assert {"*.safetensors", "*.json", "*.jinja"} <= patterns


def test_a_hub_snapshot_is_checked_like_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A repository that wants its own code is refused although its config was fetched."""
    folder = model_folder(tmp_path, "model.safetensors", auto_map={"AutoConfig": "x.Y"})
    monkeypatch.setattr(hub, "fetch_snapshot", lambda repo, allow_patterns: folder)
    with pytest.raises(ModelError, match="--trust-remote-code"):
        resolve_name(tmp_path, "owner/name")


def test_the_hub_out_of_reach_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Offline, a hub id that is not in the hub's cache says so."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="the hub's library is not installed")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelError, match="owner/name"):
        resolve_name(tmp_path, "owner/name")
