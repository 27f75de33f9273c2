"""The household task: plan what a robot with one hand does in a room, so that a goal is reached.

Made up, so that it runs on any machine: rooms, things and goals are random (household_tasks.py), in
the manner of ALFRED and in its 225 actions; a plan is executed in a symbolic household
(household_world.py), and any plan that reaches the goal is right (rewards/household.py). A
pretrained model reads English and answers in ALFRED's JSON, a model from scratch reads and writes
the short form of household_text.py, an action a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from data import Example, Task
from data.alfred_prompt import chat, listing, write_answer
from data.household_goals import run_plan
from data.household_tasks import HouseTask, RandomTasks, held_out_tasks
from data.household_text import (
    describe,
    failure_text,
    instruction,
    level,
    possible_actions,
    short_failure,
    short_goal,
    short_scene,
    short_tokens,
)
from data.household_world import execute, reason_kind
from grpo.config import option
from grpo.errors import UserError
from rewards import alfred
from rewards.household import (
    HIGHEST,
    MODES,
    NO_PLAN,
    HouseAnswer,
    outcome,
    reward_functions,
    world_after,
)

ALARM_FROM = 16  # outputs; fewer say little
LONG_PLAN, LONG_SHARE = 2, 0.1  # times the plan written down; above this share an alarm is raised


@dataclass
class Options:
    """The household task's own flags."""

    # fmt: off
    household_format: str = option("auto", "what an answer is: json = an object as in the ALFRED "
                                   "task, lines = an action a line, after a prompt in the short "
                                   "form; auto = json, or lines for a model from scratch",
                                   choices=("auto", "json", "lines"))
    reward_mode: str = option("success", "1 for any plan that reaches the goal (success), also a "
                              "part for a part of the goal (progress), or ALFRED's rewards for the "
                              "one plan written down (documented, verbatim)", choices=MODES)
    household_train: int = option(100_000, "households for GRPO", positive=True)
    household_sft: int = option(200_000, "households for SFT", positive=True)
    household_held_out: int = option(400, "how many households to hold out", positive=True,
                                     at_most=10_000)
    # fmt: on


_PRETRAINED = {
    "prompts_per_step": 8,
    "num_generations": 8,
    "max_prompt_length": 1024,
    "max_completion_length": 512,
    "temperature": 1.0,
    "sft_batch_size": 8,
    "eval_examples": 100,
}
_GPU = {
    **_PRETRAINED,
    "prompts_per_step": 16,
    "learning_rate": 5e-6,
    "sft_steps": 200,
    "sft_learning_rate": 1e-4,
    "max_steps": 300,
    "eval_examples": 400,
}

DEFAULTS = {
    "scratch": {
        "scratch_hidden_size": 128,
        "scratch_layers": 6,
        "scratch_heads": 4,
        "max_prompt_length": 96,
        "max_completion_length": 64,
        "sft_steps": 1200,
        "sft_batch_size": 32,
        "sft_learning_rate": 2e-3,
        "sft_lr_scheduler": "constant",
        "warmup_ratio": 0.02,
        "weight_decay": 0.1,
        "max_steps": 300,
        "prompts_per_step": 32,
        "num_generations": 8,
        "learning_rate": 3e-4,
        "temperature": 1.2,
        "eval_every": 50,
        "eval_examples": 400,
    },
    "cpu": {
        **_PRETRAINED,
        "rollout_rows": 64,
        "sft_steps": 300,
        "sft_learning_rate": 2e-4,
        "max_steps": 60,
        "learning_rate": 2e-5,
    },
    "a10": _GPU,
    "a6000": _GPU,
}


def load(options: Options, seed: int, from_scratch: bool) -> Task:
    """The task for these flags; seed chooses the training households, never the held-out ones."""
    options = resolve(options, from_scratch)
    held_out = held_out_tasks(options.household_held_out)
    lines = options.household_format == "lines"
    train = RandomTasks(options.household_train, f"train/{seed}", held_out)
    sft = RandomTasks(options.household_sft, f"sft/{seed}", held_out)
    return Task(
        name="household",
        train=Examples(train, lines),
        sft=Examples(sft, lines),
        evaluation=Examples(held_out, lines),
        reward_functions=reward_functions(options.reward_mode),
        is_correct=is_correct,
        failure_reason=failure_reason,
        alarms=alarms,
        reply=reply,
        accuracy="accuracy" if options.reward_mode in alfred.PLAN_MODES else "success",
        highest_rewards=HIGHEST.get(options.reward_mode, {}),
        measures={"goal conditions": conditions_met},
    )


def resolve(options: Options, from_scratch: bool) -> Options:
    """The options with the format decided. Raises UserError for what does not go together."""
    if options.household_format == "json" and from_scratch:
        raise UserError(
            "--household-format json: a model from scratch knows no English; give --model a model "
            "tuned for chat, or leave the flag out"
        )
    if options.household_format == "auto":
        options = replace(options, household_format="lines" if from_scratch else "json")
    if options.household_format == "lines" and options.reward_mode in alfred.PLAN_MODES:
        raise UserError(
            f"--reward-mode {options.reward_mode} rewards ALFRED's JSON, and answers are lines "
            "here; use success or progress, or --household-format json with a pretrained model"
        )
    return options


class Examples(Sequence[Example]):
    """The examples of some households, each made when it is asked for."""

    def __init__(self, tasks: Sequence[HouseTask], lines: bool):
        self.tasks, self.lines = tasks, lines

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return make_example(self.tasks[index], self.lines)


def make_example(task: HouseTask, lines: bool) -> Example:
    """lines: the short form and an action a line, or else English and JSON."""
    world = task.world()
    if lines:
        text = f"{short_scene(world)}\n{short_goal(task.goal)}"
        messages, target = [{"role": "user", "content": text}], "\n".join(task.plan)
    else:
        actions = listing(possible_actions(task))
        messages = chat(instruction(task), (), actions, describe(world))
        target = write_answer((), task.plan)
    return Example(messages, target, HouseAnswer(task, lines), level(task.goal))


def scratch_tokens(options: Options) -> list[str]:
    """The vocabulary for a model from scratch: every short prompt and plan is made of these."""
    resolve(options, from_scratch=True)
    return short_tokens()


# ---------------------------------------------------------------------------------------------
# Judging


def is_correct(text: str, example: Example) -> bool:
    """The plan can be done, and at its end the goal is reached, whatever the way."""
    return outcome(text, example).success


def conditions_met(text: str, example: Example) -> float:
    """The share of the goal's conditions that hold where the plan ends or fails."""
    found = outcome(text, example)
    return found.conditions_met / found.conditions


def failure_reason(text: str, example: Example) -> str:
    return reason_kind(outcome(text, example).reason)


def reply(text: str, example: Example) -> str | None:
    """What the agent hears once its plan is executed: the user's next turn; None on success.

    The plans of the assistant's turns in example.messages have been done before it, each up to the
    action that failed; nothing else is remembered from turn to turn.
    """
    answer: HouseAnswer = example.answer
    world, goal = world_after(example.messages, answer), answer.task.goal
    plan = alfred.planned(text, answer.lines)
    found = run_plan(world, goal, plan)
    if plan and found.success:
        return None
    failed_at, _ = execute(world, plan)
    action = "" if failed_at is None else plan[failed_at]
    reason = found.reason if plan else NO_PLAN
    if answer.lines:
        return short_failure(world, goal, action, reason)
    return failure_text(world, failed_at or 0, action, reason)


def alarms(batch: Sequence[tuple[str, Example]]) -> list[str]:
    """A line where the reward cannot teach, or plans grow without need."""
    if len(batch) < ALARM_FROM:
        return []
    plans = [(alfred.planned(text, e.answer.lines), e.answer.task.plan) for text, e in batch]
    if not any(plan for plan, _ in plans):
        return [
            f"none of {len(batch)} outputs is a plan: what is never sampled is never rewarded. "
            "Begin with SFT (--stage all with --sft-steps 300)"
        ]
    long = sum(len(plan) > LONG_PLAN * len(known) for plan, known in plans)
    if long > LONG_SHARE * len(batch):
        return [f"{long} of {len(batch)} plans are over {LONG_PLAN} times as long as needed"]
    return []
