"""The catalogue: what it names, and that a malformed one is refused."""

from pathlib import Path

import pytest

from common.config import WorkerConfig
from common.errors import ModelError
from worker.models.catalogue import HubSource, WheelSource, load_catalogue

ENTRY = """
[[model]]
name = "a"
aliases = ["b"]
file = "a.gguf"
size_bytes = 3
sha256 = "{sha}"
licence = "MIT"
sources = [{{ kind = "{kind}", repo = "o/n", file = "a.gguf", parts = [{{ requirement = "{req}", member = "m" }}] }}]
"""
GOOD = {"sha": "ab" * 32, "kind": "wheels", "req": "p==1"}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "catalogue.toml"
    path.write_text(text)
    return path


def test_the_default_model_of_the_configuration_is_in_the_catalogue():
    """A start without --model must find something to serve."""
    entry = load_catalogue().get(WorkerConfig().model)
    assert entry.size_bytes == 491_400_064
    assert entry.licence == "Apache-2.0"
    assert [type(source) for source in entry.sources] == [WheelSource, HubSource]


def test_every_entry_is_complete_and_pinned():
    """Each entry says its licence, size and hash; parts are pinned, distinct and in the order of their members."""
    for entry in load_catalogue().entries:
        assert entry.licence
        assert entry.size_bytes > 0
        for source in entry.sources:
            if isinstance(source, WheelSource):
                requirements = [part.requirement for part in source.parts]
                members = [part.member.rsplit("/", 1)[-1] for part in source.parts]
                assert len(set(requirements)) == len(requirements)
                assert members == sorted(members)


def test_names_and_aliases_are_found_without_regard_to_case():
    """`find` gives the entry or None; `get` lists what there is."""
    catalogue = load_catalogue()
    assert catalogue.find("Qwen2.5-Coder") is catalogue.find("qwen2.5-coder-0.5b-instruct")
    assert catalogue.find("nothing-like-it") is None
    with pytest.raises(ModelError, match="gemma-3-270m"):
        catalogue.get("nothing-like-it")


def test_a_well_formed_catalogue_is_read(tmp_path: Path):
    """The text that the bad cases below are made from is itself good."""
    assert load_catalogue(write(tmp_path, ENTRY.format(**GOOD))).get("b").name == "a"


@pytest.mark.parametrize(
    "change",
    [{"sha": "ab"}, {"sha": "XY" * 32}, {"kind": "ftp"}, {"req": "unpinned"}, {"req": 'p==1"'}],
    ids=lambda change: "-".join(change),
)
def test_a_malformed_entry_is_refused(tmp_path: Path, change: dict[str, str]):
    """A hash that is no SHA-256, an unknown source, an unpinned part or broken TOML is a ModelError, not a surprise."""
    with pytest.raises(ModelError, match="catalogue"):
        load_catalogue(write(tmp_path, ENTRY.format(**GOOD | change)))


def test_a_name_used_twice_is_refused(tmp_path: Path):
    """An alias can never hide another model."""
    text = ENTRY.format(**GOOD)
    with pytest.raises(ModelError, match="twice"):
        load_catalogue(write(tmp_path, text + text.replace('name = "a"', 'name = "B"')))


def test_a_file_name_with_a_folder_is_refused(tmp_path: Path):
    """A catalogue cannot write outside the downloads folder."""
    text = ENTRY.format(**GOOD).replace('file = "a.gguf"\nsize', 'file = "../a.gguf"\nsize')
    with pytest.raises(ModelError, match="plain name"):
        load_catalogue(write(tmp_path, text))
