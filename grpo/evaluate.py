"""Evaluation on held-out examples: greedy accuracy, pass@k, by level, and why answers failed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from data import Example, Task
from grpo.distributed import gather, share
from grpo.generate import Completion, generate
from grpo.interrupt import Stopped
from grpo.policy import Policy
from grpo.sampling import Sampling
from grpo.tokenizer import completion_text, render_prompt

OUT_OF_TOKENS = "ran out of tokens"
CHUNK = 128  # prompts a call of the generator: bounds the cache, and the work a kill can lose


@dataclass
class Answer:
    """An example, the model's greedy completion and, for pass@k, how many samples were right."""

    example: Example
    text: str
    correct: bool
    reason: str  # "" when correct
    tokens: int
    samples_correct: int = 0


@dataclass
class Evaluation:
    """What `evaluate` found; `summary()` is what results.json holds."""

    answers: list[Answer] = field(default_factory=list)
    samples: int = 1

    @property
    def accuracy(self) -> float:
        return sum(a.correct for a in self.answers) / max(len(self.answers), 1)

    def summary(self) -> dict:
        """Accuracy with its 95% interval, pass@k, the table by level, the reasons for failure."""
        right, count = sum(a.correct for a in self.answers), len(self.answers)
        low, high = wilson_interval(right, count)
        levels = list(dict.fromkeys(a.example.level for a in self.answers if a.example.level))
        result = {
            "examples": count,
            "correct": right,
            "accuracy": self.accuracy,
            "accuracy_95": [low, high],
            "mean_tokens": sum(a.tokens for a in self.answers) / max(count, 1),
            "failures": dict(Counter(a.reason for a in self.answers if a.reason).most_common()),
            "levels": {
                level: {
                    "examples": len(rows := [a for a in self.answers if a.example.level == level]),
                    "correct": sum(a.correct for a in rows),
                    "accuracy": sum(a.correct for a in rows) / len(rows),
                }
                for level in levels
            },
        }
        if self.samples > 1:
            result["samples"] = self.samples
            right_samples, asked = [a.samples_correct for a in self.answers], max(count, 1)
            result[f"pass@{self.samples}"] = sum(n > 0 for n in right_samples) / asked
            result["pass@1"] = sum(right_samples) / (asked * self.samples)
        return result


def wilson_interval(correct: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """95% interval of a share (Wilson 1927), sensible at 0 and 1 too.

    >>> [round(x, 3) for x in wilson_interval(180, 200)]
    [0.851, 0.934]
    """
    if not count:
        return 0.0, 1.0
    share = correct / count
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def evaluate(
    policy: Policy,
    task: Task,
    examples: Sequence[Example],
    *,
    max_new_tokens: int,
    prompt_format: str,
    max_rows: int,
    samples: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    on_finish: Callable[[int], None] = lambda rows: None,
) -> Evaluation:
    """Answer every example greedily; with samples > 1 also draw that many for pass@k.

    Under torchrun each rank answers its share; all of them know all answers in the end, or raise
    Stopped together if `on_finish` did so on one.
    """
    # A uniform number a token: those of an example do not depend on the number of ranks.
    shape = (len(examples), samples if samples > 1 else 0, max_new_tokens)
    uniforms = torch.rand(shape, generator=torch.Generator().manual_seed(seed))

    def answer(places: range) -> list[tuple]:
        """The fields of an Answer, without its example, for each of these examples."""
        chunk = [examples[i] for i in places]
        prompts = [render_prompt(policy.tokenizer, e.messages, prompt_format) for e in chunk]

        def complete(group: int, sampling: Sampling) -> list[list[Completion]]:
            rows = uniforms[places.start : places.stop].flatten(0, 1) if group > 1 else None
            return generate(policy, prompts, group, max_new_tokens, sampling, max_rows=max_rows,
                            on_finish=on_finish, uniforms=rows)  # fmt: skip

        drawn: list[list[Completion]] = [[] for _ in chunk]
        if samples > 1:
            drawn = complete(samples, Sampling(temperature))
        greedy = complete(1, Sampling(0.0))
        found = []
        for example, (completion,), sampled in zip(chunk, greedy, drawn, strict=True):
            right = sum(_judge(policy, task, example, c)[1] for c in sampled)
            judged = _judge(policy, task, example, completion)
            found.append((*judged, len(completion.token_ids), right))
        return found

    own = range(len(examples))[share(len(examples))]
    try:
        answers = [a for i in range(0, len(own), CHUNK) for a in answer(own[i : i + CHUNK])]
    except Stopped:
        answers = None
    parts = gather(answers)
    if None in parts:
        raise Stopped
    together = (row for part in parts for row in part)
    return Evaluation([Answer(e, *row) for e, row in zip(examples, together, strict=True)], samples)


def _judge(policy, task, example, completion) -> tuple[str, bool, str]:
    text = completion_text(policy.tokenizer, completion.token_ids, policy.stop_token_ids)
    if task.is_correct(text, example):
        return text, True, ""
    cut = completion.finish_reason == "length"
    return text, False, OUT_OF_TOKENS if cut else task.failure_reason(text, example)


def table(evaluations: dict[str, dict]) -> str:
    """Summaries side by side as text, a row a level, and one for each pass@k that they have.

    >>> print(table({"after_sft": {"accuracy": 0.5, "examples": 4, "levels": {}}}))
                    after_sft
    all (4)             50.0%
    """
    names = list(evaluations)
    most = max(e["examples"] for e in evaluations.values())
    levels = dict.fromkeys(level for e in evaluations.values() for level in e["levels"])
    rows = [("all", None), *((level, level) for level in levels)]
    width = max(len(f"{label} ({most})") for label, _ in rows) + 6
    lines = [" " * width + "".join(f"{n:>12}" for n in names)]
    for label, level in rows:
        cells = [e if level is None else e["levels"].get(level) for e in evaluations.values()]
        count = next(c["examples"] for c in cells if c)
        lines.append(_row(f"{label} ({count})", width, [c and c["accuracy"] for c in cells]))
    for name in dict.fromkeys(n for e in evaluations.values() for n in e if n.startswith("pass@")):
        lines.append(_row(name, width, [e.get(name) for e in evaluations.values()]))
    return "\n".join(lines)


def _row(label: str, width: int, shares: Sequence[float | None]) -> str:
    cells = ["-" if share is None else f"{100 * share:.1f}%" for share in shares]
    return label.ljust(width) + "".join(f"{cell:>12}" for cell in cells)
