"""The gsm8k task: grade-school word problems, answered in XML tags.

GRPO and SFT are on the training split, the evaluation on the first problems of the test split. What
it shares with gsm_symbolic is in word_problems.py, the files in gsm8k_files.py, the rewards in
rewards/gsm8k.py.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from data import Task
from data.gsm8k_files import FORM, read_problems, read_split
from data.word_problems import SETTINGS, Problem, WordProblemOptions, make_task, refuse_scratch
from grpo.config import option
from grpo.errors import UserError

DEFAULTS = SETTINGS


@dataclass
class Options(WordProblemOptions):
    """The gsm8k task's own flags."""

    # fmt: off
    data_dir: str | None = option(None, "folder with train.jsonl and test.jsonl, itself or in "
                                  "gsm8k/; none = the folder in GRPO_DATA, or else a download")
    gsm8k_file: str | None = option(None, f"train on the problems of this JSONL file, {FORM} a "
                                    "line, instead of the training split")
    # fmt: on


def load(options: Options, seed: int, from_scratch: bool) -> Task:
    """The task for these flags. It is the same for every seed: the loop shuffles the problems."""
    if options.gsm8k_file is None:
        training = read_split("train", options.data_dir)
        return make_task("gsm8k", training, read_split("test", options.data_dir), options)
    given = read_problems(options.gsm8k_file)
    held_out = read_split("test", options.data_dir)
    return make_task("gsm8k", new_problems(given, held_out, options.gsm8k_file), held_out, options)


def resolve(options: Options, from_scratch: bool) -> Options:
    refuse_scratch("gsm8k", from_scratch)
    return options


def new_problems(given: list[Problem], held_out: list[Problem], path: str) -> list[Problem]:
    """The problems of a user's file, each once, without those of the test split."""
    tested = {p.question for p in held_out}
    problems = {p.question: p for p in given if p.question not in tested}
    if not problems:
        raise UserError(f"{path}: every problem in it is in the test split")
    if len(problems) < len(given):
        print(
            f"{path}: {len(given) - len(problems)} problems left out, since they are repeated or "
            "in the test split",
            file=sys.stderr,
        )
    return list(problems.values())
