"""Supervised fine-tuning: the cold start, in which the policy imitates the task's own answers.

The same packing as GRPO, with one completion a prompt: the loss is the mean negative log-prob of
the target's tokens and of the stop token that ends it, so that stopping is learned too. The prompt
is not learned.
"""

from __future__ import annotations

import time

from data import Example, Task
from grpo.config import Config
from grpo.distributed import gather, share
from grpo.errors import UserError
from grpo.logprobs import completion_logprobs
from grpo.packing import Group, micro_batches
from grpo.policy import Policy
from grpo.tokenizer import encode_target, render_prompt
from grpo.training import Training, step_indices


def train(policy: Policy, task: Task, config: Config, run: Training) -> None:
    """Train on task.sft until config.sft_steps or a request to stop."""
    for step in run.steps():
        started = time.perf_counter()
        indices = step_indices(step, config.sft_batch_size, len(task.sft), config.seed)
        groups = fitting_groups(policy, [task.sft[i] for i in indices], config, run)
        tokens = sum(len(g.completions[0]) for g in groups)
        prompt_tokens = sum(len(g.prompt) for g in groups)
        run.set_learning_rate(config.sft_learning_rate, config.sft_lr_scheduler)
        run.optimizer.zero_grad()
        total = 0.0
        own = groups[share(len(groups))]  # all of them, unless torchrun has started several ranks
        for batch in micro_batches(own, config.tokens_per_micro_batch, policy.device):
            logp, _ = completion_logprobs(policy, batch, temperature=1.0)  # [n, C]
            loss = -(logp * batch.mask).sum() / tokens  # a mean over the step, not the micro-batch
            total += run.require_finite(loss, "loss")
            loss.backward()
            run.optimizer.accumulate()
        norm = run.update()
        total = sum(gather(total))
        seconds = time.perf_counter() - started
        run.finish_step(
            {
                "loss": total,
                "grad_norm": norm,
                "learning_rate": run.optimizer.learning_rate,
                "step_time": seconds,
                "tokens_per_second/train": (prompt_tokens + tokens) / seconds,
            }
        )


def fitting_groups(
    policy: Policy, examples: list[Example], config: Config, run: Training
) -> list[Group]:
    """The examples of a step, without those that are longer than the model has positions for."""
    groups = [supervised_group(policy, e, row, config) for row, e in enumerate(examples)]
    lengths = [len(g.prompt) + len(g.completions[0]) for g in groups]
    limit = policy.context_length or max(lengths)
    if min(lengths) > limit:
        raise UserError(
            f"step {run.step + 1} of sft: none of its {len(groups)} examples, of {min(lengths)} "
            f"tokens or more, fits the model's {limit} positions; give another model, or leave SFT "
            "out with --sft-steps 0"
        )
    if max(lengths) > limit:
        run.warn([f"an SFT example of {max(lengths)} tokens does not fit the model's {limit} "
                  "positions; such examples are left out"])  # fmt: skip
    return [group for group, length in zip(groups, lengths, strict=True) if length <= limit]


def supervised_group(policy: Policy, example: Example, row: int, config: Config) -> Group:
    """An example as a group of one: its prompt, and its target ended by a stop token."""
    if not example.target:
        raise UserError("an SFT example has no target: the task gives none for this setting")
    prompt = render_prompt(policy.tokenizer, example.messages, config.prompt_format)
    if not prompt:
        raise UserError("an SFT example has an empty prompt: nothing would predict its first token")
    target = encode_target(policy.tokenizer, example.target) + [policy.end_token_id]
    return Group(prompt, [target], [row])
