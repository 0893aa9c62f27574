"""What several of the unit tests start from."""

from pathlib import Path

import pytest

from tests.support import tiny_tokenizer


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the text side of a model: its tokenizer and chat template."""
    return tiny_tokenizer.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_api(text_folder: Path):
    """A function that makes a tests.support.api.Api whose worker is a FakeLink with these settings."""
    from tests.support.api import Api  # needs Flask, which not every unit test does

    return lambda **link: Api(link.pop("folder", text_folder), **link)
