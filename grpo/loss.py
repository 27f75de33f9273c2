"""The GRPO loss, as pure tensor functions on padded rows.

    ratio    r = exp(logp - old_logp)                                  policy_ratio
    clip     l = -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)   clipped_surrogate
    KL       l + beta * (exp(d) - d - 1),  d = ref_logp - logp         kl_k3
    average  one of four ways over the rows of an optimizer step       aggregate

Shapes: [N] rows (completions), [C] completion tokens. `mask` [N, C] is True where a token counts
and may have holes; whatever stands elsewhere reaches neither a value nor a gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# exp is exact up to this many nats and goes on along its tangent beyond: float32 overflows at 88
# nats, and a clamp behind the exp would hide inf in the value but not in the gradient (0 * inf).
# A clamp before it would end the gradient, leaving a token without any pull back to the reference.
EXP_LIMIT = 20.0


def policy_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor, level: str) -> Tensor:
    """pi / pi_old of each token ([N, C], PPO and DeepSeekMath eq. 3) or of each row ([N, 1]).

    level "sequence" is GSPO (arXiv 2507.18071, eq. 7): exp of the mean log-ratio of the row, so
    that long rows do not have wilder ratios than short ones. Log-ratios (0.3, -0.1) of a row give
    token ratios (1.35, 0.90) and the sequence ratio exp(0.1) = 1.11. Masked tokens have ratio 1.
    """
    log_ratio = (logp - old_logp).masked_fill(~mask, 0.0)  # [N, C]
    if level == "sequence":
        lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)  # [N, 1]
        log_ratio = log_ratio.sum(dim=1, keepdim=True) / lengths  # [N, 1]
    elif level != "token":
        raise ValueError(f"importance_sampling_level is token or sequence, not {level!r}")
    tail = torch.relu(log_ratio - EXP_LIMIT)
    return log_ratio.clamp(max=EXP_LIMIT).exp() + math.exp(EXP_LIMIT) * tail


def clipped_surrogate(
    ratio: Tensor,  # [N, C] or [N, 1]
    advantages: Tensor,  # [N, 1]
    epsilon: float,
    epsilon_high: float,
    delta: float | None = None,
) -> Tensor:  # the shape of ratio
    """-min(r A, clip(r) A): PPO's clip (DeepSeekMath eq. 3), to be minimised.

    The minimum is pessimistic whatever the sign of A: a good token (A > 0) earns nothing more past
    1 + epsilon_high, a bad one nothing more below 1 - epsilon, but a bad one that grew is punished
    in full. With A = -1 and epsilon = 0.2, ratio 0.5 gives 0.8 (no gradient) and ratio 2 gives 2.
    epsilon_high > epsilon is DAPO's clip-higher (arXiv 2503.14476, eq. 10). delta bounds that
    last punishment (dual clip, arXiv 1912.09729, there c) and must be above 1 + epsilon_high.
    """
    capped = ratio if delta is None else ratio.clamp(max=delta)
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    return -torch.minimum(capped * advantages, clipped * advantages)


def kl_k3(log_ratio: Tensor) -> Tensor:
    """KL(policy || reference) of a token from d = ref_logp - logp: exp(d) - d - 1, never below 0.

    The estimator k3 of Schulman's note "Approximating KL divergence" (DeepSeekMath eq. 4). Its
    gradient for logp is 1 - exp(d): up where the reference likes the token better (d > 0), down
    where it likes it less; past EXP_LIMIT it stays at 1 - exp(EXP_LIMIT), still up.
    d = 0.4 gives 0.092, d = -0.4 gives 0.070, d = 0 gives exactly 0.
    """
    inside = log_ratio.clamp(max=EXP_LIMIT)
    tail = torch.relu(log_ratio - EXP_LIMIT)
    return inside.expm1() - inside + math.expm1(EXP_LIMIT) * tail


def aggregate(
    per_token_loss: Tensor,  # [N, C]
    mask: Tensor,  # [N, C]
    loss_type: str,
    rows: int,
    tokens: int,
    max_completion_length: int | None = None,  # dr_grpo only
) -> Tensor:  # []
    """The share of these rows in the loss of the whole optimizer step.

    rows, tokens: totals over the WHOLE step (for dapo over all ranks too), not over this
        micro-batch. So the parts of any split into micro-batches add up to the same loss.
    grpo     mean over rows of the mean over each row's tokens      DeepSeekMath eq. 3
    bnpo     sum / tokens of this process's rows in the step        (TRL: of each micro-batch)
    dr_grpo  sum / (rows * max_completion_length), a constant       arXiv 2503.20783, section 3.2
    dapo     sum / tokens of the step over all ranks                arXiv 2503.14476, eq. 12

    A row of 1 token with loss 3 beside one of 3 tokens with loss 1: grpo (3 + 1) / 2 = 2,
    bnpo and dapo (3 + 3) / 4 = 1.5, dr_grpo with length 6 (3 + 3) / 12 = 0.5.

    Rows cut by length (mask_truncated_completions) are masked and counted in neither `rows` nor
    `tokens`; TRL does count them as rows, which shrinks the step where many were cut (to have
    that, count them). A row that is empty for any other reason counts as a row.
    """
    per_row = per_token_loss.masked_fill(~mask, 0.0).sum(dim=1)  # [N]
    if loss_type == "grpo":
        return (per_row / mask.sum(dim=1).clamp(min=1)).sum() / max(rows, 1)
    if loss_type in ("bnpo", "dapo"):
        return per_row.sum() / max(tokens, 1)
    if loss_type == "dr_grpo":
        return per_row.sum() / (max(rows, 1) * max_completion_length)
    raise ValueError(f"loss_type is grpo, bnpo, dr_grpo or dapo, not {loss_type!r}")
