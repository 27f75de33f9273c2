"""The rewards of the maze task, in the three readings of --reward-mode.

| name          | documented | verbatim | v2          |
| ------------- | ---------- | -------- | ----------- |
| correctness   | 2.0        | 2.0      | 0.2 a move  |
| validity      | 0.5        | 0.5      | 1.0         |
| strict_format | 0.5        | 0.5      | -           |
| soft_format   | 0.5        | 0.5      | -           |
| tags          | 2 x 0.125  | as left  | as left     |

documented is what the source says of its rewards, verbatim and v2 what its first and its later
published code compute. Where the saying leaves room, documented means: white space between the
moves does not matter; an empty answer is not valid; the answer ends at a second </think>; the
format begins with <think> at the very start and, for strict, ends with a newline. The source's own
SFT target does not end with one, so that target earns 3.25 of 3.75.

Every function is linear in the length of the text, since a policy may write thousands of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from data import Example, RewardFunction
from data.maze_grid import MOVES, Maze, moves_in, walk
from grpo.errors import UserError

OPEN, CLOSE = "<think>", "</think>"
_MOVE = re.compile("|".join(re.escape(move) for move in MOVES))
# The published patterns, in which the dot stops at a newline; each dot-star is held in one line.
_VERBATIM_STRICT = re.compile(r"^<think>\n.*?\n</think>\n\n.*?\n$")
_VERBATIM_SOFT = re.compile(r"<think>.*?</think>\s*.*?")


@dataclass(frozen=True)
class MazeAnswer:
    """What a maze's rewards and judge compare with.

    path: the move tokens of a shortest path. thinks: whether an answer must follow </think>; in
    the direct format it need not. maze: None where only the path is known.
    """

    path: str
    thinks: bool = True
    maze: Maze | None = None


def answer_text(text: str, thinks: bool = True) -> str:
    """What stands behind the first </think>, up to a second one; "" if it was never closed.

    Without thinking, a text that has neither tag is all answer.
    """
    parts = text.split(CLOSE, 2)
    if len(parts) > 1:
        return parts[1].strip()
    return "" if thinks or OPEN in text else text.strip()


def reward_functions(mode: str, thinks: bool = True) -> dict[str, RewardFunction]:
    """By name, in the order of the table. An answer without thinking has no format to reward."""
    modes = {"documented": _documented, "verbatim": _verbatim, "v2": _v2}
    if mode not in modes:
        raise UserError(f"--reward-mode: '{mode}' is none of {', '.join(modes)}")
    functions = modes[mode]()
    if thinks:
        return functions
    return {name: functions[name] for name in ("correctness", "validity")}


def highest_rewards(mode: str, thinks: bool = True) -> dict[str, float]:
    """What a perfect answer earns of each. {} for verbatim, whose formats exclude one another, and
    for v2, which pays by the length of the path."""
    if mode != "documented":
        return {}
    formats = {"strict_format": 0.5, "soft_format": 0.5, "tags": 0.25} if thinks else {}
    return {"correctness": 2.0, "validity": 0.5, **formats}


# ---------------------------------------------------------------------------------------------
# documented


def _documented() -> dict[str, RewardFunction]:
    return {
        "correctness": lambda text, example: 2.0 * _is_right(text, example),
        "validity": _on_answer(lambda answer: 0.5 * _only_moves(answer)),
        "strict_format": lambda text, example: 0.5 * _is_strict(text),
        "soft_format": lambda text, example: 0.5 * _is_soft(text),
        "tags": _tags,
    }


def _is_right(text: str, example: Example) -> bool:
    """The right path, moves only. A maze with loops may have several shortest paths, all right."""
    gold: MazeAnswer = example.answer
    answer = "".join(answer_text(text, gold.thinks).split())
    if answer == gold.path:
        return True
    if gold.maze is None or len(moves_in(gold.path)) != len(moves_in(answer)):
        return False
    return _only_moves(answer) and walk(gold.maze, answer).solved


def _only_moves(answer: str) -> bool:
    answer = "".join(answer.split())
    return answer != "" and _MOVE.sub("", answer) == ""


def _is_strict(text: str) -> bool:
    """^<think>\\n.*?\\n</think>\\n\\n.*?\\n$ where the dot matches newlines, in one pass."""
    if not text.startswith(f"{OPEN}\n"):
        return False
    close = text.find(f"\n{CLOSE}\n\n", len(OPEN) + 1)
    rest = text[close + len(CLOSE) + 3 :]
    return close >= 0 and rest.endswith("\n")


def _is_soft(text: str) -> bool:
    return text.startswith(OPEN) and text.find(CLOSE, len(OPEN)) >= 0


def _tags(text: str, example: Example) -> float:
    """Also the verbatim and the v2 rule."""
    return 0.125 * (text.count(f"{OPEN}\n") == 1) + 0.125 * (text.count(f"\n{CLOSE}\n") == 1)


# ---------------------------------------------------------------------------------------------
# verbatim and v2


def _verbatim() -> dict[str, RewardFunction]:
    return {
        "correctness": lambda text, example: 2.0 * _is_same(text, example),
        "validity": _on_answer(lambda answer: 0.5 * all(p in MOVES for p in answer.split())),
        "strict_format": lambda text, example: 0.5 * bool(_VERBATIM_STRICT.match(text)),
        "soft_format": lambda text, example: 0.5 * bool(_VERBATIM_SOFT.match(text)),
        "tags": _tags,
    }


def _v2() -> dict[str, RewardFunction]:
    def correctness(text: str, example: Example) -> float:
        return 0.2 * len(moves_in(example.answer.path)) * _is_same(text, example)

    return {
        "correctness": correctness,
        "validity": _on_answer(lambda answer: 1.0 * _only_moves(answer)),
        "tags": _tags,
    }


def _is_same(text: str, example: Example) -> bool:
    """The published comparison: character for character."""
    return answer_text(text, example.answer.thinks) == example.answer.path


def _on_answer(rule: Callable[[str], float]) -> RewardFunction:
    return lambda text, example: rule(answer_text(text, example.answer.thinks))
