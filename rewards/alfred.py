"""The rewards of ALFRED's plans: by the plan written down, in two readings, or by what it brings.

| name      | pays  |                                                                        |
| --------- | ----- | ---------------------------------------------------------------------- |
| structure | 0.125 | the answer has its four keys                                           |
| valid     | 0.125 | times the share of steps with an integer id and a text as name         |
| match     | 0.25  | times the share of steps whose id and name are one of the 225 actions  |
| accuracy  | 1.0   | times n(n+1) / k(k+1): of k gold actions the first n are there         |

After Reinforced Reasoning for Embodied Planning (arXiv 2505.22050). documented is what the source
says, verbatim what its published code computes. Where the saying leaves room, documented means: the
answer is one JSON object, alone or as a fenced block, with nothing around it; a gold action needs
its name and its id, but for the two of the data that have none; true is no integer; a broken step
spoils itself alone. verbatim takes no fence, takes true for an integer, compares names alone, pays
nothing at all for an answer with a step that it cannot read, and takes 0.25 off the accuracy where
one action is left and more are planned. In both, capitals do not matter, the last of two equal keys
counts, and what follows a complete plan is free.

An answer may also be lines (or parts with ";" between them), an action each by its name or its id;
there is no structure and valid then.

success pays 1 for any plan that can be done after what has been done and reaches the goal in the
household of data/household_world.py, and 0 for all others.

Every function is linear in the length of the text: the parser refuses brackets nested too deep, and
numbers of too many digits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from data import Example, RewardFunction
from data.alfred_actions import ACTION_IDS, ACTIONS
from data.alfred_scenes import Room, goal_of, world_of
from data.household_goals import Outcome, run_plan
from grpo.errors import UserError

PLAN_MODES = ("documented", "verbatim")
MODES = (*PLAN_MODES, "success")
# The most that each reward can pay. In verbatim no one answer is sure of all of it.
HIGHEST = {
    "documented": {"structure": 0.125, "valid": 0.125, "match": 0.25, "accuracy": 1.0},
    "success": {"success": 1.0},
}
OF_JSON = ("structure", "valid")  # rewards that lines cannot earn or miss
FENCE = "```"
FIELDS = (
    "visual_state_description",
    "reasoning_and_reflection",
    "language_plan",
    "executable_plan",
)
PLAN = FIELDS[-1]
NO_ACTION = -1  # the id of a line that is none
_IDS = {str(number) for number in range(len(ACTIONS))}


@dataclass(frozen=True)
class GoldPlan:
    """What the rewards and the judge compare with.

    actions: what is left to do, in order, at least one. done: what comes before it. trajectory:
    where both are from, None if from nowhere; rooms: what is known of its floor plan and others.
    lines: an answer is an action a line, not JSON.
    """

    actions: tuple[str, ...]
    done: tuple[str, ...] = ()
    trajectory: Any = None
    rooms: Mapping[str, Room] = field(default_factory=dict)
    lines: bool = False


def reward_functions(mode: str, lines: bool = False) -> dict[str, RewardFunction]:
    """By name, in the order of the table. example.answer is a GoldPlan."""
    modes = {"documented": _documented, "verbatim": _verbatim, "success": _success}
    if mode not in modes:
        raise UserError(f"--reward-mode: '{mode}' is none of {', '.join(modes)}")
    return _payable(modes[mode](), lines)


def highest_rewards(mode: str, lines: bool = False) -> dict[str, float]:
    """HIGHEST, of the rewards that there are for answers in lines."""
    return _payable(HIGHEST.get(mode, {}), lines)


def _payable(rewards: Mapping[str, Any], lines: bool) -> dict[str, Any]:
    return {name: r for name, r in rewards.items() if not (lines and name in OF_JSON)}


def prefix_reward(right: int, length: int) -> float:
    """What a plan earns of which the first `right` of `length` gold actions are there.

    >>> [prefix_reward(n, 4) for n in range(5)]
    [0.0, 0.1, 0.3, 0.6, 1.0]
    """
    return right * (right + 1) / (length * (length + 1))


# ---------------------------------------------------------------------------------------------
# Reading an answer


def parse(text: str) -> Any:
    """The JSON in a text, None for anything else. The plain parser: it lets NaN pass."""
    try:
        return json.loads(text.strip())
    except (ValueError, RecursionError):  # ValueError also for an integer of over 4,300 digits
        return None


def read_answer(text: str) -> Mapping[str, Any]:
    """The object that an answer is, as documented; an empty one for what is none."""
    text = text.strip()
    if text.startswith(FENCE) and text.endswith(FENCE) and len(text) > 2 * len(FENCE):
        text = text[len(FENCE) : -len(FENCE)].removeprefix("json")
    answer = parse(text)
    return answer if isinstance(answer, dict) else {}


def read_plan(text: str) -> list[Any]:
    """The steps of an answer's plan, each whatever it is; none without a plan that is a list."""
    plan = read_answer(text).get(PLAN)
    return plan if isinstance(plan, list) else []


def plan_lines(text: str) -> list[str]:
    """The actions of an answer in lines, by their names; an id alone stands for its name. What is
    neither stays as it is.

    >>> plan_lines("goto bed; pickup pen")
    ['goto bed', 'pickup pen']
    """
    parts = [part.strip() for part in text.replace(";", "\n").split("\n")]
    return [ACTIONS[int(part)] if part in _IDS else part for part in parts if part]


def answered_steps(text: str, gold: GoldPlan) -> list[Any]:
    """The steps of an answer, be it JSON or lines, as the JSON has them."""
    if not gold.lines:
        return read_plan(text)
    names = plan_lines(text)
    return [{"action_id": ACTION_IDS.get(n.lower(), NO_ACTION), "action_name": n} for n in names]


def action_of(step: Any) -> str | None:
    """The action that a step names by its id and its name; None if they are not a pair of the map.

    >>> action_of({"action_id": 70, "action_name": "Pickup apple"})
    'pickup apple'
    """
    if not _is_valid(step) or not 0 <= step["action_id"] < len(ACTIONS):
        return None
    action = ACTIONS[step["action_id"]]
    return action if step["action_name"].lower() == action else None


def _is_valid(step: Any) -> bool:
    if not isinstance(step, dict) or not isinstance(step.get("action_name"), str):
        return False
    number = step.get("action_id")
    return isinstance(number, int) and not isinstance(number, bool)


def _is_gold(step: Any, gold: str) -> bool:
    if not _is_valid(step) or step["action_name"].lower() != gold.lower():
        return False
    return ACTION_IDS.get(gold.lower(), step["action_id"]) == step["action_id"]


def _leading(steps: Sequence, gold: Sequence[str], same: Callable[[Any, str], bool]) -> int:
    """How many steps are the gold ones before the first that is not."""
    return sum(1 for _ in takewhile(lambda pair: same(*pair), zip(steps, gold, strict=False)))


def _share(steps: Sequence, rule: Callable[[Any], Any]) -> float:
    return sum(bool(rule(step)) for step in steps) / len(steps) if steps else 0.0


# ---------------------------------------------------------------------------------------------
# The evaluation


def is_correct(text: str, example: Example) -> bool:
    """The plan is the gold one, action for action, with nothing behind it."""
    steps, gold = answered_steps(text, example.answer), example.answer.actions
    return len(steps) == len(gold) == _leading(steps, gold, _is_gold)


def failure_reason(text: str, example: Example) -> str:
    """Why a plan is not the gold one."""
    steps, gold = answered_steps(text, example.answer), example.answer.actions
    if not steps and example.answer.lines:
        return "no plan"
    if not steps:
        return "no plan in the JSON" if read_answer(text) else "no JSON object"
    right = _leading(steps, gold, _is_gold)
    if right == len(gold):
        return "goes on after the end"
    if right == len(steps):
        return "stops too early"
    if action_of(steps[right]) is None:
        return "a step that is no action"
    return "another action" if right else "another first action"


# ---------------------------------------------------------------------------------------------
# success


def planned(text: str, lines: bool = False) -> list[str]:
    """The actions of a plan by their names, an id without a name standing for it. What is no action
    stays as it is, for the household to refuse."""
    return plan_lines(text) if lines else [_step_name(step) for step in read_plan(text)]


def _step_name(step: Any) -> str:
    if not isinstance(step, dict):
        return str(step)[:40]
    name, number = step.get("action_name"), step.get("action_id")
    if isinstance(name, str):
        return name
    if not isinstance(number, int):
        return str(name)[:40]
    return ACTIONS[number] if 0 <= number < len(ACTIONS) else str(number)


def outcome(text: str, example: Example) -> Outcome:
    """What becomes of the plan in the household of its trajectory, after what has been done."""
    gold = example.answer
    world, goal = world_of(gold.trajectory, gold.rooms), goal_of(gold.trajectory)
    return run_plan(world, goal, [*gold.done, *planned(text, gold.lines)])


def task_success(text: str, example: Example) -> float:
    return float(outcome(text, example).success)


def goal_conditions(text: str, example: Example) -> float:
    """The share of the goal's conditions that hold where the plan ends or fails."""
    found = outcome(text, example)
    return found.conditions_met / found.conditions


def _success() -> dict[str, RewardFunction]:
    return {"success": task_success}


# ---------------------------------------------------------------------------------------------
# documented


def _documented() -> dict[str, RewardFunction]:
    return {
        "structure": lambda text, example: 0.125 * (read_answer(text).keys() >= set(FIELDS)),
        "valid": lambda text, example: 0.125 * _share(read_plan(text), _is_valid),
        "match": _match,
        "accuracy": prefix_score,
    }


def _match(text: str, example: Example) -> float:
    return 0.25 * _share(answered_steps(text, example.answer), action_of)


def prefix_score(text: str, example: Example) -> float:
    """The documented accuracy."""
    gold = example.answer.actions
    return prefix_reward(_leading(answered_steps(text, example.answer), gold, _is_gold), len(gold))


# ---------------------------------------------------------------------------------------------
# verbatim


def _verbatim() -> dict[str, RewardFunction]:
    return {
        "structure": _on_readable(lambda a, steps, gold: 0.125 * (a.keys() >= set(FIELDS))),
        "valid": _on_readable(lambda a, steps, gold: 0.125 * _share(steps, _has_integer)),
        "match": _on_readable(lambda a, steps, gold: 0.25 * _share(steps, action_of)),
        "accuracy": _on_readable(lambda a, steps, gold: _verbatim_accuracy(steps, gold)),
    }


def _on_readable(rule: Callable[[dict, Sequence[dict], tuple[str, ...]], float]) -> RewardFunction:
    """rule(answer, its steps, the gold actions), or 0 where the published code stumbles.

    It asks each step for its name as one asks a dict for a text, so that a plan or a step of
    another kind ends its reading; a plan that is missing or holds nothing does not.
    """

    def reward(text: str, example: Example) -> float:
        answer = parse(text)
        if not isinstance(answer, dict):
            return 0.0
        steps = answer.get(PLAN, [])
        if not isinstance(steps, (list, dict, str)) or not all(map(_is_readable, steps)):
            return 0.0
        return rule(answer, list(steps), example.answer.actions)

    return reward


def _is_readable(step: Any) -> bool:
    return isinstance(step, dict) and isinstance(step.get("action_name", ""), str)


def _has_integer(step: dict) -> bool:
    return isinstance(step.get("action_id"), int) and "action_name" in step


def _verbatim_accuracy(steps: Sequence[dict], gold: tuple[str, ...]) -> float:
    right = _leading(steps, gold, lambda s, g: s.get("action_name", "").lower() == g.lower())
    extra = len(gold) == 1 and len(steps) > 1
    return prefix_reward(right, len(gold)) - 0.25 * extra
