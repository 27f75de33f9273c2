"""SFT examples in a file: --sft-data reads it, --stage collect and data/teacher.py write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data import Example
from data.jsonl import read_jsonl, text_field
from grpo.errors import UserError

FORM = '{"prompt": text or [{"role": "user", "content": text}, ...], "completion": text}'
ROLES = ("system", "user", "assistant")


def read_sft_file(path: str | Path) -> list[Example]:
    """The examples of a JSONL file, in its order; other fields of a line are passed over.

    They have a prompt and a target, and no answer to compare with: they are for SFT alone. Raises
    UserError with the file and the line for the first one that is no such example.
    """
    return read_jsonl(path, make_example, FORM)


def make_example(record: dict[str, Any]) -> Example:
    """A prompt that is a text is one turn of the user's.

    >>> make_example({"prompt": "2 + 2?", "completion": "4"}).messages
    [{'role': 'user', 'content': '2 + 2?'}]
    """
    target = text_field(record, "completion")
    if not target.strip():
        raise UserError('its "completion" is empty')
    if isinstance(record.get("prompt"), list):
        return Example(chat(record["prompt"]), target, answer=None)
    prompt = text_field(record, "prompt")
    if not prompt.strip():
        raise UserError('its "prompt" is empty')
    return Example([{"role": "user", "content": prompt}], target, answer=None)


def chat(turns: list[Any]) -> list[dict[str, str]]:
    """The turns of a prompt, checked."""
    messages = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or turn.get("role") not in ROLES:
            raise UserError(f'turn {number} of its "prompt" has no "role" of {", ".join(ROLES)}')
        try:
            messages.append({"role": turn["role"], "content": text_field(turn, "content")})
        except UserError as error:
            raise UserError(f'turn {number} of its "prompt": {error}') from None
    if not messages:
        raise UserError('its "prompt" has no turns')
    if messages[-1]["role"] == "assistant":
        raise UserError(
            'its "prompt" ends with a turn of the assistant; what is to be learned is "completion"'
        )
    return messages
