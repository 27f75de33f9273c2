"""What a run knows of its models: the evaluation of each, in results.json and in evaluations/."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from data import Example
from grpo.answers import UnfinishedAnswers, files_digest, weights_digest, write_answers
from grpo.checkpoint import STAGES, folder_position, position
from grpo.distributed import is_first, world_size
from grpo.evaluate import Evaluation, evaluate
from grpo.policy import Policy
from grpo.record import read_results
from grpo.scratch import SCRATCH
from grpo.startup import trained_stages

if TYPE_CHECKING:
    from grpo.stages import Run

START, AFTER_SFT, AFTER_GRPO = "start", "after_sft", "after_grpo"
STAGE = {AFTER_SFT: "sft", AFTER_GRPO: "grpo"}
MODEL = {AFTER_SFT: "sft", AFTER_GRPO: "grpo/merged"}  # where in the run's folder
UNTRAINED_TOKENS = 64  # a fresh model seldom stops; its completions are judged by so many tokens


def judge(
    this: Run,
    policy: Policy,
    label: str = "eval",
    how: dict | None = None,
    begun: UnfinishedAnswers | None = None,
) -> Evaluation:
    """Evaluate the policy on the held-out examples, with a progress bar.

    begun: the answers that are there already, and where the others are kept at once.
    """
    config, examples = this.config, held_out(this)
    an_example = 1 + (config.eval_samples if config.eval_samples > 1 else 0)  # rows
    # The bar that is seen is the first rank's, with its share.
    known = begun.done if begun else []
    rows, before = (len(x) // world_size() * an_example for x in (examples, known))
    every = 0.1 if sys.stderr.isatty() else 10.0  # seconds; a log file gets a line now and then

    def on_finish(finished: int) -> None:
        bar.update(finished)
        this.stop.check()

    bar = tqdm(total=rows, initial=before, desc=label, unit="row", leave=False, mininterval=every)
    with bar:
        return evaluate(
            policy,
            this.task,
            examples,
            **(how or how_to_judge(this)),
            max_rows=config.rollout_rows,
            on_finish=on_finish,
            done=known,
            on_answers=begun.add if begun else lambda answers: None,
        )


def held_out(this: Run) -> Sequence[Example]:
    return this.task.evaluation[: this.config.eval_examples]


def how_to_judge(this: Run, tokens: int | None = None) -> dict:
    """What the answers depend on besides the model and the examples."""
    config = this.config
    return {
        "max_new_tokens": tokens or config.max_completion_length,
        "prompt_format": config.prompt_format,
        "samples": config.eval_samples,
        "turns": config.turns,
        "temperature": config.temperature,
        "seed": config.seed,
    }


def evaluate_as(name: str, this: Run, policy: Policy, step: int) -> None:
    """Evaluate, and keep the summary in results.json and every answer in evaluations/.

    An evaluation that was stopped goes on behind the answers that it has left there.
    """
    config, tokens, label = this.config, None, f"eval {name}"
    if name == START and config.model == SCRATCH:
        tokens = min(config.max_completion_length, UNTRAINED_TOKENS)
    how = how_to_judge(this, tokens)
    begun = UnfinishedAnswers(
        this.folder / "evaluations" / f"{name}.jsonl.partial",
        held_out(this),
        lambda: {"step": step, **how, **what_is_judged(name, this, policy)},
    )
    if begun.done:
        print(f"{label}: {len(begun.done)} answers were there already", file=sys.stderr)
    found = judge(this, policy, label, how, begun)
    if is_first():
        keep_answers(name, this, found)
    stage = STAGE.get(name) or first_stage(this)
    this.recorder.metrics(stage, step, {"eval/accuracy": found.accuracy})
    this.recorder.result(name, {"step": step, **found.summary()})
    begun.delete()  # now that results.json has them
    lenient = found.accuracy_lenient
    more = "" if lenient is None else f", {lenient:.1%} by the lenient judge"
    print(f"{name}: {found.accuracy:.1%} of {len(found.answers)}{more}", file=sys.stderr)


def what_is_judged(name: str, this: Run, policy: Policy) -> dict:
    """The model, the task and its judges, as far as answers that were kept have to agree in them.

    The model of a stage is known by its files: one that was read back from them, its adapter
    merged, is not bit for bit the policy that was trained.
    """
    saved = name in MODEL
    return {
        "model": files_digest(this.folder / MODEL[name]) if saved else weights_digest(policy.model),
        "examples": len(held_out(this)),
        "options": asdict(this.options),
        "lenient": this.task.is_correct_lenient is not None,
    }


def keep_answers(name: str, this: Run, found: Evaluation) -> None:
    """Write every answer to evaluations/, and the task's picture of them."""
    folder = this.folder / "evaluations"
    write_answers(folder / f"{name}.jsonl", found.answers)
    if this.task.draw is not None:
        this.task.draw(folder / f"{name}.png", found.answers)


def results_until(folder: Path, checkpoint: Path | None) -> dict[str, dict]:
    """The entries of results.json that are not later than the checkpoint."""
    last = folder_position(checkpoint) if checkpoint else position(STAGES[-1], sys.maxsize)
    return {
        name: result
        for name, result in read_results(folder).items()
        if name not in STAGE or position(STAGE[name], result["step"]) <= last
    }


def first_stage(this: Run) -> str:
    """The one whose curves the evaluation of the start belongs to, at its step 0."""
    return next(iter(trained_stages(this.config)), "grpo")
