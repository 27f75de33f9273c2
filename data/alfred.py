"""The ALFRED task: from a goal and what has been done for it, the plan of the actions that remain.

After Reinforced Reasoning for Embodied Planning (arXiv 2505.22050): a trajectory of k actions makes
k examples, one after each beginning of its plan. The 225 actions are in alfred_actions.py, reading
ALFRED is in alfred_files.py, prompt and target in alfred_prompt.py, shorter ones in
alfred_lines.py, the rewards in rewards/alfred.py.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from data import Example, Task, alfred_lines, table_rows
from data.alfred_actions import ACTION_IDS, OBJECTS, actions_on, split_action
from data.alfred_files import Annotation, Trajectory, read_split
from data.alfred_prompt import chat, listing, observe, write_answer
from data.alfred_scenes import Room, learn_rooms
from data.household_goals import TASK_TYPES
from grpo.config import option
from grpo.errors import UserError
from rewards.alfred import (
    MODES,
    PLAN,
    GoldPlan,
    action_of,
    answered_steps,
    failure_reason,
    goal_conditions,
    highest_rewards,
    is_correct,
    prefix_score,
    read_answer,
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
                          "objects of the scene; a prompt for lines names those objects, or none",
                          choices=("all", "scene"))
    alfred_format: str = option("auto", "what an answer is: json = an object with reflections and "
                                "the plan, lines = an action a line, after a short prompt; auto = "
                                "json, or lines for a model from scratch",
                                choices=("auto", "json", "lines"))
    reward_mode: str = option("documented", "the rewards as the source describes them, as its "
                              "published code computes them (verbatim), or 1 for any plan that "
                              "reaches the goal (success)", choices=MODES)
    eval_split: str = option("both", "evaluate in rooms that training has seen, or not, or both",
                             choices=tuple(EVALUATED))
    eval_plans: str = option("whole", "evaluate whole plans, or also the rest of them after each "
                             "action", choices=("whole", "all"))
    eval_by: str = option("type", "rows of the evaluation's table: the types of task, or how many "
                          "actions are done already", choices=("type", "step"))
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
    # A model of 2M parameters, in a quarter of an hour on two cores.
    "scratch": {
        "actions": "scene",
        "goals": "all",
        "scratch_hidden_size": 160,
        "scratch_layers": 6,
        "scratch_heads": 5,
        "max_prompt_length": 160,
        "max_completion_length": 64,
        "sft_steps": 2500,
        "sft_batch_size": 32,
        "sft_learning_rate": 1e-3,
        "sft_lr_scheduler": "constant",
        "warmup_ratio": 0.02,
        "weight_decay": 0.1,
        "max_steps": 400,
        "prompts_per_step": 32,
        "num_generations": 8,
        "learning_rate": 3e-4,
        "temperature": 1.0,
        "eval_every": 50,
        "eval_examples": 506,
    },
    # A model of 135M given as --model, with LoRA. The longest prompt of a scene has some 850
    # tokens, with all 225 actions some 1,450.
    "cpu": {
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
    return make_task(train, held_out, options, from_scratch)


def resolve(options: Options, from_scratch: bool) -> Options:
    """The options with the format decided. Raises UserError for what does not go together."""
    if options.alfred_format == "json" and from_scratch:
        raise UserError(
            "--alfred-format json: a model from scratch knows no English; give --model a model "
            "tuned for chat, or leave the flag out"
        )
    if options.eval_by == "step" and options.eval_plans == "whole":
        raise UserError(
            "--eval-by step: whole plans are all of step 0; give --eval-plans all with it"
        )
    if options.alfred_format == "auto":
        options = replace(options, alfred_format="lines" if from_scratch else "json")
    if options.alfred_format == "lines" and options.reward_mode == "verbatim":
        raise UserError(
            "--reward-mode verbatim is what the published code pays for JSON, and answers are "
            "lines here; use documented or success, or --alfred-format json with a pretrained model"
        )
    return options


def scratch_tokens(options: Options) -> list[str]:
    """The vocabulary for a model from scratch: every prompt and plan in lines is made of these."""
    resolve(options, from_scratch=True)
    return alfred_lines.tokens(_vocabulary(read_split("train", options.data_dir)))


def _vocabulary(train: Sequence[Trajectory]) -> list[str]:
    return alfred_lines.vocabulary(a.goal for t in train for a in t.annotations)


def make_task(
    train: Sequence[Trajectory],
    held_out: Sequence[Trajectory],
    options: Options,
    from_scratch: bool = False,
) -> Task:
    """The task of these trajectories. Of those with an action that is none of the 225 GRPO has all
    examples, since their other actions can be right, SFT only those without it."""
    options = resolve(options, from_scratch)
    lines, rooms = options.alfred_format == "lines", learn_rooms(train)
    prompt = prompts(train, held_out, options, from_scratch)
    level = {"type": by_type, "step": by_step}[options.eval_by]
    make = partial(make_example, prompt=prompt, rooms=rooms, lines=lines, level=level)
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
        train=Examples(training, make),
        sft=Examples(sayable, make),
        evaluation=Examples(evaluation, make),
        reward_functions=reward_functions(options.reward_mode, lines),
        is_correct=is_correct,
        failure_reason=failure_reason,
        alarms=alarms,
        accuracy="success" if options.reward_mode == "success" else "accuracy",
        highest_rewards=highest_rewards(options.reward_mode, lines),
        measures={
            "prefix score": prefix_score,
            "task success": task_success,
            "goal conditions": goal_conditions,
        },
        levels=sorted({row for cut in evaluation for row in table_rows(level(cut))}, key=_in_order),
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


Prompt = Callable[[Cut], list[dict[str, str]]]


class Examples(Sequence[Example]):
    """The examples of some cuts, each made when it is asked for: there are 43,898, and of all
    annotations three times as many."""

    def __init__(self, cuts: Sequence[Cut], make: Callable[[Cut], Example]):
        self.cuts, self.make = cuts, make

    def __len__(self) -> int:
        return len(self.cuts)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.make(self.cuts[index])


def make_example(
    cut: Cut,
    prompt: Prompt,
    rooms: Mapping[str, Room],
    lines: bool,
    level: Callable[[Cut], str],
) -> Example:
    """rooms: for the household, as `learn_rooms` gives them. lines: what an answer is."""
    if lines:
        target = "\n".join(cut.remaining)
    else:
        target = write_answer(cut.done, cut.remaining, cut.annotation.steps)
    return Example(
        messages=prompt(cut),
        target=target,
        answer=GoldPlan(cut.remaining, cut.done, cut.trajectory, rooms, lines),
        level=level(cut),
    )


def by_type(cut: Cut) -> str:
    return f"{_split(cut)}/{cut.trajectory.task_type}"


def by_step(cut: Cut) -> str:
    return f"{_split(cut)}/{cut.step} done"


def _split(cut: Cut) -> str:
    return cut.trajectory.path.partition("/")[0].removeprefix("valid_")


def _in_order(row: str) -> tuple:
    """The splits, each before its rows; those by the number of actions, or in ALFRED's order."""
    split, _, name = row.partition("/")
    number, _, _ = name.partition(" ")
    return split, 1 + int(number) if number.isdigit() else ("", *TASK_TYPES).index(name)


def prompts(
    train: Sequence[Trajectory],
    held_out: Sequence[Trajectory],
    options: Options,
    from_scratch: bool,
) -> Prompt:
    """How a cut is put to the policy."""
    there = scene_objects((*train, *held_out)) if options.actions == "scene" else {}
    if options.alfred_format == "json":
        every = listing(ACTION_IDS)
        listings = {scene: listing(actions_on(objects)) for scene, objects in there.items()}
        return lambda cut: chat(
            cut.annotation.goal,
            cut.done,
            listings.get(cut.trajectory.scene, every),
            observe(cut.done),
        )
    if not from_scratch:
        return lambda cut: alfred_lines.english_chat(
            cut.annotation.goal, cut.done, there.get(cut.trajectory.scene, ())
        )
    known = set(_vocabulary(train))
    return lambda cut: alfred_lines.short_chat(
        cut.annotation.goal, cut.done, there.get(cut.trajectory.scene, ()), known
    )


def scene_objects(trajectories: Sequence[Trajectory]) -> dict[str, list[str]]:
    """For each scene the objects of the 225 actions that are there: some plan in that scene, of
    whatever split, names it as an object or receptacle. What a room holds is no secret of a plan.
    """
    there: dict[str, set[str]] = {}
    for t in trajectories:
        names = there.setdefault(t.scene, set())
        names.update(name.lower() for step in t.high_pddl for name in step[1:])
        names.update(split_action(action)[1] for action in t.actions)
    return {scene: sorted(names.intersection(OBJECTS)) for scene, names in there.items()}


# ---------------------------------------------------------------------------------------------
# Alarms


def alarms(batch: Sequence[tuple[str, Example]]) -> list[str]:
    """A line where the rewards cannot teach the format, or plans grow or stiffen for their sake."""
    if len(batch) < ALARM_FROM:
        return []
    in_lines = batch[0][1].answer.lines
    wanted = "a plan in lines" if in_lines else f"a JSON object with {PLAN}"
    if not any(_is_plan(text, example.answer) for text, example in batch):
        return [
            f"none of {len(batch)} outputs is {wanted}: what is never sampled is never rewarded. "
            "Begin with SFT (--stage all with --sft-steps 300)"
        ]
    long, constant = 0, Counter()
    for text, example in batch:
        plan, gold = answered_steps(text, example.answer), example.answer.actions
        long += len(plan) > LONG_PLAN * len(gold) + 1
        names = {str(s.get("action_name")) for s in plan if isinstance(s, dict)}
        if len(plan) > 1 and len(names) == 1:
            constant.update(names)
    found = []
    if long > LONG_SHARE * len(batch):
        found.append(f"{long} of {len(batch)} plans are over {LONG_PLAN} times as long as needed")
    name, times = max(constant.items(), key=lambda item: item[1], default=("", 0))
    if times > CONSTANT_SHARE * len(batch):
        found.append(f"{times} of {len(batch)} plans are {name[:40]!a} again and again")
    return found


def _is_plan(text: str, gold: GoldPlan) -> bool:
    """Whether there is something to be rewarded: the JSON, or a line that is an action."""
    if gold.lines:
        return any(map(action_of, answered_steps(text, gold)))
    return PLAN in read_answer(text)
