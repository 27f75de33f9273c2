"""Combinations of settings that cannot work, each with its reason.

A table of (is it so?, what to say) for each subject, and one of flags that would change nothing:
all is refused at start, before a model is loaded, and nothing is quietly repaired.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from grpo.errors import UserError
from grpo.scratch import SCRATCH, made_from_scratch

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


def refuse_flags(c: Config, flags: set[str]) -> None:
    """Raise UserError for flags that contradict each other or would change nothing."""
    if c.completions_per_step is not None and "prompts_per_step" in flags:
        prompts = c.completions_per_step // c.num_generations
        if prompts != c.prompts_per_step:
            raise UserError(
                f"--completions-per-step {c.completions_per_step} in groups of "
                f"{c.num_generations} is {prompts} prompts, but --prompts-per-step is "
                f"{c.prompts_per_step}; give only one of the two"
            )
    if {"resume", "output_dir"} <= flags:
        resume, output = Path(c.resume).resolve(), Path(c.output_dir or "").resolve()
        if output not in (resume, resume.parent.parent):
            raise UserError(
                f"--output-dir {c.output_dir}: a resumed run goes on in its own folder, "
                f"{c.resume}; leave --output-dir out"
            )
    for names, useless, why in _useless_flags(c):
        if useless and (given := sorted(flags & set(names))):
            shown = f"--{given[0].replace('_', '-')} {getattr(c, given[0])}"
            raise UserError(f"{shown} would change nothing: {why}; leave it out")


def _useless_flags(c: Config) -> list[tuple[tuple[str, ...], bool, str]]:
    return [
        (("sft_data",), c.stage not in ("sft", "all") or c.sft_steps == 0,
         f"in --stage {c.stage} with --sft-steps {c.sft_steps} there is no SFT"),
        (("train_levels",), c.stage in ("sft", "eval"),
         f"--stage {c.stage} samples no training prompts"),
        (("collect_prompts", "collect_keep"), c.stage != "collect",
         f"it is for --stage collect, and this is {c.stage}"),
        (("scratch_hidden_size", "scratch_layers", "scratch_heads"),
         not made_from_scratch(c.model),  # of one that once was, they are the flags of that run
         f"it is the shape of --model {SCRATCH}, and this is {c.model}"),
        (("lora_alpha", "lora_targets"), c.lora_rank == 0, "there is no LoRA at --lora-rank 0"),
        (("filter_lower", "filter_upper"), c.filter == "none", "it is a bound of --filter"),
    ]  # fmt: skip


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
        (scratch and c.stage == "collect" and c.resume is None,
         "--stage collect with --model scratch would sample an untrained model; give a trained one "
         "or, as --resume, the folder of a run"),
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
        (c.stage == "collect" and (c.temperature == 0 or c.top_k == 1),
         "--stage collect with --temperature 0 or --top-k 1 would make all completions of a prompt "
         "equal; give higher ones"),
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
