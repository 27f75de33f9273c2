"""The ALFRED task: from a goal and what has been done for it, the plan of the actions that remain.

After Reinforced Reasoning for Embodied Planning (arXiv 2505.22050): a trajectory of k actions makes
k examples, one after each beginning of its plan. The 225 actions are in alfred_actions.py, reading
ALFRED is in alfred_files.py, prompt and target in alfred_prompt.py, the rewards in
rewards/alfred.py.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from data import Example, Task
from data.alfred_actions import ACTION_IDS, split_action
from data.alfred_files import Annotation, Trajectory, read_split
from data.alfred_prompt import chat, listing, observe, write_answer
from data.alfred_scenes import Room, learn_rooms
from grpo.config import option
from grpo.errors import UserError
from rewards.alfred import (
    HIGHEST,
    MODES,
    PLAN,
    GoldPlan,
    failure_reason,
    goal_conditions,
    is_correct,
    prefix_score,
    read_answer,
    read_plan,
    reward_functions,
    task_success,
)

EVALUATED = {
    "seen": ("valid_seen",),
    "unseen": ("valid_unseen",),
    "both": ("valid_seen", "valid_unseen"),
}
ALARM_FROM = 16  # outputs; fewer say little
LONG_PLAN, LONG_SHARE = 2, 0.1  # times the gold plan; above this share an alarm is raised
CONSTANT_SHARE = 0.5


@dataclass
class Options:
    """The ALFRED task's own flags."""

    # fmt: off
    data_dir: str | None = option(None, "folder with json_2.1.0 or with alfred_train.jsonl and so "
                                  "on, itself or in alfred/; none = in GRPO_DATA, or what make "
                                  "data TASK=alfred fetched")
    goals: str = option("first", "whose words the goal is in: the first annotation's, or each of "
                        "them as an example of its own", choices=("first", "all"))
    actions: str = option("all", "which actions the prompt lists: all 225, or those with the "
                          "objects of the scene", choices=("all", "scene"))
    reward_mode: str = option("documented", "the rewards as the source describes them, as its "
                              "published code computes them (verbatim), or 1 for any plan that "
                              "reaches the goal (success)", choices=MODES)
    eval_split: str = option("both", "evaluate in rooms that training has seen, or not, or both",
                             choices=tuple(EVALUATED))
    eval_plans: str = option("whole", "evaluate whole plans, or also the rest of them after each "
                             "action", choices=("whole", "all"))
    # fmt: on


# The source's settings, but for its images and its rollouts of 128 prompts, 16 of them a step.
_SOURCE = {
    "prompts_per_step": 16,
    "num_generations": 8,
    "max_prompt_length": 2048,
    "max_completion_length": 1024,
    "temperature": 1.0,
    "beta": 0.0,
    "learning_rate": 1e-6,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "warmup_ratio": 0.03,
    "max_grad_norm": 1.0,
    "max_steps": 1000,
    "sft_steps": 1000,
    "sft_batch_size": 16,
    "sft_learning_rate": 1e-4,
    "sft_lr_scheduler": "cosine",
    "eval_examples": 506,
}

DEFAULTS = {
    # A model of 135M with LoRA. The longest prompt of a scene has some 850 tokens, with all 225
    # actions some 1,450.
    "cpu": {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "actions": "scene",
        "rollout_rows": 64,
        "prompts_per_step": 8,
        "num_generations": 8,
        "max_prompt_length": 1536,
        "max_completion_length": 512,
        "temperature": 1.0,
        "sft_steps": 300,
        "sft_batch_size": 8,
        "sft_learning_rate": 2e-4,
        "max_steps": 60,
        "learning_rate": 2e-5,
        "checkpoint_every": 20,
        "eval_examples": 200,
    },
    "a10": _SOURCE,
    "a6000": _SOURCE,
}


def load(options: Options, seed: int, from_scratch: bool) -> Task:
    """The task for these flags. It is the same for every seed: the loop shuffles the examples."""
    train = read_split("train", options.data_dir)
    held_out = [t for s in EVALUATED[options.eval_split] for t in read_split(s, options.data_dir)]
    return make_task(train, held_out, options)


def resolve(options: Options, from_scratch: bool) -> Options:
    """A model made from scratch knows nothing but a task's own tokens; here that is English."""
    if from_scratch:
        raise UserError(
            "--task alfred: a model from scratch knows no words; give --model a model tuned for "
            "chat, a directory or a hub name"
        )
    return options


def make_task(
    train: Sequence[Trajectory], held_out: Sequence[Trajectory], options: Options
) -> Task:
    """The task of these trajectories. Of those with an action that is none of the 225 GRPO has all
    examples, since their other actions can be right, SFT only those without it."""
    if options.actions == "all":
        listings = dict.fromkeys((t.scene for t in (*train, *held_out)), listing(ACTION_IDS))
    else:
        listings = scene_listings((*train, *held_out))
    rooms = learn_rooms(train)
    training = cuts(train, every_goal=options.goals == "all")
    sayable = [c for c in training if all(a in ACTION_IDS for a in c.remaining)]
    evaluation = cuts(held_out)
    if options.eval_plans == "whole":
        evaluation = [c for c in evaluation if c.step == 0]
    # What looks at the first examples only must not see one type of task.
    for name, mixed in (("train", training), ("sft", sayable), ("evaluation", evaluation)):
        random.Random(f"alfred/{name}").shuffle(mixed)
    return Task(
        name="alfred",
        train=Examples(training, listings, rooms),
        sft=Examples(sayable, listings, rooms),
        evaluation=Examples(evaluation, listings, rooms),
        reward_functions=reward_functions(options.reward_mode),
        is_correct=is_correct,
        failure_reason=failure_reason,
        alarms=alarms,
        accuracy="success" if options.reward_mode == "success" else "accuracy",
        highest_rewards=HIGHEST.get(options.reward_mode, {}),
        measures={
            "prefix score": prefix_score,
            "task success": task_success,
            "goal conditions": goal_conditions,
        },
    )


# ---------------------------------------------------------------------------------------------
# Examples


@dataclass(frozen=True)
class Cut:
    """A trajectory after its first `step` actions, in the words of one annotation."""

    trajectory: Trajectory
    annotation: Annotation
    step: int

    @property
    def done(self) -> tuple[str, ...]:
        return self.trajectory.actions[: self.step]

    @property
    def remaining(self) -> tuple[str, ...]:
        return self.trajectory.actions[self.step :]


def cuts(trajectories: Sequence[Trajectory], every_goal: bool = False) -> list[Cut]:
    """Each trajectory after none of its actions, after the first, … up to the last but one."""
    return [
        Cut(trajectory, annotation, step)
        for trajectory in trajectories
        for annotation in trajectory.annotations[: None if every_goal else 1]
        for step in range(len(trajectory.actions))
    ]


class Examples(Sequence[Example]):
    """The examples of some cuts, each made when it is asked for: there are 43,898."""

    def __init__(
        self, cuts: Sequence[Cut], listings: Mapping[str, str], rooms: Mapping[str, Room]
    ):
        self.cuts, self.listings, self.rooms = cuts, listings, rooms

    def __len__(self) -> int:
        return len(self.cuts)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        cut = self.cuts[index]
        return make_example(cut, self.listings[cut.trajectory.scene], self.rooms)


def make_example(cut: Cut, actions: str, rooms: Mapping[str, Room]) -> Example:
    """actions: how the prompt lists them. rooms: for the household, as `learn_rooms` gives them."""
    split = cut.trajectory.path.partition("/")[0].removeprefix("valid_")
    return Example(
        messages=chat(cut.annotation.goal, cut.done, actions, observe(cut.done)),
        target=write_answer(cut.done, cut.remaining, cut.annotation.steps),
        answer=GoldPlan(cut.remaining, cut.done, cut.trajectory, rooms),
        level=f"{split} {cut.trajectory.task_type}",
    )


def scene_listings(trajectories: Sequence[Trajectory]) -> dict[str, str]:
    """For each scene the actions whose object is there: some plan in that scene, of whatever split,
    names it as an object or as a receptacle. What a room contains is no secret of a plan."""
    there: dict[str, set[str]] = {}
    for t in trajectories:
        names = there.setdefault(t.scene, set())
        names.update(name.lower() for step in t.high_pddl for name in step[1:])
        names.update(split_action(action)[1] for action in t.actions)
    return {
        scene: listing([a for a in ACTION_IDS if split_action(a)[1] in names])
        for scene, names in there.items()
    }


# ---------------------------------------------------------------------------------------------
# Alarms


def alarms(batch: Sequence[tuple[str, Example]]) -> list[str]:
    """A line where the rewards cannot teach the format, or plans grow or stiffen for their sake."""
    if len(batch) < ALARM_FROM:
        return []
    if not any(PLAN in read_answer(text) for text, _ in batch):
        return [
            f"none of {len(batch)} outputs is a JSON object with {PLAN}: what is never sampled is "
            "never rewarded. Begin with SFT (--stage all with --sft-steps 300)"
        ]
    long, constant = 0, Counter()
    for text, example in batch:
        plan, gold = read_plan(text), example.answer.actions
        long += len(plan) > LONG_PLAN * len(gold) + 1
        names = {str(s.get("action_name")) for s in plan if isinstance(s, dict)}
        if len(plan) > 1 and len(names) == 1:
            constant.update(names)
    lines = []
    if long > LONG_SHARE * len(batch):
        lines.append(f"{long} of {len(batch)} plans are over {LONG_PLAN} times as long as needed")
    name, times = max(constant.items(), key=lambda item: item[1], default=("", 0))
    if times > CONSTANT_SHARE * len(batch):
        lines.append(f"{times} of {len(batch)} plans are {name[:40]!a} again and again")
    return lines
