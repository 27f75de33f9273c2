"""Combinations of settings that cannot work, each with its reason.

A table of (is it so?, what to say) for each subject: all is refused at start, before a model is
loaded, and nothing is quietly repaired.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from grpo.errors import UserError
from grpo.scratch import SCRATCH

if TYPE_CHECKING:
    from grpo.config import Config


def refuse_impossible(config: Config) -> None:
    """Raise UserError for the first combination that cannot work."""
    tables = (
        _group_problems, _model_problems, _sampling_problems, _filter_problems, _loss_problems
    )  # fmt: skip
    for impossible, why in (row for table in tables for row in table(config)):
        if impossible:
            raise UserError(why)
    parse_weights(config.reward_weights)


def _group_problems(c: Config) -> list[tuple[bool, str]]:
    total, size = c.completions_per_step, c.num_generations
    return [
        (size < 2, f"--num-generations (num_generations): a group of {size} has nothing to be "
         "compared with; a group needs at least 2 completions"),
        (total is not None and total % max(size, 1) != 0,
         f"--completions-per-step (completions_per_step): {total} completions do not divide into "
         f"groups of {size} (--num-generations); give a multiple of {size}"),
    ]  # fmt: skip


def _model_problems(c: Config) -> list[tuple[bool, str]]:
    scratch = c.model == SCRATCH
    width, heads = c.scratch_hidden_size, c.scratch_heads
    return [
        (c.adapter is not None and c.lora_rank == 0,
         "--adapter needs LoRA, but --lora-rank is 0; give --lora-rank the adapter's rank"),
        (c.adapter is not None and scratch,
         "--adapter was trained on another model than a fresh one; give that one as --model"),
        (c.quantize != "none" and scratch,
         f"--quantize {c.quantize} freezes the weights, and those of --model scratch must learn"),
        (c.quantize != "none" and c.lora_rank == 0,
         f"--quantize {c.quantize} freezes the weights, so only LoRA can learn; give --lora-rank"),
        (c.add_tokens and scratch,
         "--add-tokens is for a pretrained model; --model scratch has the task's tokens already"),
        (scratch and c.stage == "eval" and c.resume is None,
         "--stage eval with --model scratch would judge an untrained model; give a trained one"),
        (scratch and width % (2 * heads) != 0,  # rotary positions pair a head's numbers
         f"--scratch-hidden-size {width} in --scratch-heads {heads}: each head needs the same, "
         f"even width; use {max(1, round(width / (2 * heads))) * 2 * heads}"),
        (c.stage == "sft" and c.sft_steps == 0, "--stage sft with --sft-steps 0 has no step to do"),
    ]  # fmt: skip


def _sampling_problems(c: Config) -> list[tuple[bool, str]]:
    trains = c.stage in ("grpo", "all")
    same = "would make all completions of a group equal, and equal rewards teach nothing"
    return [
        (trains and c.temperature == 0, f"--temperature 0 {same}; give a value above 0"),
        (trains and c.top_k == 1, f"--top-k 1 {same}; give 0 (all tokens) or 2 and more"),
        (c.eval_samples > 1 and c.temperature == 0,
         f"--eval-samples {c.eval_samples} at --temperature 0 would all be equal; give 1"),
    ]  # fmt: skip


def _filter_problems(c: Config) -> list[tuple[bool, str]]:
    prompts = c.prompts_per_step
    if c.completions_per_step is not None:
        prompts = c.completions_per_step // c.num_generations
    return [
        (c.filter_lower > c.filter_upper,
         f"--filter-lower {c.filter_lower:g} is above --filter-upper {c.filter_upper:g}, so that "
         "no group could be kept; exchange them"),
        (c.buffer_groups > 0 and c.filter == "none",
         "--buffer-groups gathers what a --filter keeps, and there is none; for more groups an "
         "update give a higher --prompts-per-step"),
        (c.buffer_updates > 1 and c.buffer_groups == 0,
         "--buffer-updates are those of a full buffer; give --buffer-groups too"),
        (c.buffer_updates > c.buffer_groups > 0,
         f"--buffer-groups {c.buffer_groups} cannot be parted into --buffer-updates "
         f"{c.buffer_updates}; lower that"),
        (c.buffer_groups > c.max_steps * prompts,
         f"--buffer-groups {c.buffer_groups} would never be full: --max-steps {c.max_steps} sample "
         f"{c.max_steps * prompts} groups in all, {prompts} a step"),
    ]  # fmt: skip


def _loss_problems(c: Config) -> list[tuple[bool, str]]:
    high = c.epsilon if c.epsilon_high is None else c.epsilon_high
    return [
        (c.delta is not None and c.delta <= 1 + high,
         f"--delta {c.delta} would cap the ratio inside the clip range, which ends at "
         f"{1 + high:g}; give a larger one"),
        (c.kl_on_zero_std_groups and c.beta == 0,
         "--kl-on-zero-std-groups has no KL to keep while --beta is 0"),
    ]  # fmt: skip


def parse_weights(text: str | None) -> dict[str, float]:
    """ "correctness=2,format=0.5" as a dict; UserError for a part that is not name=number."""
    weights = {}
    for part in text.split(",") if text else []:
        name, _, value = (word.strip() for word in part.partition("="))
        try:
            weights[name] = float(value)
        except ValueError:
            weights[name] = math.nan
        if not name or not math.isfinite(weights[name]):
            raise UserError(
                f"--reward-weights (reward_weights): '{part}' is not of the form name=number"
            )
    return weights
