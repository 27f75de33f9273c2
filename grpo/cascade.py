"""Attention over keys that many queries share, forward and backward, without ever copying them.

A token of a completion attends to three runs of keys: the opening that all prompts have in common,
the rest of its prompt, and its own completion so far. Written as one mask, the first two would be
copied for every completion; in pieces, each run is read where it lies, once for all its queries.
Every piece gives its softmax over its own keys and that softmax's log-sum-exp, with which the
pieces add up exactly (Hydragen, arXiv 2402.05099, section 3.2). The gradient needs no more than
the joint log-sum-exp: with it every piece's weights are those of the whole (FlashAttention-2,
arXiv 2307.08691, algorithm 2, with the keys in pieces instead of blocks).

Letters in the shapes: T tokens; B rows of a piece, n queries and m keys each; H query heads, K
key-value heads, G = H / K, D numbers a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Scores held at a time by the products written out; on a CPU so few that they stay in its cache,
# except for long rows: a product wants a number of queries.
SCORES_BUDGET = {"cpu": 2**18, "cuda": 2**25}
LEAST_QUERIES = 128


@dataclass(frozen=True)
class Piece:
    """Some queries and the run of keys that each of them sees.

    queries, keys: places of the T tokens, a slice (one row) or [B, n] and [B, m]. causal: query i
    sees keys 0..i of its row, else all. real: [B, n], False where a short row is padded.
    """

    queries: slice | Tensor
    keys: slice | Tensor
    causal: bool
    real: Tensor | None = None

    @cached_property
    def real_places(self) -> tuple[Tensor, Tensor]:
        """Of the real queries: their places in the flattened rows, and among the T tokens. Indices,
        since a mask would have to be counted at every layer, for which a GPU is waited for."""
        flat = self.real.flatten().nonzero().squeeze(1)
        return flat, self.queries.flatten()[flat]


def cascade_attention(
    query: Tensor,  # [Tq, H, D]
    key: Tensor,  # [T, K, D]
    value: Tensor,  # [T, K, D]
    pieces: Sequence[Piece],
    scaling: float,
) -> Tensor:  # [Tq, H, D]
    """softmax(query . key * scaling) value, each query over the keys of all its pieces."""
    return _Cascade.apply(query, key, value, pieces, scaling)


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, pieces, scaling):
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros(query.shape, dtype=wide)  # [Tq, H, D]
        lse = query.new_full(query.shape[:2], -torch.inf, dtype=wide)  # [Tq, H]
        forward, _ = _kernels(query)
        for piece in pieces:
            part, part_lse = forward(
                _rows(query, piece.queries),
                _rows(key, piece.keys),
                _rows(value, piece.keys),
                piece.causal,
                scaling,
            )
            places = piece.queries
            if isinstance(places, slice):
                part, part_lse = part[0], part_lse[0]
            elif piece.real is not None:
                flat, places = piece.real_places
                part, part_lse = part.flatten(0, 1)[flat], part_lse.flatten(0, 1)[flat]
            joint = torch.logaddexp(lse[places], part_lse)
            kept = (lse[places] - joint).exp()[..., None]
            out[places] = out[places] * kept + part * (part_lse - joint).exp()[..., None]
            lse[places] = joint
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.pieces, ctx.scaling = pieces, scaling
        return out

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, out, lse = ctx.saved_tensors
        grad_query = torch.zeros_like(query, dtype=lse.dtype)
        grad_key = torch.zeros_like(key, dtype=lse.dtype)
        grad_value = torch.zeros_like(value, dtype=lse.dtype)
        _, backward = _kernels(query)
        for piece in ctx.pieces:
            piece_lse = _rows(lse, piece.queries)
            if piece.real is not None:  # a padded query then has weight 0 everywhere
                piece_lse = piece_lse.masked_fill(~piece.real[..., None], torch.inf)
            grads = backward(
                _rows(grad_out, piece.queries),
                _rows(query, piece.queries),
                _rows(key, piece.keys),
                _rows(value, piece.keys),
                _rows(out, piece.queries),
                piece_lse,
                piece.causal,
                ctx.scaling,
            )
            targets = (grad_query, grad_key, grad_value)
            for target, places, grad in zip(
                targets, (piece.queries, piece.keys, piece.keys), grads, strict=True
            ):
                if isinstance(places, slice):
                    target[places] += grad[0]
                else:  # padded places repeat a real one, to which they add 0
                    target.index_add_(0, places.flatten(), grad.flatten(0, 1).to(target.dtype))
        return (
            grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype),
            None, None,
        )  # fmt: skip


def _rows(tensor: Tensor, places: slice | Tensor) -> Tensor:
    """[T, ..] → [B, n, ..]; a slice is one row."""
    return tensor[places][None] if isinstance(places, slice) else tensor[places]


def _kernels(query: Tensor):
    """(forward, backward) of one piece. The fused ones know neither float32 nor a CPU well: there,
    short products written out are two to five times as fast as torch's own flash kernel."""
    fused = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    fused = fused and torch.cuda.get_device_capability(query.device) >= (8, 0)
    return (flash_forward, flash_backward) if fused else (matmul_forward, matmul_backward)


# ---- written out in matrix products: any device, any dtype ---------------------------------------


def matmul_forward(query, key, value, causal, scaling):
    """query [B, n, H, D], key and value [B, m, K, D] → out [B, n, H, D], log-sum-exp [B, n, H]."""
    query, key, value = _by_head(query * scaling, key, value)
    outs, sums = [], []
    for start, stop, visible in _query_blocks(query, key, causal):
        scores = _scores(query[:, :, :, start:stop], key[:, :, :visible], causal, start)
        top = scores.amax(dim=-1, keepdim=True)
        weight = scores.sub_(top).exp_()  # [B, K, G, n', m']
        total = weight.sum(dim=-1, keepdim=True)
        part = _over_group(weight.to(value.dtype)) @ value[:, :, :visible]
        outs.append(part.view(*weight.shape[:-1], -1) / total)
        sums.append((top + total.log()).squeeze(-1))
    out, lse = torch.cat(outs, dim=3), torch.cat(sums, dim=3)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2, 3)


def matmul_backward(grad_out, query, key, value, out, lse, causal, scaling):
    """The gradients of query, key and value, given out and log-sum-exp over all pieces."""
    delta = (grad_out.to(lse.dtype) * out).sum(dim=-1)  # [B, n, H]
    heads = key.shape[2]
    grad_out = grad_out.unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)  # [B, K, G, n, D]
    lse, delta = (x.unflatten(2, (heads, -1)).permute(0, 2, 3, 1)[..., None] for x in (lse, delta))
    query, key, value = _by_head(query * scaling, key, value)
    grad_queries = []
    grad_key = torch.zeros_like(key, dtype=lse.dtype)
    grad_value = torch.zeros_like(value, dtype=lse.dtype)
    for start, stop, visible in _query_blocks(query, key, causal):
        block = slice(start, stop)
        asked, told = query[:, :, :, block], _over_group(grad_out[:, :, :, block])
        scores = _scores(asked, key[:, :, :visible], causal, start)
        weight = scores.sub_(lse[:, :, :, block]).exp_()  # [B, K, G, n', m']
        grad_weight = (told @ value[:, :, :visible].mT).view(weight.shape)
        flat_weight = _over_group(weight.to(query.dtype))
        grad_value[:, :, :visible] += flat_weight.mT @ told
        grad_scores = weight.mul_(grad_weight - delta[:, :, :, block])
        grad_scores = _over_group(grad_scores.to(query.dtype))
        grad_queries.append((grad_scores @ key[:, :, :visible]).view(asked.shape))
        grad_key[:, :, :visible] += grad_scores.mT @ _over_group(asked)
    grad_query = torch.cat(grad_queries, dim=3).permute(0, 3, 1, 2, 4).flatten(2, 3) * scaling
    return grad_query, grad_key.transpose(1, 2), grad_value.transpose(1, 2)


def _by_head(query, key, value):
    """[B, K, G, n, D], [B, K, m, D], [B, K, m, D]: heads first, as batched products want them."""
    query = query.unflatten(2, (key.shape[2], -1)).permute(0, 2, 3, 1, 4)
    return query, key.transpose(1, 2), value.transpose(1, 2)


def _over_group(x: Tensor) -> Tensor:
    """[B, K, G, n, ..] → [B, K, G n, ..]: the queries of one key-value head in one product."""
    return x.flatten(2, 3)


def _query_blocks(query, key, causal):
    """(start, stop, keys in sight): few enough queries at a time for SCORES_BUDGET scores."""
    batch, heads, group, queries, _ = query.shape
    keys = key.shape[2]
    budget = SCORES_BUDGET.get(query.device.type, SCORES_BUDGET["cuda"])
    size = max(LEAST_QUERIES // batch, budget // (batch * heads * group * keys), 1)
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        yield start, stop, stop if causal else keys


def _scores(query, key, causal, start):
    """[B, K, G, n', m'] in at least float32, -inf where a causal query may not look."""
    scores = (_over_group(query) @ key.mT).view(*query.shape[:-1], -1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if causal:
        count = scores.shape[-2]
        later = torch.ones(count, count, dtype=torch.bool, device=scores.device).triu(1)
        scores[..., start:].masked_fill_(later, -torch.inf)
    return scores


# ---- the fused kernels of CUDA -------------------------------------------------------------------


def flash_forward(query, key, value, causal, scaling):
    """As matmul_forward, by FlashAttention: it wants as many key heads as query heads."""
    query, key, value = _as_flash(query, key, value)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, causal, scale=scaling
    )
    return out.transpose(1, 2), lse.transpose(1, 2)


def flash_backward(grad_out, query, key, value, out, lse, causal, scaling):
    """As matmul_backward."""
    heads = key.shape[2]
    query, key, value = _as_flash(query, key, value)
    no_dropout = torch.empty(2, dtype=torch.uint64, device=query.device)  # never read
    grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_out.transpose(1, 2),
        query,
        key,
        value,
        out.transpose(1, 2),
        lse.transpose(1, 2).contiguous(),
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        causal,
        no_dropout,
        no_dropout,
        scale=scaling,
    )
    grad_query, grad_key, grad_value = (g.transpose(1, 2) for g in grads)
    grad_key, grad_value = (
        g.unflatten(2, (heads, -1)).sum(dim=3, dtype=lse.dtype) for g in (grad_key, grad_value)
    )
    return grad_query, grad_key, grad_value


def _as_flash(query, key, value):
    """[B, H, n, D] and twice [B, H, m, D]."""
    times = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(times, dim=2) for x in (key, value))
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
