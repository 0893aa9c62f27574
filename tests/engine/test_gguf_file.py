"""Reading GGUF files, and converting them once, whole, by one process."""

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from transformers import Qwen2Config

from common.errors import ModelError
from tests.engine.test_gguf_weights import SIZES, ignore, tiny
from tests.support.tiny_gguf import write_tiny_gguf
from worker.models import gguf_convert
from worker.models.gguf_convert import convert
from worker.models.gguf_file import read_gguf
from worker.models.progress import Progress

TIMEOUT_S = 120


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, "qwen2", tiny(Qwen2Config(**SIZES)))
    return path


def test_the_reader_agrees_with_the_gguf_library(tiny_gguf: Path):
    """Every value and every tensor is what the library's own, slower reader gives."""
    ours, theirs = read_gguf(tiny_gguf), gguf.GGUFReader(tiny_gguf)
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    found = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in ours.metadata.items()}
    assert found == expected
    assert [tensor.name for tensor in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        assert tuple(reversed(tensor.shape.tolist())) == ours.tensors[tensor.name].shape
        assert tensor.tensor_type == ours.tensors[tensor.name].type
        assert tensor.data.tobytes() == ours.tensors[tensor.name].raw.tobytes()


@pytest.mark.parametrize("keep", [0, 3, 20, 200, 5000, -1])
def test_a_file_cut_off_anywhere_is_refused(tiny_gguf: Path, keep: int):
    """An interrupted copy is a clear error, never a crash or a model with noise in it."""
    whole = tiny_gguf.read_bytes()
    tiny_gguf.write_bytes(whole[:keep] if keep >= 0 else whole[: -len(whole) // 4])
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        read_gguf(tiny_gguf)


def test_random_damage_never_escapes_as_another_error(tiny_gguf: Path):
    """Any byte of the header may be wrong: the reader answers with values or with a ModelError."""
    whole = tiny_gguf.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for position in rng.integers(0, 12000, size=3):
            damaged[position] = rng.integers(256)
        tiny_gguf.write_bytes(damaged)
        try:
            read_gguf(tiny_gguf)
        except ModelError as error:
            assert "tiny.gguf" in str(error)  # noqa: PT017 - most damage is refused, some cannot be seen


def test_another_file_is_refused(tmp_path: Path):
    """A file that merely ends in .gguf."""
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="does not start with GGUF"):
        convert(path, tmp_path / "cache", ignore)


def test_the_second_start_converts_nothing(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The folder is used as it is; nothing is even reported."""
    first = convert(tiny_gguf, tmp_path / "cache", ignore)
    seen: list[Progress] = []
    monkeypatch.setattr(gguf_convert, "write_folder", lambda *args: pytest.fail("converted again"))
    assert convert(tiny_gguf, tmp_path / "cache", seen.append) == first
    assert seen == []


def test_a_changed_file_is_converted_anew(tiny_gguf: Path, tmp_path: Path):
    """Overwriting the .gguf with another model must not serve the old one."""
    first = convert(tiny_gguf, tmp_path / "cache", ignore)
    write_tiny_gguf(tiny_gguf, "qwen2", tiny(Qwen2Config(**SIZES | {"num_hidden_layers": 2})))
    assert convert(tiny_gguf, tmp_path / "cache", ignore) != first


def test_a_conversion_that_fails_half_way_leaves_no_folder(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A full disk in the middle is a ModelError, and the next start converts from scratch."""

    def fill_disk(gguf_path: Path, folder: Path, report: object) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(gguf_convert, "write_folder", fill_disk)
        with pytest.raises(ModelError, match="No space left"):
            convert(tiny_gguf, tmp_path / "cache", ignore)
    assert (convert(tiny_gguf, tmp_path / "cache", ignore) / "model.safetensors").exists()


@pytest.mark.parametrize("largest_bytes", [1000, 30_000])
def test_a_full_disk_is_a_clear_error(tiny_gguf: Path, tmp_path: Path, largest_bytes: int):
    """When tokenizer.json or the weights cannot be written (here: a limit on file size), the error says so."""
    code = (
        "import resource, sys; from pathlib import Path; from worker.models.gguf_convert import convert\n"
        "from common.errors import ModelError\n"
        "import worker.models.gguf_weights  # before the limit: imports may write compiled files\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), -1))\n"
        "try:\n    convert(Path(sys.argv[1]), Path(sys.argv[2]), lambda p: None)\n"
        "except ModelError as error:\n    print(error)"
    )
    command = [sys.executable, "-c", code, str(tiny_gguf), str(tmp_path / "cache"), str(largest_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert "File too large" in done.stdout
    assert [p for p in (tmp_path / "cache" / "models").iterdir() if p.is_dir()] == []


def test_what_a_killed_conversion_left_is_cleared_away(tiny_gguf: Path, tmp_path: Path):
    """Gigabytes of a half-made folder do not stay for ever."""
    folder = gguf_convert.converted_folder(tiny_gguf, tmp_path / "cache")
    left = folder.parent / f".{folder.name}.staging-dead"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(bytes(1000))
    assert convert(tiny_gguf, tmp_path / "cache", ignore) == folder
    assert not left.exists()


def test_two_processes_convert_once(tiny_gguf: Path, tmp_path: Path):
    """Two workers started together on a fresh machine: one converts, the other waits and uses the same folder."""
    code = (
        "import sys; from pathlib import Path; from worker.models.gguf_convert import convert\n"
        "said = []\n"
        "path = convert(Path(sys.argv[1]), Path(sys.argv[2]), lambda p: said.append(p.message))\n"
        "print(path, sum(m.startswith('converted') for m in said))"
    )
    command = [sys.executable, "-c", code, str(tiny_gguf), str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert outputs[0][0] == outputs[1][0]
    assert sorted(output[1] for output in outputs) == ["0", "1"]
