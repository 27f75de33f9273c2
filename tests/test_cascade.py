"""Attention in pieces against plain softmax over all keys at once, forward and backward."""

import pytest
import torch

from grpo import cascade
from grpo.cascade import (
    Piece,
    cascade_attention,
    flash_backward,
    flash_forward,
    matmul_backward,
    matmul_forward,
)

H, K, D = 4, 2, 8  # heads, key-value heads, numbers a head
SCALE = 0.3


def heads(count, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, h, D, generator=generator, dtype=dtype) for h in (H, K, K)]


def plain(query, key, value, visible):
    """visible [T, T]: query i sees key j."""
    key, value = (x.repeat_interleave(H // K, dim=1) for x in (key, value))
    score = torch.einsum("ihd,jhd->hij", query * SCALE, key)
    weight = score.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weight, value)


# An opening of 3, two prompts of 2, completions of 4 and 1 for the first, of 2 for the other.
OPENING, PROMPTS, ROWS = (
    slice(0, 3),
    [slice(3, 5), slice(5, 7)],
    [(7, 4, 0), (11, 1, 0), (12, 2, 1)],
)
TOKENS = 14


def family():
    """(pieces, visible) of the little tree above."""
    places = torch.tensor([[7, 8, 9, 10], [11, 11, 11, 11], [12, 13, 12, 12]])
    real = torch.tensor([[True] * 4, [True] + [False] * 3, [True, True, False, False]])
    prompts = torch.tensor([[3, 4], [5, 6]])
    asking = torch.tensor([[7, 8, 9, 10, 11], [12, 13, 12, 12, 12]])
    pieces = [
        Piece(OPENING, OPENING, True),
        Piece(slice(3, TOKENS), OPENING, False),
        Piece(PROMPTS[0], PROMPTS[0], True),
        Piece(PROMPTS[1], PROMPTS[1], True),
        Piece(asking, prompts, False, torch.tensor([[True] * 5, [True] * 2 + [False] * 3])),
        Piece(places, places, True, real),
    ]
    visible = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    visible[:, OPENING] = True
    for start, length, prompt in ROWS:
        visible[start : start + length, PROMPTS[prompt]] = True
        visible[start : start + length, start : start + length] = True
    for prompt in PROMPTS:
        visible[prompt, prompt] = True
    return pieces, visible & torch.ones_like(visible).tril()


@pytest.mark.parametrize("budget", [1, 40, 10**6], ids=["a query at a time", "blocks", "whole"])
def test_pieces_are_the_whole(budget, monkeypatch):
    monkeypatch.setitem(cascade.SCORES_BUDGET, "cpu", budget)
    monkeypatch.setattr(cascade, "LEAST_QUERIES", 1)
    pieces, visible = family()
    inputs = [x.requires_grad_() for x in heads(TOKENS)]
    weight = torch.randn(TOKENS, H, D, dtype=torch.float64)
    ours, wanted = cascade_attention(*inputs, pieces, SCALE), plain(*inputs, visible)
    assert torch.allclose(ours, wanted, rtol=0, atol=1e-12)
    mine = torch.autograd.grad((ours * weight).sum(), inputs)
    theirs = torch.autograd.grad((wanted * weight).sum(), inputs)
    for name, a, b in zip(("query", "key", "value"), mine, theirs, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12), name


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_lower_precision_is_off_by_rounding_only(dtype, bound):
    pieces, visible = family()
    inputs = [x.to(dtype).requires_grad_() for x in heads(TOKENS)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    ours, wanted = cascade_attention(*inputs, pieces, SCALE), plain(*exact, visible)
    assert (ours - wanted).abs().max() < bound
    mine = torch.autograd.grad(ours.sum(), inputs)
    theirs = torch.autograd.grad(wanted.sum(), exact)
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == dtype and (a - b).norm() < bound * b.norm().clamp(min=1)


def test_large_scores_of_padding_do_not_overflow():
    """A padded query stands for its row's first token and would see later keys: exp(score minus
    the first token's log-sum-exp) was infinite, and 0 x inf is NaN in the gradient."""
    places = torch.tensor([[0, 1, 2], [3, 3, 3]])
    real = torch.tensor([[True] * 3, [True, False, False]])
    inputs = heads(4, torch.float32)
    inputs[1][:] = torch.tensor([0.0, 500.0, 500.0, -500.0])[:, None, None]
    inputs = [x.requires_grad_() for x in inputs]
    cascade_attention(*inputs, [Piece(places, places, True, real)], SCALE).sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


@pytest.mark.parametrize("causal", [True, False])
def test_the_kernels_of_cuda_are_called_as_they_want(causal):
    """Shapes only: on the meta device torch checks the arguments and computes nothing."""
    query = torch.empty(2, 5, H, 64, dtype=torch.bfloat16, device="meta")
    key = torch.empty(2, 5 if causal else 7, K, 64, dtype=torch.bfloat16, device="meta")
    for forward, backward in ((flash_forward, flash_backward), (matmul_forward, matmul_backward)):
        out, lse = forward(query, key, key, causal, SCALE)
        assert out.shape == query.shape and lse.shape == query.shape[:3]
        assert lse.dtype == torch.float32
        grads = backward(query, query, key, key, out, lse, causal, SCALE)
        assert [g.shape for g in grads] == [query.shape, key.shape, key.shape]
