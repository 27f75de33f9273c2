"""The numbers of a step, by hand."""

import json
import math

import pytest
import torch

from data import Example
from grpo.generate import Completion
from grpo.metrics import (
    Rollout,
    completion_rows,
    logprob_gap,
    mean,
    rollout_metrics,
    update_metrics,
)
from grpo.packing import Group, pack


def rollout_of(rewards, table=None, lengths=(1, 2, 3, 6), reasons=("stop",) * 3 + ("length",)):
    examples = [Example([{"role": "user", "content": p}], "", "") for p in "aabb"]
    return Rollout(
        prompts=[[3], [4]],
        examples=examples,
        completions=[
            Completion([5] * n, [-0.5 * (i + 1)] * n, reason)
            for i, (n, reason) in enumerate(zip(lengths, reasons, strict=True))
        ],
        texts=["x", "y", "z", "\ud800"],
        seconds=2.0,
        reward_table=table or {"r": rewards},
        rewards=rewards,
        advantages=[0.5, -0.5, 0.0, 0.0],
    )


def test_rewards_and_lengths_of_a_step():
    table = {"right": [1.0, 0.0, 1.0, 1.0], "short": [0.5, None, None, 0.1]}
    metrics = rollout_metrics(rollout_of([1.5, 0.5, 1.0, 1.0], table), num_generations=2)
    assert metrics == {
        "reward": 1.0,
        "reward_std": pytest.approx(math.sqrt(0.5) / 2),  # of (1.5, 0.5) and of (1, 1), n - 1
        "frac_reward_zero_std": 0.5,
        "rewards/right/mean": 0.75,
        "rewards/short/mean": pytest.approx(0.3),
        "completions/mean_length": 3.0,
        "completions/min_length": 1,
        "completions/max_length": 6,
        "completions/clipped_ratio": 0.25,
        "tokens_per_second/rollout": 6.0,
    }


def test_rewards_that_do_not_apply_are_left_out_not_counted_as_0():
    metrics = rollout_metrics(rollout_of([None, 1.0, None, None]), num_generations=2)
    assert metrics["reward"] == metrics["rewards/r/mean"] == 1.0
    assert metrics["reward_std"] == 0 and metrics["frac_reward_zero_std"] == 1.0
    nothing = rollout_metrics(rollout_of([None] * 4), num_generations=2)
    assert nothing["reward"] == nothing["rewards/r/mean"] == 0
    assert all(math.isfinite(v) for v in nothing.values())


def test_sums_of_micro_batches_become_means_over_tokens():
    """A mean of the micro-batches' means, or the last one's value, is a known mistake."""
    sums = {"loss": 0.6, "kl": 3.0, "entropy": 12.0, "tokens": 24, "clip_low": 2, "clip_high": 6,
            "ratios": 8}  # fmt: skip
    assert update_metrics(sums, updates=2) == {
        "loss": 0.3,  # of one update; the other sums run over both, like their denominators
        "kl": 0.125,
        "entropy": 0.5,
        "clip_ratio/low_mean": 0.25,
        "clip_ratio/high_mean": 0.75,
    }


def test_where_nothing_was_measured_there_is_no_0():
    """All groups were dead: an entropy of 0 would look like a policy that has collapsed."""
    metrics = update_metrics({}, 3)
    assert metrics.pop("loss") == 0
    assert len(metrics) == 4 and all(math.isnan(value) for value in metrics.values())
    assert all(math.isnan(value) for value in update_metrics({}, 0).values())


def test_kept_completions_are_json_with_their_prompt():
    rows = completion_rows(rollout_of([1.5, 0.5, None, 1.0]))
    assert json.loads(json.dumps(rows)) == rows
    assert rows[3] == {
        "prompt": [{"role": "user", "content": "b"}],
        "completion": "\ud800",
        "tokens": 6,
        "finish_reason": "length",
        "rewards": {"r": 1.0},
        "reward": 1.0,
        "advantage": 0.0,
    }
    assert rows[2]["reward"] is None


def test_the_gap_of_sampler_and_scorer_is_that_of_the_same_rows():
    """A micro-batch holds some of the step's rows, in its own order and padded."""
    rollout = rollout_of([0.0] * 4)
    batch = pack([Group([4], [[5] * 6], [3]), Group([3], [[5] * 2], [1])], "cpu")
    logp = torch.full(batch.mask.shape, 99.0)
    logp[0], logp[1, :2] = -2.0, -1.0
    assert logprob_gap(rollout.completions, batch, logp) == 0
    logp[1, 1] = -1.25
    assert logprob_gap(rollout.completions, batch, logp) == 0.25


def test_mean_of_nothing_is_0():
    assert mean([]) == 0.0 and mean(iter([1, 2])) == 1.5
