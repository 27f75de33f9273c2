"""Evaluation on held-out examples: greedy accuracy, pass@k, by level, and why answers failed.

All of that is by the task's strict judge; where the task has a lenient one, too, its accuracy and
pass@k stand beside the strict ones.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from data import Example, Task, table_rows
from grpo.distributed import world_size
from grpo.episodes import Episode, play
from grpo.interrupt import shared_out
from grpo.interval import wilson_interval
from grpo.policy import Policy
from grpo.sampling import Sampling
from grpo.tokenizer import render_prompt

OUT_OF_TOKENS = "ran out of tokens"
# Prompts of a chunk, in rows decoded together: a chunk waits for its longest answer, and with fewer
# the generator would stand half empty for most of the time. A kill loses the chunk.
FULL_BATCHES = 4


@dataclass
class Answer:
    """An example, the model's greedy completion and, for pass@k, how many samples were right.

    correct_lenient: what the lenient judge says; None where the task has none. turns: what was said
    between the prompt and the text, as a chat, if the episode had several turns. measures: those of
    the task, by name.
    """

    example: Example
    text: str
    correct: bool
    reason: str  # "" when correct
    tokens: int
    samples_correct: int = 0
    correct_lenient: bool | None = None
    samples_correct_lenient: int = 0
    turns: list[dict[str, str]] = field(default_factory=list)
    measures: dict[str, float] = field(default_factory=dict)


@dataclass
class Evaluation:
    """What `evaluate` found; `summary()` is what results.json holds.

    levels: their order in the table, as Task.levels.
    """

    answers: list[Answer] = field(default_factory=list)
    samples: int = 1
    levels: Sequence[str] = ()

    @property
    def accuracy(self) -> float:
        return sum(a.correct for a in self.answers) / max(len(self.answers), 1)

    @property
    def accuracy_lenient(self) -> float | None:
        """None where the task has no lenient judge."""
        if not any(a.correct_lenient is not None for a in self.answers):
            return None
        return sum(bool(a.correct_lenient) for a in self.answers) / len(self.answers)

    def summary(self) -> dict:
        """Accuracy with its 95% interval, pass@k, the table by level, the reasons for failure."""
        right, count = sum(a.correct for a in self.answers), len(self.answers)
        levels = {level: [a for a in self.answers if level in table_rows(a.example.level)]
                  for level in self._levels()}  # fmt: skip
        return {
            "examples": count,
            "correct": right,
            "accuracy": self.accuracy,
            "accuracy_95": [*wilson_interval(right, count)],
            **self._lenient(),
            **_measures(self.answers),
            "mean_tokens": sum(a.tokens for a in self.answers) / max(count, 1),
            "failures": dict(Counter(a.reason for a in self.answers if a.reason).most_common()),
            "levels": {
                level: {
                    "examples": len(rows),
                    "correct": sum(a.correct for a in rows),
                    "accuracy": sum(a.correct for a in rows) / len(rows),
                    **_measures(rows),
                }
                for level, rows in levels.items()
            },
            **self._pass_at_k(),
        }

    def _levels(self) -> list[str]:
        """Those that the task has put in order, then the others by the numbers in their names."""
        rows = (row for a in self.answers for row in table_rows(a.example.level))
        there = by_number(dict.fromkeys(rows))
        place = {level: i for i, level in enumerate(self.levels)}
        return sorted(there, key=lambda level: place.get(level, len(place)))

    def _lenient(self) -> dict:
        if self.accuracy_lenient is None:
            return {}
        right = sum(bool(a.correct_lenient) for a in self.answers)
        return {
            "correct_lenient": right,
            "accuracy_lenient": self.accuracy_lenient,
            "accuracy_lenient_95": [*wilson_interval(right, len(self.answers))],
        }

    def _pass_at_k(self) -> dict:
        if self.samples == 1:
            return {}
        result: dict = {"samples": self.samples}
        judges = {"": [a.samples_correct for a in self.answers]}
        if self.accuracy_lenient is not None:
            judges[" lenient"] = [a.samples_correct_lenient for a in self.answers]
        asked = max(len(self.answers), 1)
        for judge, right in judges.items():
            result[f"pass@{self.samples}{judge}"] = sum(n > 0 for n in right) / asked
            result[f"pass@1{judge}"] = sum(right) / (asked * self.samples)
        return result


def _measures(answers: Sequence[Answer]) -> dict:
    """The mean of each, where the task has some."""
    if not answers or not answers[0].measures:
        return {}
    means = {n: sum(a.measures[n] for a in answers) / len(answers) for n in answers[0].measures}
    return {"measures": means}


def by_number(levels: Iterable[str]) -> list[str]:
    """In the order of the numbers in their names; those without any stay in the order given.

    >>> by_number(["10 steps", "5+ steps", "9 steps"])
    ['5+ steps', '9 steps', '10 steps']
    """
    return sorted(levels, key=lambda level: [int(n) for n in re.findall("[0-9]+", level)])


def evaluate(
    policy: Policy,
    task: Task,
    examples: Sequence[Example],
    *,
    max_new_tokens: int,
    prompt_format: str,
    max_rows: int,
    samples: int = 1,
    turns: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    on_finish: Callable[[int], None] = lambda rows: None,
    done: Sequence[Answer] = (),
    on_answers: Callable[[list[Answer]], None] = lambda answers: None,
) -> Evaluation:
    """Answer every example greedily; with samples > 1 also draw that many for pass@k.

    turns: answers an episode, see grpo/episodes.py; the last one is judged.

    done: answers to the first examples, from an evaluation that was stopped; the others are
    computed. on_answers gets them in their order, some at a time, as soon as they are known.

    Under torchrun each rank answers its share; all of them know all answers in the end, or raise
    Stopped together if `on_finish` did so on one.
    """
    # A uniform number a token: those of an example do not depend on the number of ranks.
    shape = (len(examples), samples if samples > 1 else 0, turns * max_new_tokens)
    uniforms = torch.rand(shape, generator=torch.Generator().manual_seed(seed))

    def answer(places: range) -> list[tuple]:
        """The fields of an Answer in their order, without its example, for each of these."""
        chunk = [examples[i] for i in places]
        prompts = [render_prompt(policy.tokenizer, e.messages, prompt_format) for e in chunk]

        def complete(group: int, sampling: Sampling) -> list[list[Episode]]:
            rows = uniforms[places.start : places.stop].flatten(0, 1) if group > 1 else None
            return play(policy, task, prompts, chunk, group, max_new_tokens, sampling, turns=turns,
                        prompt_format=prompt_format, max_rows=max_rows, on_finish=on_finish,
                        uniforms=rows)  # fmt: skip

        drawn: list[list[Episode]] = [[] for _ in chunk]
        if samples > 1:
            drawn = complete(samples, Sampling(temperature))
        found = []
        greedy = complete(1, Sampling(0.0))
        for example, (episode,), sampled in zip(chunk, greedy, drawn, strict=True):
            correct, reason, lenient = _judge(task, episode)
            verdicts = [_judge(task, e) for e in sampled]
            row = (
                episode.text,
                correct,
                reason,
                len(episode.completion.logprobs),  # the policy's own tokens
                sum(v[0] for v in verdicts),
                lenient,
                sum(bool(v[2]) for v in verdicts),
                episode.example.messages[len(example.messages) :],
                {n: f(episode.text, episode.example) for n, f in task.measures.items()},
            )
            found.append(row)
        return found

    answers = list(done)
    chunk = FULL_BATCHES * max_rows * world_size()
    while places := range(len(examples))[len(answers) : len(answers) + chunk]:
        rows = shared_out(answer, places)
        new = [Answer(examples[i], *row) for i, row in zip(places, rows, strict=True)]
        on_answers(new)
        answers += new
    return Evaluation(answers, samples, task.levels)


def _judge(task: Task, episode: Episode) -> tuple[bool, str, bool | None]:
    """The fields correct, reason and correct_lenient of an Answer."""
    text, example = episode.text, episode.example
    lenient = task.is_correct_lenient and bool(task.is_correct_lenient(text, example))
    if task.is_correct(text, example):
        return True, "", lenient
    cut = episode.completion.finish_reason == "length"
    return False, OUT_OF_TOKENS if cut else task.failure_reason(text, example), lenient


def table(evaluations: dict[str, dict]) -> str:
    """Summaries side by side as text: all, the lenient judge, a row a level, each pass@k.

    >>> print(table({"after_sft": {"accuracy": 0.5, "examples": 4, "levels": {}}}))
                    after_sft
    all (4)             50.0%
    """
    names = list(evaluations)
    most = max(e["examples"] for e in evaluations.values())
    levels = dict.fromkeys(n for e in evaluations.values() for n in e["levels"])
    rows = [("all", None), *((level, level) for level in levels)]
    width = max(len(f"{label} ({most})") for label, _ in rows) + 6
    lines = [" " * width + "".join(f"{n:>12}" for n in names)]
    for label, level in rows:
        cells = [e if level is None else e["levels"].get(level) for e in evaluations.values()]
        count = next(c["examples"] for c in cells if c)
        lines.append(_row(f"{label} ({count})", width, [c and c["accuracy"] for c in cells]))
        if level is None and any("accuracy_lenient" in c for c in cells):
            lines.append(_row("lenient", width, [c.get("accuracy_lenient") for c in cells]))
        if level is None:
            for name in dict.fromkeys(n for c in cells for n in c.get("measures", {})):
                shares = [c.get("measures", {}).get(name) for c in cells]
                lines.append(_row(name, width, shares))
    for name in dict.fromkeys(n for e in evaluations.values() for n in e if n.startswith("pass@")):
        lines.append(_row(name, width, [e.get(name) for e in evaluations.values()]))
    return "\n".join(lines)


def _row(label: str, width: int, shares: Sequence[float | None]) -> str:
    cells = ["-" if share is None else f"{100 * share:.1f}%" for share in shares]
    return label.ljust(width) + "".join(f"{cell:>12}" for cell in cells)
