"""Reading JSONL files of the user's: what is wrong with them is said by file and line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from grpo.errors import UserError

Record = TypeVar("Record")


def read_jsonl(
    path: str | Path, make: Callable[[dict[str, Any]], Record], form: str
) -> list[Record]:
    """make(object) of each line, in order; blank lines and a byte-order mark are passed over.

    form shows what a line looks like, for the messages. Raises UserError with the file, and with
    the line for text that is not UTF-8, for what is no JSON object, and for a UserError of make's.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    records = []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        if line.strip():
            try:
                records.append(make(_parse(line, form)))
            except UserError as error:
                raise UserError(f"{path}, line {number}: {error}") from None
    if not records:
        raise UserError(f"{path} is empty; it needs {form} on each line")
    return records


def _parse(line: bytes, form: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise UserError("this is not UTF-8 text; save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"this is not JSON ({error})") from None
    if not isinstance(record, dict):
        raise UserError(f"this is no record; a line looks like {form}")
    return record


def text_field(record: dict[str, Any], name: str) -> str:
    """record[name]; UserError if there is no such text, or one that no file could hold."""
    text = record.get(name)
    if not isinstance(text, str):
        raise UserError(f'there is no "{name}" with a text in this record')
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise UserError(f'its "{name}" has half a surrogate pair, which is no character')
    return text
