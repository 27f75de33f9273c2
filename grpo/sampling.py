"""Logits -> the next token of every row, and its log-probability.

The log-prob returned is that of the tempered distribution over the FULL vocabulary, truncated or
not: the scorer knows nothing of top-k or top-p, and if the two disagreed the first ratio of every
token would be the kept mass instead of 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo.logprobs import at_least_float32, tempered_log_softmax

BLOCK = 256  # about the root of a vocabulary: as many blocks as there are tokens in one


@dataclass
class Sampling:
    """How a token is drawn. Log-probs are always of the tempered, untruncated distribution."""

    temperature: float = 1.0  # 0 takes the most probable token
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off


def draw_tokens(
    logits: Tensor, sampling: Sampling, uniforms: Tensor | None
) -> tuple[Tensor, Tensor]:
    """sample() with the settings of a Sampling. uniforms: [R], None only for temperature 0."""
    return sample(
        logits,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        uniforms=uniforms,
    )


def sample(
    logits: Tensor,  # [R, V]
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    generator: torch.Generator | None = None,
    uniforms: Tensor | None = None,  # [R] in [0, 1)
) -> tuple[Tensor, Tensor]:  # [R] int64, [R] float32
    """One token a row: temperature, then top-k, then top-p, then min-p (see filter_logits).

    temperature 0 takes the most probable token and reports its untempered log-prob.
    generator: on the CPU whatever the device of the logits, so that a seed means the same tokens
        everywhere and a checkpoint can restore it. uniforms: given instead of it where the rows
        have random streams of their own.
    A row with NaN in its logits comes back with a NaN log-prob. Nothing here waits for the GPU.
    """
    if temperature == 0:
        tokens = at_least_float32(logits).argmax(dim=-1)  # [R], the first of equals
        everything = tempered_log_softmax(logits, temperature)  # [R, V]
        return tokens, everything.gather(1, tokens[:, None]).squeeze(1)
    if uniforms is None:
        uniforms = torch.rand(len(logits), generator=generator, dtype=torch.float64)
    # No log-softmax of everything: passes over the vocabulary cost a small model much of its step.
    scaled = at_least_float32(logits) / temperature  # [R, V]
    top = scaled.amax(dim=-1, keepdim=True)  # [R, 1]
    probabilities = scaled.softmax(dim=-1)
    log_total = -probabilities.amax(dim=-1, keepdim=True).log()  # of exp(scaled - top)
    kept = filter_logits(scaled, top_k, top_p, min_p)  # [R, V], `scaled` itself if all are off
    weights = probabilities if kept is scaled else kept.softmax(dim=-1)
    tokens = draw(weights, uniforms.to(logits.device, non_blocking=True))  # [R]
    drawn = at_least_float32(logits.gather(1, tokens[:, None])) / temperature  # [R, 1]
    return tokens, (drawn - top - log_total).squeeze(1)


def filter_logits(
    logits: Tensor,  # [R, V] tempered; log-probs do as well
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:  # [R, V]
    """Sets the logits of the tokens that may not be drawn to -inf. None (or 0, 1, 0) is off.

    top_k: the k most probable.
    top_p: of those, the fewest whose mass reaches p, the token that crosses p included.
    min_p: of those, the ones at least min_p times as probable as the most probable.
    Probabilities (.5, .3, .2): top_p = .6 keeps two, for .5 alone does not reach it; min_p = .5
    keeps two, .2 being less than half of .5. The most probable token is always kept.
    """
    cut_k = bool(top_k) and top_k < logits.shape[-1]
    cut_p = top_p is not None and top_p < 1
    if cut_k or cut_p:
        if cut_k:
            values, ids = logits.topk(top_k, dim=-1)  # [R, K], falling
        else:
            values, ids = logits.sort(dim=-1, descending=True, stable=True)  # [R, V], falling
        if cut_p:
            mass = values.double().softmax(dim=-1)  # [R, K]
            crossed = mass.cumsum(dim=-1) - mass >= top_p  # p was reached before this token
            crossed[:, 0] = False
            values = values.masked_fill(crossed, -torch.inf)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, ids, values)
    if min_p:
        floor = logits.amax(dim=-1, keepdim=True) + math.log(min_p)  # [R, 1]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which the running sum of the weights passes u * total. [R, V], [R] -> [R].

    weights: not below 0, they need not add up to 1. A token of weight 0 is never drawn, not even
    where rounding lets u * total reach the end of the sum.
    Two levels, blocks first and then inside the chosen block: one random number a row and short
    running sums. torch.multinomial draws a number for each of the R * V entries, which at
    32 x 49,152 takes a CPU longer than the matrix products of a small model.
    """
    vocabulary = weights.shape[-1]
    whole = vocabulary // BLOCK * BLOCK
    sums = weights[:, :whole].unflatten(-1, (-1, BLOCK)).sum(dim=-1)  # [R, B]
    sums = torch.cat([sums, weights[:, whole:].sum(dim=-1, keepdim=True)], dim=-1).double()
    running = sums.cumsum(dim=-1)  # [R, B + 1]
    # A float32 uniform stands for a cell 2**-24 wide; its middle is taken. The edge itself would be
    # the first token however improbable, and u = 0 does come up once in 17 million tokens.
    middle = uniforms.double() * (1 - 2**-24) + 2**-25  # [R]
    target = middle[:, None] * running[:, -1:]  # [R, 1]
    block = _first_above(running, target, sums)  # [R, 1]

    size = sums.gather(1, block)  # [R, 1]
    share = (target - running.gather(1, block) + size) / size  # [R, 1] of the block, in [0, 1)
    ids = block * BLOCK + torch.arange(BLOCK, device=weights.device)  # [R, BLOCK]
    inside = weights.gather(1, ids.clamp(max=vocabulary - 1))  # [R, BLOCK]
    inside = inside.masked_fill(ids >= vocabulary, 0).double()  # the last block may be short
    running = inside.cumsum(dim=-1)  # [R, BLOCK], its end is `size` but for rounding
    offset = _first_above(running, share * running[:, -1:], inside)  # [R, 1]
    return (block * BLOCK + offset).squeeze(1)


def _first_above(running: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """[R, 1]: the first index of positive weight whose running sum exceeds the target.

    The last one of positive weight if rounding left the target at or above the whole sum; 0 if
    there is none (NaN weights). running, weights [R, K], target [R, 1].
    """
    index = torch.arange(weights.shape[-1], device=weights.device)  # [K]
    positive = weights > 0  # [R, K]
    last = torch.where(positive, index, 0).amax(dim=-1, keepdim=True)
    above = positive & (running > target)
    first = torch.where(above, index, len(index)).amin(dim=-1, keepdim=True)
    return torch.minimum(first, last)
