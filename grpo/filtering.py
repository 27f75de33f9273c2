"""What of a rollout is trained on, and what the loss is divided by."""

from __future__ import annotations

from grpo.advantages import zero_std_groups
from grpo.config import Config
from grpo.metrics import Rollout
from grpo.packing import Group


def learnable_groups(rollout: Rollout, config: Config) -> tuple[list[Group], int, int]:
    """(the groups to learn from, and how many rows and tokens the step's loss is divided by).

    A group whose rewards are all equal has advantage 0: it is not computed at all, but it counts
    in the totals, as it would if it were. Completions cut by the length are left out of both if
    mask_truncated_completions says so.
    """
    size = config.num_generations
    dead = zero_std_groups(rollout.rewards, size).tolist()  # [P]
    groups, rows, tokens = [], 0, 0
    for i, prompt in enumerate(rollout.prompts):
        group = Group(prompt, [], [])
        for row in range(i * size, (i + 1) * size):
            completion = rollout.completions[row]
            if config.mask_truncated_completions and completion.finish_reason == "length":
                continue
            group.completions.append(completion.token_ids)
            group.rows.append(row)
            rows += 1
            tokens += len(completion.token_ids)
        keeps_kl = config.beta > 0 and config.kl_on_zero_std_groups
        if group.rows and (keeps_kl or not dead[i]):
            groups.append(group)
    return groups, rows, tokens
