"""The rewards of household plans: what becomes of them in the household, whatever their words.

| --reward-mode | pays                                                                          |
| ------------- | ----------------------------------------------------------------------------- |
| success       | 1 for any plan that can be done and reaches the goal, else 0                  |
| progress      | as success, and 0.5 times the share of the goal's conditions that hold where  |
|               | the plan ends or fails, less the share that held before                       |
| documented,   | the one plan that is written down, in ALFRED's JSON (rewards/alfred.py)       |
| verbatim      |                                                                               |

A conversation of several turns is one episode: the plans of its earlier turns are done first, each
up to the action that failed, and the last plan is judged in the household that they left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data import Example, RewardFunction
from data.household_goals import Outcome, run_plan
from data.household_tasks import HouseTask
from data.household_world import World, execute
from grpo.errors import UserError
from rewards import alfred

MODES = ("success", "progress", *alfred.PLAN_MODES)
# What a right answer can earn; by "progress" that depends on what held before it.
HIGHEST = {"success": {"success": 1.0}, "documented": alfred.HIGHEST["documented"]}
NO_PLAN = "no plan: the answer has no actions that can be read"


@dataclass(frozen=True)
class HouseAnswer:
    """What the rewards and the judge need. lines: an answer is an action a line, not JSON."""

    task: HouseTask
    lines: bool

    @property
    def actions(self) -> tuple[str, ...]:
        """The plan that is written down, for ALFRED's own rewards."""
        return self.task.plan


def reward_functions(mode: str) -> dict[str, RewardFunction]:
    """By name, in the order of the table. example.answer is a HouseAnswer."""
    if mode not in MODES:
        raise UserError(f"--reward-mode: '{mode}' is none of {', '.join(MODES)}")
    if mode in alfred.PLAN_MODES:
        return alfred.reward_functions(mode)
    success = {"success": lambda text, example: float(outcome(text, example).success)}
    return success if mode == "success" else {**success, "progress": _progress}


def _progress(text: str, example: Example) -> float:
    """Never paid for what held from the start: an answer without a plan earns nothing."""
    world = world_after(example.messages, example.answer)
    before = run_plan(world, example.answer.task.goal, [])
    after = _judge(world, text, example.answer)
    return 0.5 * (after.conditions_met - before.conditions_met) / after.conditions


# ---------------------------------------------------------------------------------------------
# Reading and judging


def world_after(messages: Sequence[dict[str, str]], answer: HouseAnswer) -> World:
    """The household once the plans of all the assistant's turns so far are done."""
    world = answer.task.world()
    for message in messages:
        if message["role"] == "assistant":
            execute(world, alfred.planned(message["content"], answer.lines))
    return world


def outcome(text: str, example: Example) -> Outcome:
    """What becomes of a plan, after the earlier turns of its conversation."""
    return _judge(world_after(example.messages, example.answer), text, example.answer)


def _judge(world: World, text: str, answer: HouseAnswer) -> Outcome:
    plan = alfred.planned(text, answer.lines)
    found = run_plan(world, answer.task.goal, plan)
    if plan:
        return found
    return Outcome(False, found.conditions_met, found.conditions, None, NO_PLAN)
