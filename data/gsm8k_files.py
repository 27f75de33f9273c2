"""Where gsm8k's problems come from: a folder of the user's, or a download that is checked.

The download is the data set's original repository on GitHub, at a fixed commit: it has the two
splits as JSONL, which needs nothing but the standard library, while the hub's copy is parquet,
which would need pyarrow. MIT licence, Cobbe et al. 2021 (arXiv 2110.14168).
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.jsonl import read_jsonl, text_field
from data.word_problems import Problem
from grpo.errors import UserError, exit_status
from grpo.flags import FlagParser
from rewards.gsm8k import GOLD_MARK, last_number, normalise

REPOSITORY = "https://github.com/openai/grade-school-math"
COMMIT = "3101c7d5072418e28b9008a6636bde82a006892c"
DOWNLOAD = (
    f"https://raw.githubusercontent.com/openai/grade-school-math/{COMMIT}/grade_school_math/data/"
)
TIMEOUT = 30  # seconds without an answer
FORM = f'{{"question": text, "answer": "steps {GOLD_MARK} number"}}'

_CALCULATOR = re.compile(r"<<[^<>]*>>")  # <<48/2=24>>, a calculator's work in the solution


@dataclass(frozen=True)
class Split:
    """A published file: its name, its problems, its checksum."""

    file: str
    problems: int
    sha256: str


SPLITS = {
    "train": Split(
        "train.jsonl", 7473, "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"
    ),
    "test": Split(
        "test.jsonl", 1319, "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"
    ),
}


def read_split(name: str, data_dir: str | None) -> list[Problem]:
    """The problems of "train" or "test", from data_dir, $GRPO_DATA, or a download that is kept.

    Says in a line if a folder's file is not the published one. Raises UserError if there is no
    such file, naming the ways to get it, and for a download that is not the published file.
    """
    split = SPLITS[name]
    path = given_file(split, data_dir) or downloaded_file(split)
    problems = read_problems(path)
    difference = compare(split, path.read_bytes(), len(problems))
    if difference:
        print(
            f"warning: {path} is not gsm8k's {name} split as it was published ({difference}); "
            "figures do not compare with those of others",
            file=sys.stderr,
        )
    return problems


def read_problems(path: str | Path) -> list[Problem]:
    """The problems of a JSONL file in gsm8k's form; UserError with the line for what is not."""
    return read_jsonl(path, make_problem, FORM)


def make_problem(record: dict[str, Any]) -> Problem:
    """The calculator's marks leave the solution: a model has no calculator to write them for.

    >>> make_problem({"question": "Half of 48?", "answer": "48/2 = <<48/2=24>>24\\n#### 24"})
    Problem(question='Half of 48?', solution='48/2 = 24', gold='24')
    """
    question, answer = text_field(record, "question").strip(), text_field(record, "answer")
    solution, mark, gold = (part.strip() for part in answer.rpartition(GOLD_MARK))
    if not question:
        raise UserError('its "question" is empty')
    if not mark:
        raise UserError(f'its "answer" has no {GOLD_MARK} with the gold answer behind it')
    if last_number(gold) is None or normalise(gold) != normalise(last_number(gold)):
        raise UserError(f"what stands behind {GOLD_MARK} is no number: '{gold:.40}'")
    return Problem(question, _CALCULATOR.sub("", solution), gold)


def given_file(split: Split, data_dir: str | None) -> Path | None:
    """The file in --data-dir or $GRPO_DATA, or in a folder gsm8k there; None if neither is set."""
    folder = data_dir or os.environ.get("GRPO_DATA")
    if not folder:
        return None
    what = f"--data-dir {folder}" if data_dir else f"GRPO_DATA={folder}"
    root = Path(folder).expanduser()
    for path in (root / split.file, root / "gsm8k" / split.file):
        if path.is_file():
            return path
    raise UserError(f"{what}: it has no {split.file}, nor gsm8k/{split.file}; {ways()}")


def ways() -> str:
    return (
        f"give a folder with train.jsonl and test.jsonl from {REPOSITORY} (grade_school_math/data) "
        "as --data-dir or GRPO_DATA, or train on problems that are made up: --task gsm_symbolic"
    )


def downloaded_file(split: Split) -> Path:
    """The kept download, fetched if it is not there yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "grpo-by-hand" / "gsm8k" / split.file
    if not path.is_file():
        content = fetch(DOWNLOAD + split.file)
        difference = compare(split, content, len(content.splitlines()))
        if difference:
            raise UserError(
                f"{DOWNLOAD}{split.file}: the download is not the published file ({difference}) "
                f"and is not kept; {ways()}"
            )
        keep(content, path)
        print(f"gsm8k: downloaded {path}", file=sys.stderr)
    return path


def keep(content: bytes, path: Path) -> None:
    """Write a file as a whole or not at all: another run may look for it at the same time."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise UserError(
            f"{path}: the download cannot be written there ({error.strerror}); name another folder "
            "in XDG_CACHE_HOME"
        ) from None
    finally:
        with suppress(OSError):
            partial.unlink()


def fetch(url: str) -> bytes:
    """The bytes at a web address; UserError, with what to do instead, if they cannot be had."""
    import http.client  # here, since they take longer to load than all that --help needs
    import urllib.request

    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        reason = "HF_HUB_OFFLINE is set"
    else:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
                return answer.read()
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error  # what urllib wrapped
    raise UserError(f"gsm8k is not on this machine and cannot be downloaded ({reason}); {ways()}")


def compare(split: Split, content: bytes, problems: int) -> str:
    """How a file differs from the published one, by count, then by checksum; "" if it does not."""
    if problems != split.problems:
        return f"{problems:,} problems, not {split.problems:,}"
    found = hashlib.sha256(content).hexdigest()
    if found != split.sha256:
        return f"sha256 {found[:12]}…, not {split.sha256[:12]}…"
    return ""


def main(argv: Sequence[str]) -> int:
    FlagParser(
        prog="python -m data.gsm8k_files",
        description="Download both splits of gsm8k from GitHub, unless they are there.",
    ).parse_args(argv)
    for published in SPLITS.values():
        print(f"{downloaded_file(published)}: {published.problems:,} problems")
    return 0


if __name__ == "__main__":  # make data TASK=gsm8k
    sys.exit(exit_status(main, sys.argv[1:], "stopped; what is not whole is fetched again"))
