"""The answers of an evaluation on the disk: evaluations/<name>.jsonl, a row an example.

While the evaluation goes on they are in <name>.jsonl.partial, a line of settings and then the rows
so far, so that one that was stopped or killed goes on where it was. Rows are taken over only under
the same settings, the model's digest among them, and only for the same examples in the same order.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from data import Example
from grpo.distributed import from_first, is_first
from grpo.evaluate import Answer


def row_of(index: int, answer: Answer) -> dict[str, Any]:
    """A row of the file. The lenient judge's keys are there only if the task has one."""
    row = {
        **_question(index, answer.example),
        "completion": answer.text,
        "correct": answer.correct,
        "reason": answer.reason,
        "tokens": answer.tokens,
        "samples_correct": answer.samples_correct,
    }
    if answer.measures:
        row["measures"] = answer.measures
    if answer.turns:
        row["turns"] = answer.turns
    if answer.correct_lenient is not None:
        row["correct_lenient"] = answer.correct_lenient
        row["samples_correct_lenient"] = answer.samples_correct_lenient
    return row


def answer_of(row: Mapping[str, Any], example: Example) -> Answer:
    """The Answer that a row of the file was made of."""
    return Answer(
        example,
        text=row["completion"],
        correct=row["correct"],
        reason=row["reason"],
        tokens=row["tokens"],
        samples_correct=row["samples_correct"],
        correct_lenient=row.get("correct_lenient"),
        samples_correct_lenient=row.get("samples_correct_lenient", 0),
        turns=row.get("turns", []),
        measures=row.get("measures", {}),
    )


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(_line(row_of(i, answer)) for i, answer in enumerate(answers))


# ---- while the evaluation goes on ---------------------------------------------------------------


class UnfinishedAnswers:
    """The partial file at `path`, which the first rank reads and writes for all.

    settings(): what the answers depend on besides the examples, called on the first rank alone.
    done: the answers to the first examples that are taken over.
    """

    def __init__(
        self, path: Path, examples: Sequence[Example], settings: Callable[[], Mapping[str, Any]]
    ):
        self.path = path
        rows = from_first(lambda: take_over(path, settings(), examples))
        self.done = [answer_of(row, e) for row, e in zip(rows, examples, strict=False)]
        self._known = len(rows)

    def add(self, answers: Sequence[Answer]) -> None:
        """The answers to the next examples; they are on the disk when this returns."""
        if is_first():
            with open(self.path, "a", encoding="utf-8") as file:
                file.writelines(_line(row_of(i, a)) for i, a in enumerate(answers, self._known))
        self._known += len(answers)

    def delete(self) -> None:
        if is_first():
            self.path.unlink()


def take_over(
    path: Path, settings: Mapping[str, Any], examples: Sequence[Example]
) -> list[dict[str, Any]]:
    """The rows of a partial file that hold under these settings, those of the first examples.

    The file is left with the settings and these rows and nothing else, ready for more.
    """
    path.parent.mkdir(exist_ok=True)
    header = _line(settings).encode()
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    rows: list[dict[str, Any]] = []
    if lines[:1] == [header]:
        for line, (i, example) in zip(lines[1:], enumerate(examples), strict=False):
            row = _whole_row(line)
            if row is None or not _question(i, example).items() <= row.items():
                break
            rows.append(row)
    if rows:  # cut, not written anew: a kill at this moment loses nothing
        os.truncate(path, sum(len(line) for line in lines[: 1 + len(rows)]))
    else:
        path.write_bytes(header)
    return rows


# ---- which model it was -------------------------------------------------------------------------


def files_digest(folder: Path) -> str:
    """Of a saved model, its sha256 over all weight files."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def weights_digest(model: torch.nn.Module) -> str:
    """Of a model in memory, its sha256 over all weights."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(name.encode())
        digest.update(weight.detach().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _line(values: Mapping[str, Any]) -> str:
    # Half a surrogate pair in a text is escaped by json and so survives any encoding.
    return json.dumps(values) + "\n"


def _question(index: int, example: Example) -> dict[str, Any]:
    """Which example a row is about; with its gold answer, if that is something JSON has."""
    known = {"index": index, "prompt": example.messages, "level": example.level}
    try:
        return json.loads(json.dumps({**known, "answer": example.answer}))
    except (TypeError, ValueError):
        return known


def _whole_row(line: bytes) -> dict[str, Any] | None:
    """None for a line that a kill has torn, or that is no row."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if line.endswith(b"\n") and isinstance(row, dict) and "completion" in row else None
