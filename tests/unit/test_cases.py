"""tests/CASES.md is true: the tests it names exist."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
NAMED = re.findall(r"`((?:unit|engine|integration|clients)/\w+\.py)(?:::(\w+))?`", (TESTS / "CASES.md").read_text())


def test_cases_are_named():
    """The list is not empty, nor is it in a form that this test cannot read."""
    assert len(NAMED) > 40


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)))
def test_each_named_test_exists(file, name):
    """A renamed test takes its line in the list with it."""
    path = TESTS / file
    assert path.is_file(), file
    assert not name or f"def {name}(" in path.read_text(encoding="utf-8"), name
