"""What of the rollouts is trained on: the online filter, the buffer, and what is left out of both.

A group that is nearly all right or all wrong has little to teach. The filter keeps the others; the
buffer gathers them over the steps until there are enough for several updates (the source of the
ALFRED task, arXiv 2505.22050). While it fills the policy does not move, and when it is full all of
it is used and it is empty: so all that it ever holds was written by one policy, the one that is
there when the old log-probs are taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, pairwise

import torch

from data import Task
from grpo.config import Config
from grpo.distributed import gather, share
from grpo.errors import UserError
from grpo.generate import Completion
from grpo.metrics import Rollout, mean
from grpo.packing import Group, PackedBatch, micro_batches
from rewards import score, weighted_sum

ROUNDING = 1e-9  # 0.1 + 0.2 + 0.3 is not 0.6: a bound, or full reward, is met up to this


# ---- the filter ---------------------------------------------------------------------------------


def kept_groups(
    rollout: Rollout, task: Task, weights: Mapping[str, float], config: Config
) -> list[bool]:
    """Whether each group is learned from, [P]: what --filter measures is within its bounds.

    weights: of the rewards. Completions without a reward have no part in a share of full rewards.
    """
    if config.filter == "none":
        return [True] * len(rollout.prompts)
    if config.filter == "full-reward":
        values = at_full_reward(rollout, task, weights)
    else:
        values = accuracies(rollout, task, config)
    size, lower, upper = config.num_generations, config.filter_lower, config.filter_upper
    groups = [[v for v in values[i : i + size] if v is not None]
              for i in range(0, len(values), size)]  # fmt: skip
    return [bool(g) and lower - ROUNDING <= mean(g) <= upper + ROUNDING for g in groups]


def at_full_reward(
    rollout: Rollout, task: Task, weights: Mapping[str, float]
) -> list[float | None]:
    """1 for a completion with the highest reward that it could have, else 0; None if unscored. [N]

    A function that does not apply to a completion has no part in what that could have.
    """
    highest = {
        name: [None if v is None else task.highest_rewards.get(name, 0.0) for v in values]
        for name, values in rollout.reward_table.items()
    }
    full = weighted_sum(highest, weights, len(rollout.rewards))
    pairs = zip(rollout.rewards, full, strict=True)
    return [None if r is None else float(r >= best - ROUNDING) for r, best in pairs]


def accuracies(rollout: Rollout, task: Task, config: Config) -> list[float | None]:
    """What the task's accuracy says of each completion: a reward function's value, or the judge's
    verdict as 0 or 1. [N]"""
    if task.accuracy is not None:
        return rollout.reward_table[task.accuracy]
    own = share(len(rollout.texts))  # a judge that runs into its time limit does so on one rank
    judge = {"is_correct": task.is_correct}
    judged = score(rollout.texts[own], rollout.examples[own], judge, config.reward_timeout)
    return [value for part in gather(judged["is_correct"]) for value in part]


def check_filter(config: Config, task: Task, weights: Mapping[str, float]) -> None:
    """Raise UserError if the task does not say what --filter asks it."""
    if task.accuracy is not None and task.accuracy not in task.reward_functions:
        raise UserError(
            f"the task {task.name} names '{task.accuracy}' as its accuracy, but has no reward of "
            f"that name; there are: {', '.join(task.reward_functions)}"
        )
    if config.filter != "full-reward":
        return
    for name in task.reward_functions:
        weight = weights.get(name, 1.0)
        if weight < 0:
            raise UserError(
                f"--filter full-reward: the reward '{name}' has the weight {weight:g}, and below 0 "
                "its highest value is no full reward; use --filter accuracy"
            )
        if weight > 0 and name not in task.highest_rewards:
            raise UserError(
                f"--filter full-reward: with these settings the task {task.name} does not say how "
                f"high its reward '{name}' can get (highest_rewards); use --filter accuracy"
            )


# ---- the buffer ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoredGroup:
    """A prompt, its completions, and the advantage of each; what training needs of a group."""

    prompt: list[int]
    completions: list[Completion]  # [G]
    advantages: list[float]  # [G], all 0 if the rewards had no spread


def scored_groups(rollout: Rollout) -> list[ScoredGroup]:
    """The groups of a rollout that the filter keeps, in order."""
    size = len(rollout.completions) // len(rollout.prompts)
    rows = [slice(i * size, (i + 1) * size) for i in range(len(rollout.prompts))]
    return [
        ScoredGroup(prompt, rollout.completions[own], rollout.advantages[own])
        for prompt, own, kept in zip(rollout.prompts, rows, rollout.kept, strict=True)
        if kept
    ]


@dataclass(frozen=True)
class Buffer:
    """Kept groups that wait for more. A value: `add` answers with the next one.

    barren_steps: the steps in a row, up to now, in which no group was kept.
    """

    groups: tuple[ScoredGroup, ...] = ()
    barren_steps: int = 0

    def add(self, rollout: Rollout, config: Config) -> tuple[list[Sequence[ScoredGroup]], Buffer]:
        """(the groups of each update that is due now, the buffer after it).

        Nothing is due until there are buffer_groups; then all that is there, in buffer_updates
        parts of neighbours.
        """
        kept = scored_groups(rollout)
        groups, barren_steps = (*self.groups, *kept), 0 if kept else self.barren_steps + 1
        if len(groups) < config.buffer_groups:
            return [], Buffer(groups, barren_steps)
        updates = min(config.buffer_updates, len(groups))
        ends = [i * len(groups) // updates for i in range(updates + 1)] if groups else []
        return [groups[a:b] for a, b in pairwise(ends)], Buffer((), barren_steps)

    def metrics(self, rollout: Rollout, config: Config) -> dict[str, float]:
        """How many groups of the step were kept and dropped, and how many wait; {} unfiltered."""
        if config.filter == "none":
            return {}
        kept = sum(rollout.kept)
        return {
            "filter/kept": kept,
            "filter/dropped": len(rollout.kept) - kept,
            "filter/buffer": len(self.groups),
        }

    def barren(self, config: Config) -> bool:
        """Whether the patience is at an end; after a resume there is as much of it again."""
        steps, patience = self.barren_steps, config.filter_patience
        return config.filter != "none" and patience > 0 and steps > 0 and steps % patience == 0

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """For a checkpoint: all lists behind one another, and their lengths. {} of a fresh one."""
        if self == Buffer():
            return {}
        completions = [c for g in self.groups for c in g.completions]

        def joined(lists: list[list], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor([x for values in lists for x in values], dtype=dtype)

        return {
            "barren_steps": torch.tensor(self.barren_steps),
            "prompts": joined([g.prompt for g in self.groups]),
            "prompt_lengths": torch.tensor([len(g.prompt) for g in self.groups]),
            "sizes": torch.tensor([len(g.completions) for g in self.groups]),
            "advantages": joined([g.advantages for g in self.groups], torch.float64),  # exact
            "token_ids": joined([c.token_ids for c in completions]),
            "lengths": torch.tensor([len(c.token_ids) for c in completions]),
            "logprobs": joined([c.logprobs for c in completions], torch.float64),
            "own": joined([c.own_tokens() for c in completions], torch.bool),
            "stopped": torch.tensor([c.finish_reason == "stop" for c in completions]),
        }

    @staticmethod
    def of_state_tensors(tensors: Mapping[str, torch.Tensor]) -> Buffer:
        """The inverse of state_tensors."""
        if not tensors:
            return Buffer()

        def cut(name: str, lengths: str) -> list[list]:
            values = iter(tensors[name].tolist())
            return [list(islice(values, int(length))) for length in tensors[lengths]]

        ends = ["stop" if stopped else "length" for stopped in tensors["stopped"]]
        ids, own = cut("token_ids", "lengths"), cut("own", "lengths")
        logprobs = iter(tensors["logprobs"].tolist())
        completions = (
            Completion(tokens, list(islice(logprobs, sum(mine))), end, [] if all(mine) else mine)
            for tokens, mine, end in zip(ids, own, ends, strict=True)
        )
        prompts, advantages = cut("prompts", "prompt_lengths"), cut("advantages", "sizes")
        groups = [
            ScoredGroup(prompt, list(islice(completions, len(own))), own)
            for prompt, own in zip(prompts, advantages, strict=True)
        ]
        return Buffer(tuple(groups), int(tensors["barren_steps"]))


# ---- the mini-batch -----------------------------------------------------------------------------


@dataclass
class MiniBatch:
    """What one optimizer step learns from, in micro-batches of one backward pass each."""

    batches: list[PackedBatch]  # of this rank
    advantages: torch.Tensor  # [rows], of all ranks
    completions: list[Completion]  # [rows]
    rows: int  # that the loss is divided by
    tokens: int
    learnable: bool  # on any rank


def mini_batch(groups: Sequence[ScoredGroup], config: Config, device: torch.device) -> MiniBatch:
    """These groups, packed: a prompt once a group, no padding, nothing that cannot teach."""
    learnable, rows, tokens = learnable_groups(groups, config)
    own = learnable[share(len(learnable))]  # all, unless torchrun has started several ranks
    return MiniBatch(
        batches=list(micro_batches(own, config.tokens_per_micro_batch, device)),
        advantages=torch.tensor([a for g in groups for a in g.advantages], device=device),
        completions=[c for g in groups for c in g.completions],
        rows=rows,
        tokens=tokens,
        learnable=bool(learnable),
    )


def learnable_groups(
    groups: Sequence[ScoredGroup], config: Config
) -> tuple[list[Group], int, int]:
    """(the groups to learn from, and how many rows and tokens the update's loss is divided by).

    A group whose rewards are all equal has advantage 0: it is not computed at all, but it counts
    in the totals, as it would if it were. Completions cut by the length are left out of both if
    mask_truncated_completions says so. What the filter drops is not among the groups at all.
    """
    keeps_kl = config.beta > 0 and config.kl_on_zero_std_groups
    learnable, rows, tokens, numbers = [], 0, 0, count()
    for scored in groups:
        group = Group(scored.prompt, [], [])
        for completion, row in zip(scored.completions, numbers, strict=False):
            if config.mask_truncated_completions and completion.finish_reason == "length":
                continue
            group.completions.append(completion.token_ids)
            group.rows.append(row)
            group.own.append(completion.own_tokens())
            rows += 1
            tokens += len(completion.logprobs)
        if group.rows and (keeps_kl or any(scored.advantages)):
            learnable.append(group)
    return learnable, rows, tokens
