"""Log-probabilities of given tokens, without ever holding the logits of all of them.

16 rows of 512 tokens over 151,936 words are 5 GB of float32 logits a copy, and training needs
several copies. The output head is therefore applied to a few rows at a time. Where its weights are
frozen, as with LoRA, the gradient for the hidden states is worked out at once, while the chunk's
probabilities are there, and kept for the backward pass: it is no larger than the hidden states.
Where the head is trained too, the backward pass applies it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo.folded import FoldedLinear

if TYPE_CHECKING:
    from grpo.packing import PackedBatch
    from grpo.policy import Policy

# Logits of one product: 2**23 numbers are 170 rows of a vocabulary of 49,152, or 16 MB in bfloat16.
# A GPU needs more rows to be busy.
LOGITS_BUDGET = {"cpu": 2**23, "cuda": 2**25}
# Of those, so many at a time go through the softmax, which passes over them again and again in
# float32: on a CPU few enough to stay in its cache, where each pass is some three times as fast.
SOFTMAX_BUDGET = {"cpu": 2**18, "cuda": 2**25}


def at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def tempered_log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) over the last dimension, in float32 (or float64 if given).

    The one definition of a log-probability here: sampler, policy, old policy and reference all use
    it. Otherwise the first ratio would not be 1 (the truncations of the sampler are left out for
    the same reason). temperature 0 is greedy decoding, whose log-probs are those at temperature 1.
    """
    logits = at_least_float32(logits)
    if temperature not in (0, 1):
        logits = logits / temperature
    return logits.log_softmax(dim=-1)


def token_logprobs(
    hidden: Tensor,  # [M, D] the decoder's output at the positions that predict `targets`
    head: nn.Module | FoldedLinear,  # [.., D] -> [.., V], with .out_features == V
    targets: Tensor,  # [M] token ids
    temperature: float,
    chunk_size: int | None = None,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:  # [M], [M]
    """log pi(target | context) and the entropy of pi, in nats, float32 (float64 for float64 input).

    chunk_size: rows of logits held at a time; by default as many as LOGITS_BUDGET allows.
    The log-probs carry the gradient for `hidden` and `head`; the entropy carries none, and is None
    unless asked for. A model that rescales its logits after its head (Gemma 2, Cohere) needs a
    head that does so too.
    """
    chunk_size = chunk_size or _rows_within(LOGITS_BUDGET, hidden, head.out_features)
    plain = type(head) in (nn.Linear, FoldedLinear) and not head.weight.requires_grad
    if plain and torch.is_grad_enabled() and hidden.requires_grad:
        logprobs, entropy = _FrozenHead.apply(hidden, head, targets, temperature, chunk_size)
        return logprobs, entropy if with_entropy else None
    # A single chunk is within the budget anyway: keep it, there is nothing to win by recomputing.
    recompute = torch.is_grad_enabled() and len(hidden) > chunk_size

    logprobs, entropies = [], []
    # split, not slices: the backward of a slice writes zeros for all the other rows, once a chunk.
    for rows, ids in zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True):
        args = (rows, head, ids, temperature, with_entropy)
        if recompute:  # no dropout in here, so there is no random state to keep
            out = checkpoint(_chunk, *args, use_reentrant=False, preserve_rng_state=False)
        else:
            out = _chunk(*args)
        logprobs.append(out[0])
        entropies.append(out[1])
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


def _rows_within(budget: dict[str, int], tensor: Tensor, vocabulary: int) -> int:
    numbers = budget.get(tensor.device.type, budget["cuda"])
    return max(1, numbers // vocabulary)


def _chunk(
    hidden: Tensor, head: nn.Module, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """One chunk of token_logprobs: hidden [R, D], targets [R] -> log-probs [R], entropy [R]."""
    logprobs, entropies = [], []
    for everything, ids in _log_softmax_in_parts(head(hidden), targets, temperature):
        logprobs.append(everything.gather(1, ids[:, None]).squeeze(1))
        if with_entropy:
            with torch.no_grad():
                entropies.append(_entropy(everything, everything.exp()))
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


def _log_softmax_in_parts(logits: Tensor, targets: Tensor, temperature: float):
    """logits [R, V], targets [R] → (log pi [r, V], targets [r]) of SOFTMAX_BUDGET's few rows."""
    few = _rows_within(SOFTMAX_BUDGET, logits, logits.shape[1])
    for part, ids in zip(logits.split(few), targets.split(few), strict=True):
        yield tempered_log_softmax(part, temperature), ids


def _entropy(everything: Tensor, weights: Tensor) -> Tensor:
    """[R] from log-probs and probabilities [R, V]."""
    # A token of probability 0 adds 0, not 0 * -inf: its log is raised to a finite number.
    finite = everything.clamp(min=torch.finfo(everything.dtype).min)
    return -(weights * finite).sum(dim=1)


class _FrozenHead(torch.autograd.Function):
    """Log-prob and entropy of every row, [M] each; no gradient for the head, none of the entropy.

    d log pi(target) / d hidden = sum over v of (1[v = target] - pi(v)) W[v] / temperature. The
    difference is formed before the product: where pi(target) is near 1, W[target] less the mean of
    W, each rounded to bfloat16, leaves nothing but rounding.
    """

    @staticmethod
    def forward(ctx, hidden, head, targets, temperature, chunk_size):
        logprobs, entropies, gradients = [], [], []
        for rows, ids in zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True):
            logits, start = head(rows), 0  # [R, V]
            for everything, few in _log_softmax_in_parts(logits, ids, temperature):
                logprobs.append(everything.gather(1, few[:, None]).squeeze(1))
                weights = everything.exp()
                entropies.append(_entropy(everything, weights))
                weights.scatter_add_(1, few[:, None], -torch.ones_like(weights[:, :1]))
                logits[start : start + len(few)] = weights  # the logits are not needed any more
                start += len(few)
            gradients.append(logits @ head.weight / -(temperature or 1))  # [R, D]
        ctx.save_for_backward(torch.cat(gradients))
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx, grad_logprobs, _):
        (gradients,) = ctx.saved_tensors
        return (grad_logprobs[:, None] * gradients).to(gradients.dtype), *[None] * 4


def completion_logprobs(
    policy: Policy, batch: PackedBatch, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:  # [n, C], [n, C]
    """Log-prob (and entropy) of every completion token of a packed batch; 0 outside its mask."""
    hidden = policy.hidden_states(batch.input_ids, batch.position_ids, batch.layout)[0]  # [T, D]
    predicting = hidden[batch.source]  # [M, D]
    logp, entropy = token_logprobs(
        predicting, policy.head, batch.targets, temperature, with_entropy=with_entropy
    )
    return batch.unpack(logp), None if entropy is None else batch.unpack(entropy)
