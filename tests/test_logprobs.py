"""Per-token log-probs and entropy: equal to the plain formula, and never the full logits."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import grpo.logprobs
from grpo.logprobs import tempered_log_softmax, token_logprobs

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parent / "cases/generation_cases.json").read_text())[
        "cases"
    ]
}
TEMPERED = ["sampling/temperature-0.5", "sampling/temperature-2.0"]
VOCABULARY, WIDTH, ROWS = 13, 5, 11


class Rows(nn.Linear):
    """A head that remembers of how many rows at a time logits were asked for."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def forward(self, hidden):
        self.seen.append(len(hidden))
        return super().forward(hidden)


def example(dtype=torch.float64, rows=ROWS, bias=True):
    torch.manual_seed(0)
    head = Rows(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    hidden = torch.randn(rows, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(VOCABULARY, (rows,))
    return hidden, head, targets


def plain(hidden, head, targets, temperature):
    everything = (head(hidden) / temperature).log_softmax(-1)
    entropy = torch.distributions.Categorical(logits=everything.detach()).entropy()
    return everything[torch.arange(len(targets)), targets], entropy


@pytest.mark.parametrize("chunk_size", [1, 3, 11, 1000, None])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_values_and_gradients_are_the_plain_ones(chunk_size, temperature):
    hidden, head, targets = example()
    weight = torch.randn(ROWS, dtype=torch.float64)
    results = []
    for function in (plain, lambda *args: token_logprobs(*args, chunk_size=chunk_size)):
        logprobs, entropy = function(hidden, head, targets, temperature)
        gradients = torch.autograd.grad((weight * logprobs).sum(), (hidden, *head.parameters()))
        results.append((logprobs, entropy, *gradients))
    for reference, ours in zip(*results, strict=True):
        assert ours.dtype == torch.float64
        assert torch.allclose(reference, ours, rtol=0, atol=1e-12)


def test_logits_are_held_a_chunk_at_a_time():
    """11 rows, 4 at a time, and once more in the backward; all at once ran out of memory."""
    hidden, head, targets = example()
    logprobs, _ = token_logprobs(hidden, head, targets, 1.0, chunk_size=4)
    assert head.seen == [4, 4, 3]
    logprobs.sum().backward()
    assert sorted(head.seen[3:]) == [3, 4, 4], "the backward should recompute each chunk once"


def test_backward_keeps_no_logits():
    """Between forward and backward nothing the size of the vocabulary may be saved."""
    hidden, head, targets = example(rows=64)
    saved = []

    def keep(tensor):
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(hidden, head, targets, 1.0, chunk_size=8)
    # Only the inputs of the chunks: rows * WIDTH numbers, the head's own weights, the targets.
    assert max(saved, default=0) <= 64 * WIDTH


def test_the_budget_sets_the_chunk(monkeypatch):
    """A small vocabulary takes one chunk; a large one as many rows as fit, at least one."""
    budgets = {VOCABULARY * 100: [ROWS], VOCABULARY * 4 + 1: [4, 4, 3], 2: [1] * ROWS}
    for budget, chunks in budgets.items():
        monkeypatch.setattr(grpo.logprobs, "LOGITS_BUDGET", {"cpu": budget, "cuda": 10**6})
        hidden, head, targets = example()
        with torch.no_grad():
            token_logprobs(hidden, head, targets, 1.0)
        assert head.seen == chunks


def test_no_recompute_where_it_would_win_nothing():
    """Without gradient, or with a single chunk, each row goes through the head once."""
    hidden, head, targets = example()
    with torch.no_grad():
        token_logprobs(hidden, head, targets, 1.0, chunk_size=4)
    assert head.seen == [4, 4, 3]
    hidden, head, targets = example()
    token_logprobs(hidden, head, targets, 1.0)[0].sum().backward()
    assert head.seen == [ROWS]


def test_no_rows():
    hidden, head, targets = example(rows=0)
    logprobs, entropy = token_logprobs(hidden, head, targets, 1.0)
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert hidden.grad.shape == (0, WIDTH)


def test_entropy():
    """Flat: log V. Certain: 0, also where the other tokens have probability exactly 0."""
    head = nn.Linear(1, 4, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.0], [-1000.0], [-1000.0], [-torch.inf]]))
    hidden = torch.tensor([[1.0]])
    _, entropy = token_logprobs(hidden, head, torch.tensor([0]), 1.0)
    assert entropy.tolist() == [0.0] and not entropy.requires_grad
    nn.init.zeros_(head.weight)
    _, entropy = token_logprobs(hidden, head, torch.tensor([0]), 1.0)
    assert entropy.item() == pytest.approx(math.log(4), abs=1e-6)


def test_entropy_is_left_out_on_request():
    hidden, head, targets = example()
    logprobs, entropy = token_logprobs(hidden, head, targets, 1.0, 4, with_entropy=False)
    assert entropy is None and logprobs.shape == (ROWS,)


def through_a_head(logits: list[float], temperature: float, dtype=torch.float32) -> torch.Tensor:
    """The log-prob of every token where the head gives exactly these logits, [V]."""
    head = nn.Linear(1, len(logits), bias=False, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.tensor(logits)[:, None])
    hidden = torch.ones(len(logits), 1, dtype=dtype)
    return token_logprobs(hidden, head, torch.arange(len(logits)), temperature)[0].detach()


@pytest.mark.parametrize("name", TEMPERED)
def test_temperature_case(name):
    """logits / T before the softmax, not log-probs / T after it, and not left out."""
    case = CASES[name]
    got = through_a_head(case["input"]["logits"], case["input"]["temperature"])
    atol = case["tolerance"]["abs"]
    assert torch.allclose(got, torch.tensor(case["expected"]["logprobs"]), rtol=0, atol=atol)
    for mistake, wrong in case["wrong_values"].items():
        assert not torch.allclose(got, torch.tensor(wrong), rtol=0, atol=1e-3), mistake


def test_bfloat16_logits_are_scored_in_float32():
    case = CASES["numerics/half-precision-logits-4"]
    got = through_a_head(case["input"]["logits_bfloat16"], 1.0, torch.bfloat16)
    assert got.dtype == torch.float32
    atol = case["tolerance"]["abs"]
    assert torch.allclose(got, torch.tensor(case["expected"]["logprobs"]), rtol=0, atol=atol)
    wrong = torch.tensor(case["wrong_values"]["rounded_to_bfloat16"])
    assert not torch.allclose(got, wrong, rtol=0, atol=atol)


def test_temperature_zero_scores_untempered():
    """Greedy completions are scored at temperature 1; a division by 0 would make them NaN."""
    logits = torch.randn(3, 7)
    assert torch.equal(tempered_log_softmax(logits, 0), tempered_log_softmax(logits, 1))


@pytest.mark.parametrize("confidence", [0.5, 0.99, 0.999])
def test_a_confident_tokens_gradient_is_not_lost_in_bfloat16(confidence):
    """W[target] less the mean of W, each rounded, left nothing but rounding at 0.999."""
    torch.manual_seed(0)
    weight, target = torch.randn(500, 32).bfloat16(), torch.arange(40)
    head = nn.Linear(32, 500, bias=False).requires_grad_(False)
    head.weight.data = weight
    scale = torch.ones(40, 1)
    for _ in range(200):  # along W[target], as far as gives the target this probability
        found = (weight[target].float() * scale @ weight.float().T).softmax(-1)
        found = found.gather(1, target[:, None])
        scale = scale * torch.where(found < confidence, 1.02, 0.98)
    hidden = (weight[target].float() * scale).bfloat16()
    ours, exact = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    token_logprobs(ours, head, target, 1.0)[0].sum().backward()
    logits = exact @ weight.double().T
    logits.log_softmax(-1).gather(1, target[:, None]).sum().backward()
    error = (ours.grad - exact.grad).norm(dim=1) / exact.grad.norm(dim=1)
    assert error.median() < 0.06
