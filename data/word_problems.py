"""What the arithmetic tasks share: prompt, target, worked examples, levels, settings, alarms.

After the gsm8k recipe for Qwen2.5-0.5B-Instruct on one A10: five rewards (rewards/gsm8k.py), an
answer in XML tags. The tasks differ in where the problems come from: data/gsm8k.py reads them,
data/gsm_symbolic.py makes them up.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from data import Example, Task
from grpo.config import option
from grpo.errors import UserError
from rewards.gsm8k import (
    ANSWER,
    ANSWER_END,
    MODES,
    REASONING,
    REASONING_END,
    failure_reason,
    highest_rewards,
    is_correct,
    is_correct_lenient,
    reward_functions,
)

SYSTEM_PROMPT = f"""Solve the problem step by step. Respond in the following format:
{REASONING}
...
{REASONING_END}
{ANSWER}
...
{ANSWER_END}
The answer is a number and nothing else."""

MOST_STEPS = 5  # this many steps and more are one level
ALARM_FROM = 16  # outputs; fewer say little
SHORT_REASONING, SHORT_SHARE = 10, 0.5  # characters; above this share an alarm is raised


@dataclass
class WordProblemOptions:
    """The flags of every arithmetic task."""

    # fmt: off
    reward_mode: str = option("documented", "the rewards as the source describes them, or as its "
                              "published code computes them (verbatim)", choices=MODES)
    shots: int = option(0, "worked examples in the prompt, as earlier turns of the chat; they are "
                        "training problems, and not trained on", at_least=0, at_most=32)
    # fmt: on


@dataclass(frozen=True)
class Problem:
    """question; the worked solution, a line a step, "" if there is none; the gold answer as the
    data writes it ("1,080")."""

    question: str
    solution: str
    gold: str


# The source's own settings. It had no cold start (--sft-steps 150 adds one). Two things that its
# library did are not followed: prompts over 256 tokens lost their beginning, the instructions (512
# hold every question of gsm8k and a worked example); and groups without spread in their rewards
# were still pushed by the KL (--kl-on-zero-std-groups does that).
_SOURCE = {
    "lora_rank": 0,
    "prompts_per_step": 4,
    "num_generations": 8,
    "max_prompt_length": 512,
    "max_completion_length": 200,
    "temperature": 0.9,
    "beta": 0.04,
    "loss_type": "grpo",
    "max_steps": 1868,
    "learning_rate": 5e-6,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "weight_decay": 0.1,
    "warmup_ratio": 0.1,
    "lr_scheduler": "cosine",
    "max_grad_norm": 0.1,
    "checkpoint_every": 100,
    "sft_steps": 0,
    "eval_examples": 1319,
}

# The DEFAULTS of each of these tasks.
SETTINGS = {
    # A model of 135M with LoRA on two cores, in an hour. It never opens the tags when it is only
    # asked to, so SFT comes first; 99% of gsm8k's own solutions fit into 256 tokens with their
    # tags. Few samples are right at first: many prompts a step, and of these the groups in which
    # some are right and some are not, or the form is all that is learned (docs/RESULTS.md).
    "cpu": {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "rollout_rows": 64,
        "prompts_per_step": 24,
        "num_generations": 8,
        "max_prompt_length": 512,
        "max_completion_length": 256,
        "temperature": 0.5,
        "filter": "accuracy",
        "filter_lower": 0.01,
        "filter_upper": 0.99,
        "sft_steps": 280,
        "sft_batch_size": 8,
        "sft_learning_rate": 1e-3,
        "max_steps": 50,
        "learning_rate": 5e-4,
        "lr_scheduler": "constant",
        "checkpoint_every": 10,
        "eval_examples": 300,
    },
    "a10": _SOURCE,
    "a6000": _SOURCE,
}


def refuse_scratch(task: str, from_scratch: bool) -> None:
    """A model made from scratch knows nothing but a task's own tokens; here that is English."""
    if from_scratch:
        raise UserError(
            f"--task {task}: a model from scratch knows no words; give --model a model tuned for "
            "chat, a directory or a hub name"
        )


def make_task(
    name: str, training: Sequence[Problem], held_out: Sequence[Problem], options: WordProblemOptions
) -> Task:
    """The task of these problems. With --shots the worked examples leave the training problems.

    The examples in the prompt do not depend on the run's seed, so that all runs are measured with
    the same prompts.
    """
    if options.shots >= len(training):
        raise UserError(
            f"--shots {options.shots}: there are only {len(training)} training problems, and the "
            "worked examples are not trained on"
        )
    chosen = random.Random(f"shots/{name}").sample(range(len(training)), options.shots)
    turns = [turn for i in chosen for turn in worked_example(training[i])]
    rest = [p for i, p in enumerate(training) if i not in set(chosen)]
    train = [make_example(p, turns) for p in rest]
    return Task(
        name=name,
        train=train,
        sft=train,
        evaluation=[make_example(p, turns) for p in held_out],
        reward_functions=reward_functions(options.reward_mode),
        highest_rewards=highest_rewards(options.reward_mode),
        is_correct=is_correct,
        is_correct_lenient=is_correct_lenient,
        failure_reason=failure_reason,
        alarms=alarms,
    )


def worked_example(problem: Problem) -> list[dict[str, str]]:
    """Two turns of a chat: the question, and its answer in the format."""
    return [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": target(problem)},
    ]


def make_example(problem: Problem, turns: Sequence[dict[str, str]] = ()) -> Example:
    return Example(
        messages=[
            {"role": "system", "content": SYSTEM_PROMPT},
            *turns,
            {"role": "user", "content": problem.question},
        ],
        target=target(problem),
        answer=problem.gold,
        level=level(problem),
    )


def target(problem: Problem) -> str:
    """The solution in the tags; it earns every documented reward in full.

    No line break at the end: the verbatim formats do not allow one.
    """
    reasoning = f"{REASONING}\n{problem.solution}\n{REASONING_END}"
    return f"{reasoning}\n{ANSWER}\n{problem.gold}\n{ANSWER_END}"


def level(problem: Problem) -> str:
    """By the number of steps: the lines of the solution."""
    steps = sum(bool(line.strip()) for line in problem.solution.splitlines())
    if steps == 0:
        return ""
    if steps >= MOST_STEPS:
        return f"{MOST_STEPS}+ steps"
    return f"{steps} step" + "s" * (steps > 1)


def alarms(batch: Sequence[tuple[str, Example]]) -> list[str]:
    """A line where the rewards cannot teach the format, or are earned without any reasoning."""
    if len(batch) < ALARM_FROM:
        return []
    texts = [text for text, _ in batch]
    if not any(ANSWER in text for text in texts):
        return [
            f"none of {len(texts)} outputs has an {ANSWER}: what is never sampled is never "
            "rewarded. Begin with SFT (--stage all with --sft-steps 150), or with --shots 1"
        ]
    short = sum(0 <= reasoning_length(text) < SHORT_REASONING for text in texts)
    if short > SHORT_SHARE * len(texts):
        return [
            f"{short} of {len(texts)} outputs reason in less than {SHORT_REASONING} characters "
            "before they answer"
        ]
    return []


def reasoning_length(text: str) -> int:
    """Characters between the reasoning tags; -1 without both."""
    _, opened, rest = text.partition(REASONING)
    reasoning, closed, _ = rest.partition(REASONING_END)
    return len(reasoning.strip()) if opened and closed else -1
