"""The GRPO loss: every case of tests/cases/loss_cases.json, value and gradient, and the rest."""

import json
import math
from pathlib import Path

import pytest
import torch

from grpo.loop import grpo_loss
from grpo.loss import EXP_LIMIT, aggregate, clipped_surrogate, kl_k3, policy_ratio

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parent / "cases/loss_cases.json").read_text())["cases"]
}
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def tensors_of(case, dtype):
    """logp with gradient, old, reference, advantages, mask, settings of grpo_loss."""
    given, config = case["input"], case["input"]["config"]

    def tensor(name):
        return None if given[name] is None else torch.tensor(given[name], dtype=dtype)

    settings = {
        "loss_type": config["loss_type"],
        "epsilon": config["epsilon_low"],
        "epsilon_high": config["epsilon_high"],
        "delta": config["delta"],
        "beta": config["beta"],
        "importance_sampling_level": config["importance_level"],
        "max_completion_length": config["max_completion_length"],
    }
    logp = tensor("logp").requires_grad_()
    mask = torch.tensor(given["mask"], dtype=torch.bool)
    return logp, tensor("old_logp"), tensor("ref_logp"), tensor("advantages"), mask, settings


def rows_that_count(case) -> int:
    """Rows cut by length are left out of the count; rows that are empty otherwise are not."""
    truncated = case["input"].get("truncated", [False] * len(case["input"]["mask"]))
    return truncated.count(False)


def run(case, dtype=torch.float64, micro_batches=None, own_totals=False):
    """Loss, gradient and metrics of a case, accumulated over micro-batches (lists of rows).

    own_totals: each micro-batch counts its own rows and tokens and the losses are averaged, which
    is what several ranks do for bnpo, and a known mistake for everything else.
    """
    logp, old, reference, advantages, mask, settings = tensors_of(case, dtype)
    micro_batches = micro_batches or [list(range(len(mask)))]
    loss, sums = 0.0, {}
    for index in micro_batches:
        totals = {"rows": rows_that_count(case), "tokens": int(mask.sum())}
        if own_totals:
            totals = {"rows": len(index), "tokens": int(mask[index].sum())}
        part, metrics = grpo_loss(
            logp[index],
            None if old is None else old[index],
            None if reference is None else reference[index],
            advantages[index],
            mask[index],
            **totals,
            **settings,
        )
        if own_totals:
            part = part / len(micro_batches)
        part.backward()
        loss += float(part.detach())
        for name, value in metrics.items():
            assert not value.requires_grad, f"metric {name} keeps the graph alive"
            sums[name] = sums.get(name, 0.0) + float(value)
    return loss, logp.grad, sums


def close(value, expected, tolerance) -> bool:
    return abs(value - expected) <= tolerance["abs"] + tolerance["rel"] * abs(expected)


def expectation(case):
    """The loss and gradient we document: truncated rows are not counted as rows."""
    alternative = case.get("alternatives", {}).get(
        "truncated_sequences_left_out_of_the_sequence_count"
    )
    return alternative or case["expected"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_case(name, dtype):
    case = CASES[name]
    tolerance = case["tolerance"][dtype]
    bnpo_of_two_ranks = name == "micro/bnpo-2x2"
    micro_batches = case["input"].get("micro_batches")
    loss, gradient, sums = run(case, DTYPES[dtype], micro_batches, own_totals=bnpo_of_two_ranks)
    expected = expectation(case)

    assert math.isfinite(loss) and gradient.isfinite().all(), case["why"]
    if "loss" in expected:
        assert close(loss, expected["loss"], tolerance), case["why"]
    for row, expected_row in zip(gradient.tolist(), expected["grad_logp"], strict=True):
        for value, wanted in zip(row, expected_row, strict=True):
            assert wanted is None or close(value, wanted, tolerance), case["why"]
    mask = torch.tensor(case["input"]["mask"], dtype=torch.bool)
    assert (gradient[~mask] == 0).all(), "a masked token has a gradient"
    for mistake, wrong in case.get("wrong_values", {}).items():
        assert not close(loss, wrong, tolerance), mistake

    metrics = case["expected"].get("metrics", {})
    shares = {
        "clip_low_fraction": sums["clip_low"] / sums["ratios"],
        "clip_high_fraction": sums["clip_high"] / sums["ratios"],
        "kl_mean": sums["kl"] / sums["tokens"],
    }
    for metric, wanted in metrics.items():
        assert close(shares[metric], wanted, {"abs": 1e-5, "rel": 1e-4}), metric


SPLITS = ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[3, 0, 1], [2]], [[0, 1, 2, 3]])


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("split", SPLITS)
def test_any_split_gives_the_same_loss_and_gradient(loss_type, split):
    """Denominators of a micro-batch in place of the step's made results depend on the split."""
    case = json.loads(json.dumps(CASES["micro/dapo-2x2"]))
    case["input"]["config"] |= {"loss_type": loss_type, "max_completion_length": 8}
    whole = run(case)
    parts = run(case, micro_batches=split)
    assert parts[0] == pytest.approx(whole[0], abs=1e-12)
    assert torch.allclose(parts[1], whole[1], rtol=0, atol=1e-12)
    assert parts[2] == pytest.approx(whole[2])


@pytest.mark.parametrize("name", ["micro/dapo-2x2", "micro/grpo-3+1"])
def test_means_of_micro_batch_means_are_the_known_mistake(name):
    """With each micro-batch's own totals the value is the one listed as wrong: it can be told."""
    case = CASES[name]
    loss, _, _ = run(case, micro_batches=case["input"]["micro_batches"], own_totals=True)
    assert loss == pytest.approx(case["wrong_values"]["mean_of_the_micro_batch_losses"], abs=1e-9)


def test_bnpo_of_one_process_is_the_mean_over_all_its_tokens():
    """Our "local batch" is all rows of one process in a step, however they are split."""
    case = CASES["micro/bnpo-2x2"]
    whole = run(case)[0]
    assert run(case, micro_batches=[[0, 1], [2, 3]])[0] == pytest.approx(whole, abs=1e-12)
    as_dapo = json.loads(json.dumps(case))
    as_dapo["input"]["config"]["loss_type"] = "dapo"
    assert run(as_dapo)[0] == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize("name", ["truncated/grpo", "truncated/dr_grpo"])
def test_truncated_rows_count_if_the_caller_counts_them(name):
    """TRL's reading is one argument away: rows that include the truncated ones."""
    case = json.loads(json.dumps(CASES[name]))
    case["input"]["truncated"] = [False] * 4
    loss, gradient, _ = run(case)
    assert loss == pytest.approx(case["expected"]["loss"], abs=1e-9)
    assert torch.allclose(
        gradient, torch.tensor(case["expected"]["grad_logp"], dtype=torch.float64), atol=1e-9
    )


def test_truncated_tokens_in_the_denominator_are_the_known_mistake():
    """Masked in the numerator only: long runs of cut rows would shrink every update."""
    case = CASES["truncated/dapo"]
    logp, old, reference, advantages, mask, settings = tensors_of(case, torch.float64)
    tokens = int(torch.tensor(case["input"]["mask_before_truncation"]).sum())
    loss, _ = grpo_loss(
        logp, old, reference, advantages, mask, rows=3, tokens=tokens, **settings
    )
    wrong = case["wrong_values"]["truncated_tokens_still_in_the_denominator"]
    assert float(loss.detach()) == pytest.approx(wrong, abs=1e-9)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e30, -200.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_nothing_behind_the_mask_gets_out(garbage, level, loss_type):
    """A mask applied after exp hides inf in the value and lets 0 * inf = NaN into the gradient."""
    mask = torch.tensor([[True, False, True], [True, True, False]])
    clean = torch.tensor([[-1.0, -0.5, -0.3], [-2.0, -0.1, -1.5]])
    results = []
    for filler in (0.0, garbage):
        logp, old, reference = (
            (clean * scale).masked_fill(~mask, filler) for scale in (1.0, 1.1, 0.9)
        )
        logp.requires_grad_()
        loss, metrics = grpo_loss(
            logp, old, reference, torch.tensor([1.0, -1.0]), mask, rows=2, tokens=4, beta=0.1,
            loss_type=loss_type, importance_sampling_level=level, max_completion_length=4,
        )
        loss.backward()
        results.append((loss, logp.grad, torch.stack([m.float() for m in metrics.values()])))
    for zeros, with_garbage in zip(*results, strict=True):
        assert torch.equal(zeros, with_garbage)
    assert (logp.grad[~mask] == 0).all()


def test_a_step_without_any_token_is_zero_not_nan():
    mask = torch.zeros(2, 3, dtype=torch.bool)
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo"):
        logp = torch.randn(2, 3, requires_grad=True)
        loss, _ = grpo_loss(
            logp, None, None, torch.ones(2), mask, rows=0, tokens=0,
            loss_type=loss_type, max_completion_length=3,
        )
        loss.backward()
        assert float(loss.detach()) == 0 and (logp.grad == 0).all()


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_k3_is_exact_until_the_limit_and_pulls_up_beyond(dtype):
    """A clamp on the log-ratio leaves a lost token without a way back; inf ends the run."""
    gaps = torch.tensor([-120.0, -0.4, 0.0, 0.4, 8.0, 19.9, 21.0, 88.0, 120.0, 5000.0], dtype=dtype)
    logp = torch.zeros_like(gaps).requires_grad_()
    kl = kl_k3(gaps - logp)
    (gradient,) = torch.autograd.grad(kl.sum(), logp)
    exact = gaps < EXP_LIMIT
    rtol = 1e-5 if dtype == torch.float32 else 1e-12
    wanted = gaps.double().exp() - gaps.double() - 1
    assert torch.allclose(kl[exact].double(), wanted[exact], rtol=rtol, atol=1e-7)
    slope = 1 - gaps.double().exp()
    assert torch.allclose(gradient[exact].double(), slope[exact], rtol=rtol, atol=1e-7)
    assert kl.isfinite().all() and gradient.isfinite().all()
    assert (gradient[gaps > 0] < 0).all(), "descent must raise what the reference likes better"
    assert (gradient[gaps < 0] > 0).all(), "and lower what it likes less"
    assert kl[2] == 0 and gradient[2] == 0
    assert (kl.diff()[2:] > 0).all(), "beyond the limit the penalty goes on growing"


def test_k3_is_never_negative():
    """exp(d) - d - 1 in float32 dips below 0 for tiny d; a negative KL in the log alarms people."""
    gaps = torch.linspace(-1e-3, 1e-3, 2001)
    assert (kl_k3(gaps) >= 0).all()


def test_k3_the_wrong_way_round_is_told_apart():
    """d = logp - ref_logp, or a flipped sign, still looks like a KL near 0."""
    gap = torch.tensor([0.7])
    right, reversed_ratio = kl_k3(gap), kl_k3(-gap)
    assert float(right) == pytest.approx(math.exp(0.7) - 0.7 - 1, abs=1e-6)
    assert not torch.allclose(right, reversed_ratio, atol=1e-2)


def test_a_bad_token_that_exploded_is_still_pushed_down():
    """Log-ratio 150 with A < 0: the unclipped term counts, and its gradient must be finite."""
    logp = torch.tensor([[-0.2]], requires_grad=True)
    loss, _ = grpo_loss(
        logp, torch.tensor([[-150.2]]), None, torch.tensor([-0.5]),
        torch.ones(1, 1, dtype=torch.bool), rows=1, tokens=1,
    )
    loss.backward()
    assert loss.isfinite() and logp.grad.isfinite().all() and float(logp.grad) > 0


def test_first_update_has_ratio_exactly_one():
    logp = torch.randn(3, 5)
    for level, shape in (("token", (3, 5)), ("sequence", (3, 1))):
        ratio = policy_ratio(logp, logp.clone(), torch.ones(3, 5, dtype=torch.bool), level)
        assert ratio.shape == shape and (ratio == 1).all()


def test_sequence_ratio_of_the_docstring():
    mask = torch.ones(1, 2, dtype=torch.bool)
    logp, old = torch.tensor([[-0.7, -1.1]]), torch.tensor([[-1.0, -1.0]])
    ratio = policy_ratio(logp, old, mask, "sequence")
    assert float(ratio) == pytest.approx(math.exp(0.1), abs=1e-6)


def test_sequence_clip_counts_rows_not_tokens():
    """One long clipped row of two is half of the ratios, not most of them."""
    logp = torch.tensor([[-1.0] * 6, [-1.0] + [0.0] * 5], requires_grad=True)
    old = torch.tensor([[-2.0] * 6, [-1.0] + [0.0] * 5])
    mask = torch.tensor([[True] * 6, [True] + [False] * 5])
    _, metrics = grpo_loss(
        logp, old, None, torch.ones(2), mask, rows=2, tokens=7,
        importance_sampling_level="sequence",
    )
    assert metrics["clip_high"] == 1 and metrics["ratios"] == 2 and metrics["tokens"] == 7


def test_beta_zero_keeps_the_kl_out_of_the_loss():
    logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    arguments = (torch.tensor([1.0]), mask)
    with_reference, metrics = grpo_loss(
        logp, None, torch.tensor([[-3.0, -0.5]]), *arguments, rows=1, tokens=2
    )
    without, _ = grpo_loss(logp, None, None, *arguments, rows=1, tokens=2)
    assert with_reference == without and float(metrics["kl"]) > 0


def test_aggregate_of_the_docstring():
    loss = torch.tensor([[3.0, 9.0, 9.0], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[True, False, False], [True, True, True]])
    wanted = {"grpo": 2.0, "bnpo": 1.5, "dapo": 1.5, "dr_grpo": 0.5}
    for loss_type, value in wanted.items():
        got = aggregate(loss, mask, loss_type, rows=2, tokens=4, max_completion_length=6)
        assert float(got) == value


def test_surrogate_of_the_docstring():
    ratio = torch.tensor([[0.5], [2.0]], requires_grad=True)
    loss = clipped_surrogate(ratio, torch.tensor([[-1.0], [-1.0]]), 0.2, 0.2)
    loss.sum().backward()
    assert loss.flatten().tolist() == pytest.approx([0.8, 2.0])
    assert ratio.grad.flatten().tolist() == [0.0, 1.0]


def test_unknown_modes_are_refused():
    mask = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="gspo"):
        policy_ratio(torch.zeros(1, 1), torch.zeros(1, 1), mask, "gspo")
    with pytest.raises(ValueError, match="mean"):
        aggregate(torch.zeros(1, 1), mask, "mean", rows=1, tokens=1)
