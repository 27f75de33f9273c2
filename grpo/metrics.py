"""What a GRPO step reports, under the names that users of TRL know."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from data import Example
from grpo.advantages import zero_std_groups
from grpo.distributed import gather, world_size
from grpo.generate import Completion
from grpo.packing import PackedBatch


@dataclass
class Rollout:
    """What the policy wrote in one step and what it earned. [N] lists, groups in order."""

    prompts: list[list[int]]  # [P]
    examples: list[Example]
    completions: list[Completion]
    texts: list[str]
    seconds: float
    reward_table: dict[str, list[float | None]] = field(default_factory=dict)
    rewards: list[float | None] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)  # [P] by the filter
    advantages: list[float] = field(default_factory=list)

    def of_all_ranks(self, examples: list[Example]) -> Rollout:
        """The whole step, known to every rank, from each rank's share; examples: [P] of the step.

        Before the filter and the advantages, which depend on the rewards of the whole step.
        """
        if world_size() == 1:
            return self
        rows = [[c.token_ids, c.logprobs, c.finish_reason, c.own] for c in self.completions]
        parts = gather(
            {
                "prompts": self.prompts,
                "completions": rows,
                "texts": self.texts,
                "messages": [e.messages for e in self.examples],
                "seconds": self.seconds,
                "reward_table": self.reward_table,
                "rewards": self.rewards,
            }
        )

        def joined(name: str) -> list:
            return [value for part in parts for value in part[name]]

        size = len(self.texts) // len(self.prompts)
        asked = zip((e for e in examples for _ in range(size)), joined("messages"), strict=True)
        return Rollout(
            prompts=joined("prompts"),
            examples=[replace(example, messages=turns) for example, turns in asked],
            completions=[Completion(*c) for c in joined("completions")],
            texts=joined("texts"),
            seconds=max(part["seconds"] for part in parts),
            reward_table={
                name: [value for part in parts for value in part["reward_table"][name]]
                for name in self.reward_table
            },
            rewards=joined("rewards"),
        )

    def kept_rewards(self) -> list[float | None]:
        """The rewards, None in the groups that are dropped: they count in no mean or std. [N]"""
        size = len(self.rewards) // len(self.kept)
        return [r if self.kept[i // size] else None for i, r in enumerate(self.rewards)]


def logprob_gap(
    completions: Sequence[Completion], batch: PackedBatch, logp: torch.Tensor
) -> float:
    """Largest |scorer - sampler| log-prob in a micro-batch: logp [n, C] before any update.

    completions: those that batch.rows are the indices of. Rounding alone: about 1e-5 in float32,
    some 1e-1 at the worst in bfloat16 and a tenth of that on average. More than that means that the
    generator and the training pass do not compute the same model.
    """
    sampled = [p for row in batch.rows.tolist() for p in completions[row].logprobs]
    return (logp[batch.mask] - torch.tensor(sampled, device=logp.device)).abs().max().item()


def rollout_metrics(rollout: Rollout, num_generations: int) -> dict[str, float]:
    """Rewards and lengths of one step, of all its completions, whatever the filter keeps.

    reward_std is the mean of the groups' standard deviations (n - 1): what the advantages divide
    by. Completions that no reward function scored are left out.
    """
    scored = [r for r in rollout.rewards if r is not None]
    groups = [
        [r for r in rollout.rewards[i : i + num_generations] if r is not None]
        for i in range(0, len(rollout.rewards), num_generations)
    ]
    lengths = [len(c.logprobs) for c in rollout.completions]  # the policy's own tokens
    metrics = {
        "reward": mean(scored),
        "reward_std": mean(statistics.stdev(g) for g in groups if len(g) > 1),
        "frac_reward_zero_std": mean(zero_std_groups(rollout.rewards, num_generations).tolist()),
    }
    for name, values in rollout.reward_table.items():
        metrics[f"rewards/{name}/mean"] = mean(v for v in values if v is not None)
    return metrics | {
        "completions/mean_length": mean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": mean(c.finish_reason == "length" for c in rollout.completions),
        "tokens_per_second/rollout": sum(lengths) / rollout.seconds,
    }


def update_metrics(sums: dict[str, float], updates: int) -> dict[str, float]:
    """The mean loss of the step's updates and means over the tokens that were learned from, from
    summed parts.

    Without such a token the means are NaN, not 0: no group had a spread, as frac_reward_zero_std
    tells, and nothing was measured. Nor was the loss, in a step without an update.
    """

    def share(part: str, whole: str) -> float:
        return sums[part] / sums[whole] if sums.get(whole) else math.nan

    return {
        "loss": sums.get("loss", 0.0) / updates if updates else math.nan,
        "kl": share("kl", "tokens"),
        "entropy": share("entropy", "tokens"),
        "clip_ratio/low_mean": share("clip_low", "ratios"),
        "clip_ratio/high_mean": share("clip_high", "ratios"),
    }


def completion_rows(rollout: Rollout) -> list[dict]:
    """One dict a completion, as completions/ keeps them: prompt, text, rewards, advantage."""
    return [
        {
            "prompt": rollout.examples[i].messages,
            "completion": rollout.texts[i],
            "tokens": len(rollout.completions[i].logprobs),
            "finish_reason": rollout.completions[i].finish_reason,
            "rewards": {name: values[i] for name, values in rollout.reward_table.items()},
            "reward": rollout.rewards[i],
            "advantage": rollout.advantages[i],
        }
        for i in range(len(rollout.texts))
    ]


def mean(values: Iterable[float]) -> float:
    """The arithmetic mean; 0 of nothing."""
    values = list(values)
    return sum(values) / len(values) if values else 0.0
