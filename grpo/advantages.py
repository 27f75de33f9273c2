"""Rewards -> advantages: a completion is judged against the others that answer the same prompt.

DeepSeekMath (arXiv 2402.03300), section 4.1.2: no value network predicts how good an answer ought
to be; the mean reward of the group takes its place,

    A_i = (r_i - mean(r_1 .. r_G)) / (std(r_1 .. r_G) + eps)                scale_rewards="group"

Dividing by the group's own std makes prompts that are nearly always solved (or nearly never) weigh
more than their spread deserves. Dr. GRPO (arXiv 2503.20783, section 3.1) therefore leaves it out
("none"); "batch" divides by one std for the whole batch, so that all prompts share a scale.

Shapes: [P] prompts, [G] completions a prompt, [N] = P*G rows; neighbours belong together, so row i
is in group i // G. Groups are by index: two prompts with the same text stay two groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo.errors import UserError

# Rewards closer than this (relative to the larger of 1 and their size) are the same number: 0.1 +
# 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ in their last bit, which no policy should be taught.
SAME_REWARD = 1e-9


def group_advantages(
    rewards: Sequence[float | None] | Tensor,  # [N]
    num_generations: int,
    scale_rewards: str = "group",
    eps: float = 1e-4,
) -> Tensor:  # [N] float32
    """The advantage of each completion within its group, worked out in float64.

    rewards: None or NaN stands for "not scored": such a row is left out of every mean and std, and
        its advantage is 0. The std is the unbiased one (n - 1).
    Groups whose rewards are all the same get exactly 0: (r - mean) may leave a rounding residue
    there, and residue / eps would be an update out of nothing.
    Raises UserError if the rewards do not divide into groups or hold an infinity.

    >>> group_advantages([1.0, 0.0, 0.0, 0.0,   0.5, 0.5, 0.5, None], num_generations=4)
    tensor([ 1.4997, -0.4999, -0.4999, -0.4999,  0.0000,  0.0000,  0.0000,  0.0000])
    """
    grouped = _grouped(rewards, num_generations)  # [P, G]
    scored = ~grouped.isnan()  # [P, G]
    mean = grouped.nanmean(dim=1, keepdim=True)  # [P, 1], NaN where nothing is scored
    centred = torch.where(scored, grouped - mean, 0.0)  # [P, G]

    if scale_rewards == "none":
        advantages = centred
    elif scale_rewards == "group":
        degrees = (scored.sum(dim=1, keepdim=True) - 1).clamp(min=1)  # [P, 1]
        std = (centred.square().sum(dim=1, keepdim=True) / degrees).sqrt()  # [P, 1]
        advantages = centred / (std + eps)
    elif scale_rewards == "batch":
        everything = grouped[scored]  # [scored rows]
        std = everything.std() if len(everything) > 1 else everything.new_zeros(())
        advantages = centred / (std + eps)
    else:
        raise UserError(f"--scale-rewards: '{scale_rewards}' is none of group, batch, none")

    advantages = advantages.masked_fill(_without_spread(grouped)[:, None], 0.0)
    return advantages.flatten().float()


def zero_std_groups(rewards: Sequence[float | None] | Tensor, num_generations: int) -> Tensor:
    """Which groups teach nothing: all rewards the same, or fewer than two scored. [P] bool.

    These are exactly the groups whose advantages `group_advantages` sets to 0; the share of them
    is the metric frac_reward_zero_std.
    """
    return _without_spread(_grouped(rewards, num_generations))


def _grouped(rewards: Sequence[float | None] | Tensor, num_generations: int) -> Tensor:
    """[N] rewards as [P, G] float64 on the CPU, NaN for what was not scored."""
    if not isinstance(rewards, Tensor):
        values = [float("nan") if reward is None else reward for reward in rewards]
        rewards = torch.tensor(values, dtype=torch.float64)
    rewards = rewards.detach().to("cpu", torch.float64)
    if num_generations < 1 or rewards.numel() % num_generations:
        raise UserError(
            f"{rewards.numel()} rewards cannot be split into groups of {num_generations}: "
            "give num_generations completions for every prompt"
        )
    if rewards.isinf().any():
        where = int(rewards.isinf().nonzero()[0])
        raise UserError(f"the reward of completion {where} is infinite: rewards must be finite")
    return rewards.reshape(-1, num_generations)


def _without_spread(grouped: Tensor) -> Tensor:
    """[P, G] -> [P] bool: no two scored rewards of the group differ by more than rounding does."""
    highest = grouped.nan_to_num(nan=-torch.inf).amax(dim=1)  # [P], -inf where nothing is scored
    lowest = grouped.nan_to_num(nan=torch.inf).amin(dim=1)  # [P]
    size = torch.maximum(highest.abs(), lowest.abs()).clamp(min=1.0)  # [P]
    return highest - lowest <= SAME_REWARD * size
