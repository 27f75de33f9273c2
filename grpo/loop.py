"""GRPO, from top to bottom (DeepSeekMath, arXiv 2402.03300, algorithm 1).

For each question the policy writes a group of G answers. Each answer earns a reward r, and its
advantage A is how much better it is than the rest of its group, so no value network is needed.
The policy then moves so that good answers get likelier: with a clipped ratio, so that one batch
cannot carry it far, and with a KL term that ties it to a frozen reference.

    A     = (r - mean of the group) / (std of the group + 1e-4)                group_advantages
    ratio = exp(logp - old_logp)                                                   policy_ratio
    loss  = -min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A)       clipped_surrogate
            + beta (exp(ref_logp - logp) - (ref_logp - logp) - 1)                         kl_k3

Two things surprise at first sight, and both are right. With one update a rollout (num_iterations,
mu in the paper, is 1) the old policy is the policy itself: the ratio is exactly 1 and nothing is
ever clipped. And the loss then stays near 0 (exactly 0 with loss_type grpo), since the advantages
of a group add up to 0; its gradient does not. Watch the reward, not the loss.

Letters in the shapes: P prompts, G completions a prompt, N = P G rows; n rows of a micro-batch, C
tokens of its longest completion.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import fmean

import torch

from data import Example, Task
from grpo.advantages import group_advantages
from grpo.config import Config
from grpo.distributed import add_up, gather, share
from grpo.episodes import play
from grpo.filtering import MiniBatch, kept_groups, mini_batch
from grpo.logprobs import completion_logprobs
from grpo.loss import aggregate, clipped_surrogate, kl_k3, policy_ratio
from grpo.metrics import Rollout, completion_rows, logprob_gap, rollout_metrics, update_metrics
from grpo.packing import PackedBatch
from grpo.policy import Policy
from grpo.sampling import Sampling
from grpo.tokenizer import render_prompt
from grpo.training import Training, step_indices
from rewards import score, weighted_sum


def train(
    policy: Policy,
    task: Task,
    config: Config,
    run: Training,
    evaluate_now: Callable[[], None] = lambda: None,
) -> None:
    """Train the policy until config.max_steps or a request to stop; `run` saves and reports."""
    for step in run.steps():
        started = time.perf_counter()

        # ---- Sample. G completions of each prompt, written by the policy as it is now.
        indices = step_indices(step, config.prompts_per_step, len(task.train), config.seed)
        examples = [task.train[i] for i in indices]
        rollout = sample_group_completions(policy, task, config, examples, run.generator)

        # ---- Reward. Plain functions of the text; the weighted sum counts. [N]
        rollout.reward_table = score(
            rollout.texts, rollout.examples, task.reward_functions, config.reward_timeout
        )
        weights = {**task.reward_weights, **config.weights_of_rewards()}
        rollout.rewards = weighted_sum(rollout.reward_table, weights, len(rollout.texts))
        rollout = rollout.of_all_ranks(examples)  # under torchrun each has done its share so far
        run.require_scored(rollout)

        # ---- Filter. Groups that are too easy or too hard are dropped if --filter says so. [P]
        rollout.kept = kept_groups(rollout, task, weights, config)

        # ---- Advantage. A completion is as good as it is better than the rest of its group. [N]
        rollout.advantages = group_advantages(
            rollout.kept_rewards(), config.num_generations, config.scale_rewards
        ).tolist()
        # Shown before the update: whatever fails in here costs no step that was trained.
        run.keep_completions(completion_rows(rollout))
        run.warn(task.alarms(list(zip(rollout.texts, rollout.examples, strict=True))))

        # ---- Pack. A prompt once a group, no padding, and nothing that cannot teach. One
        # mini-batch, of this step's groups; with --buffer-groups none until enough have been kept.
        due, run.buffer = run.buffer.add(rollout, config)
        minis = [mini_batch(groups, config, policy.device) for groups in due]

        # ---- Fix the old policy's and the reference's log-probs for all updates. [n, C]
        update_started = time.perf_counter()
        fixed = [fixed_logprobs(policy, mini.batches, config) for mini in minis]

        # ---- Update. An optimizer step a mini-batch, num_iterations times over.
        run.set_learning_rate(config.learning_rate, config.lr_scheduler)
        sums: dict[str, float] = {}
        sampler_gap, grad_norms = 0.0, []
        updates = list(zip(minis, fixed, strict=True)) * config.num_iterations
        for update, (mini, logprobs) in enumerate(updates):
            run.optimizer.zero_grad()
            for batch, (old_logp, ref_logp) in zip(mini.batches, logprobs, strict=True):
                logp, parts = add_gradient(policy, config, run, mini, batch, old_logp, ref_logp)
                for name, value in parts.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
                if update == 0:  # the policy is still the one that sampled
                    sampler_gap = max(sampler_gap, logprob_gap(mini.completions, batch, logp))
            grad_norms.append(run.update() if mini.learnable else 0.0)

        # ---- Report.
        sums, sampler_gap = add_up(sums), max(gather(sampler_gap))
        now = time.perf_counter()
        run.finish_step(
            rollout_metrics(rollout, config.num_generations)
            | run.buffer.metrics(rollout, config)
            | update_metrics(sums, len(updates))
            | {
                "grad_norm": fmean(grad_norms) if grad_norms else math.nan,
                "sampler_gap": sampler_gap,
                "learning_rate": run.optimizer.learning_rate,
                "step_time": now - started,
                "tokens_per_second/train": sums.get("tokens", 0.0) / (now - update_started),
            }
        )
        if config.eval_every and run.step % config.eval_every == 0:
            evaluate_now()


def add_gradient(
    policy: Policy,
    config: Config,
    run: Training,
    mini: MiniBatch,
    batch: PackedBatch,  # a micro-batch of mini
    old_logp: torch.Tensor | None,
    ref_logp: torch.Tensor | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Add a micro-batch's gradient to the optimizer's; (its log-probs [n, C], sums to report)."""
    logp, entropy = completion_logprobs(policy, batch, config.temperature, with_entropy=True)
    loss, sums = grpo_loss(
        logp, old_logp, ref_logp, mini.advantages[batch.rows], batch.mask,
        rows=mini.rows,
        tokens=mini.tokens,
        beta=config.beta,
        epsilon=config.epsilon,
        epsilon_high=config.epsilon_high,
        delta=config.delta,
        loss_type=config.loss_type,
        importance_sampling_level=config.importance_sampling_level,
        max_completion_length=config.max_episode_length,
    )  # fmt: skip
    run.require_finite(loss, "loss")
    loss.backward()
    run.optimizer.accumulate()
    return logp.detach(), sums | {"loss": loss.detach(), "entropy": entropy.sum()}


def grpo_loss(
    logp: torch.Tensor,  # [n, C], carries the gradient
    old_logp: torch.Tensor | None,  # [n, C]; None: the first update since the rollout, ratio 1
    ref_logp: torch.Tensor | None,  # [n, C]; None: no KL
    advantages: torch.Tensor,  # [n]
    mask: torch.Tensor,  # [n, C] bool
    *,
    rows: int,
    tokens: int,
    loss_type: str = "grpo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    importance_sampling_level: str = "token",
    max_completion_length: int | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one micro-batch and its metrics. rows and tokens: see `aggregate`.

    The metrics are sums, so that micro-batches add up: clip_low and clip_high count the ratios
    that the clip holds back, out of `ratios` (tokens, or rows for "sequence"); kl is a sum over
    `tokens`. So clip_ratio/low_mean = clip_low / ratios and the metric kl = kl / tokens.
    """
    old_logp = logp.detach() if old_logp is None else old_logp
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    advantage = advantages.to(logp.dtype)[:, None]  # [n, 1]: the same for all tokens of a row

    # How much likelier each token has become since it was sampled. [n, C], or [n, 1] for "sequence"
    ratio = policy_ratio(logp, old_logp, mask, importance_sampling_level)
    # Good rows up and bad rows down, until the ratio has moved by epsilon. [n, C]
    loss = clipped_surrogate(ratio, advantage, epsilon, epsilon_high, delta).expand_as(logp)
    # And not far from the reference. [n, C]
    ref_gap = torch.zeros_like(logp) if ref_logp is None else ref_logp - logp
    kl = kl_k3(ref_gap.masked_fill(~mask, 0.0))
    loss = loss + beta * kl if beta else loss

    counted = mask if importance_sampling_level == "token" else mask.any(dim=1, keepdim=True)
    metrics = {
        "clip_low": (counted & (ratio < 1 - epsilon) & (advantage < 0)).sum(),
        "clip_high": (counted & (ratio > 1 + epsilon_high) & (advantage > 0)).sum(),
        "ratios": counted.sum(),
        "kl": kl.detach().sum(),
        "tokens": mask.sum(),
    }
    return aggregate(loss, mask, loss_type, rows, tokens, max_completion_length), metrics


def sample_group_completions(
    policy: Policy, task: Task, config: Config, examples: list[Example], generator: torch.Generator
) -> Rollout:
    """G completions of each of the P examples' prompts, as text for the rewards too.

    With --turns above 1 a completion is an episode: the task replies, and the policy goes on.
    Under torchrun, of this rank's share of them, with the random numbers of its rows in the step.
    """
    started = time.perf_counter()
    size, length, own = config.num_generations, config.max_episode_length, share(len(examples))
    uniforms = torch.rand(len(examples), size, length, generator=generator)  # one a token
    examples = examples[own]
    prompts = [render_prompt(policy.tokenizer, e.messages, config.prompt_format) for e in examples]
    groups = play(
        policy, task, prompts, examples, size, config.max_completion_length,
        Sampling(config.temperature, config.top_k, config.top_p, config.min_p),
        turns=config.turns,
        prompt_format=config.prompt_format,
        max_rows=config.rollout_rows,
        uniforms=uniforms[own].flatten(0, 1),
    )  # fmt: skip
    episodes = [episode for group in groups for episode in group]  # [N], groups in order
    return Rollout(
        prompts=prompts,
        examples=[e.example for e in episodes],
        completions=[e.completion for e in episodes],
        texts=[e.text for e in episodes],
        seconds=time.perf_counter() - started,
    )


@torch.no_grad()
def fixed_logprobs(policy: Policy, batches: list[PackedBatch], config: Config):
    """(old_logp, ref_logp) of every batch, [n, C] each, or None where not needed.

    Where all is learned from in one update the policy's own log-probs, detached, are the old ones;
    without a KL term there is no reference to ask.
    """
    old = reference = [None] * len(batches)
    if config.num_iterations * config.buffer_updates > 1:
        old = [completion_logprobs(policy, b, config.temperature)[0] for b in batches]
    if config.beta > 0:
        with policy.reference_mode():
            reference = [completion_logprobs(policy, b, config.temperature)[0] for b in batches]
    return list(zip(old, reference, strict=True))
