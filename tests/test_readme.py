"""The commands of the README and of docs/ are commands: each one's flags exist and go together."""

import re
import shlex
from pathlib import Path

import pytest

from grpo.config import parse

ROOT = Path(__file__).parent.parent
TEXT = "\n".join(
    path.read_text("utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))
)
INDENTED = re.findall(r"^    python train\.py ((?:.*\\\n)*.*)$", TEXT, re.MULTILINE)
INLINE = re.findall(r"`python\s+train\.py\s+([^`]*)`", TEXT)
# A run that would have to exist, the task that exists only in tests/example_task, any task.
NOT_HERE = ("--resume", "--task spell", "--task T ")


def commands() -> list[list[str]]:
    texts = [text.replace("\\\n", " ").split("#")[0] for text in INDENTED + INLINE]
    return [shlex.split(t) for t in texts if not any(word in t for word in NOT_HERE)]


def test_there_are_commands_to_check():
    assert len(commands()) >= 9


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_a_command_of_the_documents_is_accepted(command):
    config, _, flags = parse(command)
    assert config.task in ("maze", "gsm8k", "gsm_symbolic", "alfred", "household") and flags
