"""What a task is. One file in this folder a task; `load_task` finds it by its name.

No torch in this folder: a task is text and plain Python.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo.errors import UserError

RewardFunction = Callable[[str, "Example"], float | None]


@dataclass(frozen=True)
class Example:
    """One problem.

    messages: the prompt as a chat, [{"role": "user", "content": ...}, ...].
    target: the completion that supervised fine-tuning imitates, without a stop token; "" if none.
    answer: whatever the task's rewards compare with.
    level: the row of the evaluation table that this example belongs to; "" for no such split. One
        of "seen/heat" belongs to the row "seen" too.
    """

    messages: list[dict[str, str]]
    target: str
    answer: Any
    level: str = ""


@dataclass(frozen=True)
class Task:
    """A task: examples, rewards and a judge.

    train, sft, evaluation: the GRPO prompts, the cold start's examples, the held-out examples.
    reward_functions: by name, (completion_text, example) -> a finite number, or None where the
        reward does not apply. completion_text never holds the stop token. A reward that draws from
        a random generator of its own makes a resumed run differ from an undisturbed one.
    reward_weights: by name; a name that is absent weighs 1.
    highest_rewards: the most that each reward function can give, by name, if one completion can
        have it all; what --filter full-reward compares with. {} if that is not so, or not known.
    accuracy: the reward function, from 0 to 1, that --filter accuracy averages; None: is_correct.
    is_correct: the judge of the evaluation, whatever the rewards say.
    is_correct_lenient: a second judge that forgives the form, reported beside the first; None for
        none.
    measures: what the evaluation reports beside the accuracy, as means over all and by level: by
        name, (text, example) -> number.
    levels: the rows of the evaluation table in their order, those that others count in too; rows
        that it does not name follow, by the numbers in their names.
    failure_reason: why an incorrect completion failed, as a few words that a table can count.
    alarms: one line for each sign of reward hacking in a batch of (text, example) pairs.
    reply: what the world answers to a completion, None where the episode is over: (text, example)
        -> text. With --turns above 1 the policy then answers again; example.messages holds the
        turns before, for the rewards and the judge too. None for a task of one turn.
    new_tokens: what --add-tokens adds to a pretrained tokenizer.
    draw: writes a picture of evaluated answers, (path, answers); None for no picture. An answer
        has .example, .text, .correct and .reason.
    """

    name: str
    train: Sequence[Example]
    evaluation: Sequence[Example]
    reward_functions: Mapping[str, RewardFunction]
    is_correct: Callable[[str, Example], bool]
    sft: Sequence[Example] = ()
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    highest_rewards: Mapping[str, float] = field(default_factory=dict)
    accuracy: str | None = None
    failure_reason: Callable[[str, Example], str] = lambda text, example: "wrong"
    alarms: Callable[[Sequence[tuple[str, Example]]], list[str]] = lambda batch: []
    new_tokens: Sequence[str] = ()
    draw: Callable[[Path, Sequence[Any]], None] | None = None
    is_correct_lenient: Callable[[str, Example], bool] | None = None
    measures: Mapping[str, Callable[[str, Example], float]] = field(default_factory=dict)
    levels: Sequence[str] = ()
    reply: Callable[[str, Example], str | None] | None = None


def table_rows(level: str) -> list[str]:
    """The rows of the evaluation table that an example of this level counts in.

    >>> table_rows("seen/heat"), table_rows("easy"), table_rows("")
    (['seen', 'seen/heat'], ['easy'], [])
    """
    parts = level.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts) + 1)] if level else []


def task_names() -> list[str]:
    """Every module in this folder that has a `load` function is a task."""
    names = [m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)])]
    return sorted(n for n in names if hasattr(importlib.import_module(f"data.{n}"), "load"))


def task_module(name: str) -> ModuleType:
    """The module data/<name>.py; raises UserError with the nearest name if there is none.

    A task module has
        Options: a dataclass whose fields are the task's own flags (see grpo.config.option),
        load(options, seed, from_scratch) -> Task; from_scratch: the model knows nothing but the
            task's own tokens,
    and may have
        DEFAULTS: the training settings that suit the task, {setting: value} under the name of each
            preset, for a pretrained model there, and under "scratch", for a model made from
            scratch on any machine,
        resolve(options, from_scratch) -> options, with whatever the flags leave open decided,
        scratch_tokens(options) -> list[str], the vocabulary of a model made from scratch.
    """
    names = task_names()
    if name not in names:
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(names)}"
        raise UserError(f"--task: no task is called '{name}'; {hint}")
    return importlib.import_module(f"data.{name}")
