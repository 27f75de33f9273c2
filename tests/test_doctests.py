"""The examples in the docstrings are true."""

import doctest
import importlib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
MODULES = [
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
    for folder in ("grpo", "data", "rewards")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
    if ">>>" in path.read_text("utf-8")
]


def test_there_are_examples():
    assert len(MODULES) > 3


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name):
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 0 and found.failed == 0
