"""Packed batches against plain rows in float64: log-probs, loss and gradients, for any split."""

import itertools
import math
import random

import pytest
import torch
from conftest import KINDS
from tiny import gradients_of, plain_logprobs, ragged_prompts, tiny_policy

from grpo.attention import common_length
from grpo.logprobs import completion_logprobs
from grpo.loop import grpo_loss
from grpo.packing import Group, micro_batches, pack

BUDGETS = [1, 7, 16, 30, 10_000]


def random_groups(seed=0, count=4, most=4, longest=6) -> list[Group]:
    """Ragged prompts with 1 .. most completions of 1 .. longest tokens; rows count up."""
    rng, rows = random.Random(seed), itertools.count()
    return [
        Group(
            prompt,
            completions := [
                [rng.randrange(3, 32) for _ in range(rng.randint(1, longest))]
                for _ in range(rng.randint(1, most))
            ],
            [next(rows) for _ in completions],
        )
        for prompt in ragged_prompts(count, seed=seed)
    ]


def rows_of(groups) -> list[tuple[list[int], list[int]]]:
    return [(g.prompt, c) for g in groups for c in g.completions]


# ---- what is packed ------------------------------------------------------------------------------


def test_the_batch_of_the_docstring():
    a, b, c, u, v, w, x, y, z = range(3, 12)
    batch = pack([Group([a, b], [[x, y, z], [u]], [0, 1]), Group([c], [[v, w]], [2])], "cpu")
    assert batch.input_ids.tolist() == [[a, b, c, x, y, v]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 2, 3, 1]]
    assert batch.targets.tolist() == [x, y, z, u, v, w]
    assert batch.source.tolist() == [1, 3, 4, 1, 2, 5]
    assert batch.mask.tolist() == [[True] * 3, [True, False, False], [True, True, False]]
    assert batch.rows.tolist() == [0, 1, 2]


def test_unpacking_puts_every_token_back_and_carries_the_gradient():
    batch = pack(random_groups(), "cpu")
    values = torch.arange(1.0, len(batch.targets) + 1, requires_grad=True)
    padded = batch.unpack(values)
    assert padded.shape == batch.mask.shape
    assert torch.equal(padded[batch.mask], values) and not padded[~batch.mask].any()
    (padded * padded.detach()).sum().backward()
    assert torch.equal(values.grad, values.detach())


def test_the_mask_knows_lengths_not_token_ids():
    """Where pad, stop and ordinary tokens share ids, a mask by id hides the stop token."""
    batch = pack([Group([2, 0, 2], [[0, 2, 2], [2]], [0, 1])], "cpu")
    assert batch.mask.tolist() == [[True] * 3, [True, False, False]]
    assert batch.targets.tolist() == [0, 2, 2, 2], "the stop token is learned as the last one"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@torch.no_grad()
def test_logprobs_are_those_of_plain_rows(kind, temperature):
    policy = tiny_policy(kind, dtype=torch.float64)
    groups = random_groups(seed=3)
    batch = pack(groups, "cpu")
    logp, entropy = completion_logprobs(policy, batch, temperature, with_entropy=True)
    for i, (prompt, completion) in enumerate(rows_of(groups)):
        wanted = plain_logprobs(policy, prompt, completion, temperature)
        assert torch.allclose(logp[i, : len(completion)], wanted, rtol=0, atol=1e-9)
    assert not logp[~batch.mask].any() and not entropy[~batch.mask].any()
    assert (entropy[batch.mask] > 0).all() and (entropy <= math.log(32)).all()


def test_completions_of_one_token_each():
    """Nothing of them is input: the prompt's last token alone predicts them all."""
    policy = tiny_policy(dtype=torch.float64)
    groups = [Group([5, 6, 7], [[8], [9], [2]], [0, 1, 2]), Group([4], [[2]], [3])]
    batch = pack(groups, "cpu")
    assert batch.input_ids.shape == (1, 4) and batch.mask.shape == (4, 1)
    logp, _ = completion_logprobs(policy, batch, 1.0)
    logp.sum().backward()
    for i, (prompt, completion) in enumerate(rows_of(groups)):
        wanted = plain_logprobs(policy, prompt, completion)
        assert torch.allclose(logp[i], wanted, rtol=0, atol=1e-10)
    assert all(g.isfinite().all() for g in gradients_of(policy).values())


# ---- micro-batches -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_row_is_in_exactly_one_micro_batch(budget, seed):
    groups = random_groups(seed, count=5)
    wanted = rows_of(groups)
    seen = []
    for batch in micro_batches(groups, budget, "cpu"):
        rows, lengths = batch.rows.tolist(), batch.mask.sum(dim=1).tolist()
        assert batch.targets.split(lengths)[0].tolist() == wanted[rows[0]][1]
        for row, ids in zip(rows, batch.targets.split(lengths), strict=True):
            assert ids.tolist() == wanted[row][1]
        ids, starts = batch.input_ids[0].tolist(), batch.position_ids[0].tolist()
        assert len(ids) <= budget or len(rows) == 1, "only a single row may be over the budget"
        prompts = len(batch.layout.prompt_lengths)
        assert starts[: sum(batch.layout.prompt_lengths)].count(0) == prompts
        for row, prompt in zip(rows, batch.layout.of_prompt, strict=True):
            start = sum(batch.layout.prompt_lengths[:prompt])
            length = batch.layout.prompt_lengths[prompt]
            assert ids[start : start + length] == wanted[row][0], "the prompt is repeated"
        seen += rows
    assert seen == list(range(len(wanted)))


def test_a_budget_that_fits_all_makes_one_batch_with_each_prompt_once():
    groups = random_groups()
    (batch,) = micro_batches(groups, 10_000, "cpu")
    assert len(batch.layout.prompt_lengths) == len(groups)
    assert list(micro_batches([], 100, "cpu")) == []


def test_a_group_is_split_only_where_the_budget_ends():
    groups = [Group([3] * 4, [[4] * 3] * 4, [0, 1, 2, 3])]
    parts = [b.rows.tolist() for b in micro_batches(groups, 10, "cpu")]
    assert parts == [[0, 1], [2, 3]]  # 4 + 3 + 3 = 10
    assert [b.rows.tolist() for b in micro_batches(groups, 9, "cpu")] == [[0], [1], [2], [3]]


def test_one_long_row_is_not_padded_onto_many_short_ones():
    """The token budget alone let 1 row of 40 and 20 of 2, 80 in all, become 21 x 40 when padded."""
    groups = [Group([3], [[4] * 2] * 20 + [[4] * 40], list(range(21)))]
    batches = list(micro_batches(groups, 100, "cpu"))
    assert [b.rows.tolist() for b in batches] == [list(range(20)), [20]]
    # What is over the budget by itself still goes through, alone.
    assert [len(b.rows) for b in micro_batches(groups, 5, "cpu")][-1] == 1


def test_a_common_opening_stands_once_a_batch(monkeypatch):
    """A system prompt before every question. Counted in the budget, one of 1,500 tokens left room
    for a single row of 100 a batch, and was computed for each of 32 rows."""
    monkeypatch.setattr("grpo.attention.SHORTEST_COMMON", 3)
    groups = [Group([7, 8, 9, q], [[4, 5], [6]], [2 * i, 2 * i + 1]) for i, q in enumerate([3, 4])]
    (batch,) = micro_batches(groups, 8, "cpu")  # 2 x (1 + 3)
    assert batch.input_ids.tolist() == [[7, 8, 9, 3, 4, 4, 4]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 3, 4, 4]]
    assert batch.source.tolist() == [3, 5, 3, 4, 6, 4]
    assert len(list(micro_batches(groups, 7, "cpu"))) == 2
    same = [Group([7, 8, 9], g.completions, g.rows) for g in groups]
    assert common_length([g.prompt for g in same]) == 0, "each prompt keeps a token of its own"


# ---- loss and gradient ---------------------------------------------------------------------------


def written_out_loss(logps, olds, references, advantages, lengths, settings) -> torch.Tensor:
    """The formulas with loops over rows and tokens, for rows as lists of scalar tensors."""
    low, high = 1 - settings["epsilon"], 1 + (settings["epsilon_high"] or settings["epsilon"])
    rows = []
    for logp, old, reference, advantage in zip(logps, olds, references, advantages, strict=True):
        ratios = torch.exp(logp - old)
        if settings["importance_sampling_level"] == "sequence":
            ratios = torch.exp((logp - old).mean()).expand(len(logp))
        losses = []
        for t, ratio in enumerate(ratios):
            free = ratio
            if settings["delta"] is not None:
                free = torch.minimum(ratio, torch.tensor(settings["delta"]))
            clipped = torch.clamp(ratio, low, high)
            loss = -torch.minimum(free * advantage, clipped * advantage)
            d = reference[t] - logp[t]
            losses.append(loss + settings["beta"] * (torch.exp(d) - d - 1))
        rows.append(torch.stack(losses))
    everything = sum(r.sum() for r in rows)
    return {
        "grpo": lambda: sum(r.mean() for r in rows) / len(rows),
        "bnpo": lambda: everything / sum(lengths),
        "dapo": lambda: everything / sum(lengths),
        "dr_grpo": lambda: everything / (len(rows) * settings["max_completion_length"]),
    }[settings["loss_type"]]()


SETTINGS = {
    "plain": {},
    "beta": {"beta": 0.3},
    "clip higher": {"epsilon": 0.1, "epsilon_high": 0.4},
    "delta": {"delta": 1.5, "beta": 0.1},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_packed_loss_and_gradient_are_the_plain_ones_for_any_split(
    loss_type, level, name, monkeypatch
):
    kind = KINDS[(list(SETTINGS).index(name) + len(level)) % len(KINDS)]
    settings = {
        "loss_type": loss_type, "importance_sampling_level": level, "epsilon": 0.2,
        "epsilon_high": None, "delta": None, "beta": 0.0, "max_completion_length": 7,
    } | SETTINGS[name]  # fmt: skip
    policy = tiny_policy(kind, dtype=torch.float64)
    groups = random_groups(seed=1, count=3, most=3)
    if level == "token":  # every prompt begins with the same three tokens
        monkeypatch.setattr("grpo.attention.SHORTEST_COMMON", 3)
        groups = [Group([7, 8, 9, *g.prompt], g.completions, g.rows) for g in groups]
    rows = rows_of(groups)
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(len(rows), generator=generator, dtype=torch.float64)
    lengths = [len(c) for _, c in rows]

    logps = [plain_logprobs(policy, *row) for row in rows]
    noise = [torch.randn(2, n, generator=generator, dtype=torch.float64) for n in lengths]
    olds = [p.detach() + 0.4 * n[0] for p, n in zip(logps, noise, strict=True)]
    references = [p.detach() + 0.7 * n[1] for p, n in zip(logps, noise, strict=True)]
    wanted = written_out_loss(logps, olds, references, advantages, lengths, settings)
    wanted.backward()
    gradients = gradients_of(policy)
    scale = max(g.abs().max() for g in gradients.values())
    assert scale > 1e-3

    def padded(values, batch):
        table = torch.zeros(batch.mask.shape, dtype=torch.float64)
        for i, row in enumerate(batch.rows.tolist()):
            table[i, : lengths[row]] = values[row]
        return table

    for budget in BUDGETS:
        policy.model.zero_grad()
        total = 0.0
        for batch in micro_batches(groups, budget, "cpu"):
            logp, _ = completion_logprobs(policy, batch, 1.0)
            reference = padded(references, batch) if settings["beta"] else None
            loss, _ = grpo_loss(
                logp, padded(olds, batch), reference, advantages[batch.rows], batch.mask,
                rows=len(rows), tokens=sum(lengths), **settings,
            )  # fmt: skip
            loss.backward()
            total += loss.item()
        assert total == pytest.approx(wanted.item(), abs=1e-10)
        for name_, gradient in gradients_of(policy).items():
            # transformers' RMSNorm works in float32 whatever it is given: 5e-8 was measured.
            gap = (gradient - gradients[name_]).abs().max() / scale
            assert gap < 1e-6, name_
