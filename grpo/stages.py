"""The stages of a run, each from its policy to its evaluation.

Which stages come next is read off the run's folder: results.json says which models are finished
and judged, checkpoints/ has the unfinished stage. Nothing in the folder changes until the model is
loaded and, in a resumed run, has taken the checkpoint's weights.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import grpo.loop
import grpo.sft
from data import Task
from grpo.checkpoint import STAGES, folder_position, position, set_aside_from
from grpo.config import Config, to_json
from grpo.distributed import is_first
from grpo.errors import UserError
from grpo.export import save_adapter, save_merged, write_model_card
from grpo.interrupt import Stopped, StopRequest
from grpo.optimizer import build_optimizer
from grpo.policy import Policy, load_policy
from grpo.record import Recorder, SilentRecorder
from grpo.results import (
    AFTER_GRPO,
    AFTER_SFT,
    MODEL,
    START,
    evaluate_as,
    first_stage,
    judge,
    results_until,
)
from grpo.startup import check_prompts
from grpo.supported import check_supported
from grpo.training import Training


@dataclass
class Run:
    """What the stages share."""

    config: Config
    options: object
    task: Task
    scratch_tokens: list[str] | None
    checkpoint: Path | None  # to go on from
    stop: StopRequest
    open_files: ExitStack
    recorder: Recorder | None = None
    prompts_checked: bool = False

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def results(self) -> dict[str, dict]:
        """results.json up to the checkpoint that the run goes on from."""
        return results_until(self.folder, None if self.recorder else self.checkpoint)


# ---- the stages ---------------------------------------------------------------------------------


def evaluate_start(this: Run) -> None:
    """The evaluation that the others are compared with."""
    policy = start_policy(this, this.config, with_reference=False)
    open_recorder(this)
    evaluate_as(START, this, policy, 0)


def evaluate_saved(name: str, this: Run) -> None:
    """Judge a model that this run has finished and, for a stop or by its settings, not judged."""
    model = this.folder / MODEL[name]
    plain = replace(this.config, model=str(model), adapter=None, quantize="none")
    policy = start_policy(this, plain, with_reference=False)
    open_recorder(this)
    evaluate_as(name, this, policy, this.results[name]["step"])
    write_cards(this, policy, [model])
    this.recorder.curves()


def sft_stage(this: Run) -> None:
    """The cold start. Its adapter is merged, so that GRPO begins at its own reference: KL is 0."""
    config, target = this.config, this.folder / MODEL[AFTER_SFT]
    if this.checkpoint and folder_position(this.checkpoint) >= position("grpo", 0):
        raise UserError(
            f"--sft-steps {config.sft_steps}: GRPO has begun already, and SFT comes before it; "
            "start a new run, or resume one of this run's checkpoints of SFT"
        )
    policy = start_policy(this, config, with_reference=False)  # there is no KL in SFT
    training = begin(this, "sft", policy, config.sft_steps)
    with training.saved_on_failure():
        grpo.sft.train(policy, this.task, config, training)
    this.stop.check_together()
    if is_first():
        save_merged(policy, target)
    finish(AFTER_SFT, this, policy, training.step, [target])


def grpo_stage(this: Run) -> None:
    """GRPO from the cold start's model if there is one in the run, else from config.model."""
    config, target = this.config, this.folder / "grpo"
    if AFTER_SFT in this.results:
        # That model has the adapter in its weights already.
        config = replace(config, model=str(this.folder / MODEL[AFTER_SFT]), adapter=None)
    elif this.checkpoint and folder_position(this.checkpoint)[0] == STAGES.index("sft"):
        raise UserError(
            f"--stage grpo: the SFT of {this.folder} is not finished; resume it with --stage all"
        )
    policy = start_policy(this, config, with_reference=True)
    training = begin(this, "grpo", policy, config.max_steps)

    def evaluate_now():
        try:
            found = judge(this, policy)
        except Stopped:  # the loop ends at once, and saves
            return
        this.recorder.metrics("grpo", training.step, {"eval/accuracy": found.accuracy})

    with training.saved_on_failure():
        grpo.loop.train(policy, this.task, config, training, evaluate_now)
    this.stop.check_together()
    exports = [target / "merged"]
    if is_first():
        save_merged(policy, exports[0])
    if policy.has_adapter:
        exports.append(target / "adapter")
        if is_first():
            save_adapter(policy, exports[1])
    finish(AFTER_GRPO, this, policy, training.step, exports)


# ---- the parts of a stage -----------------------------------------------------------------------


def start_policy(this: Run, config: Config, with_reference: bool) -> Policy:
    """The policy that these settings describe, checked."""
    tokens, new_tokens = this.scratch_tokens, this.task.new_tokens
    policy = load_policy(config, tokens, new_tokens, with_reference=with_reference)
    check_supported(policy, config.max_prompt_length + config.max_episode_length)
    if not this.prompts_checked:  # the stages of a run share their tokenizer
        check_prompts(config, this.task, policy)
        this.prompts_checked = True
    return policy


def open_recorder(this: Run) -> Recorder:
    """From here on the folder changes. Whatever is later than the checkpoint is set aside."""
    if this.recorder is None and not is_first():
        this.recorder = SilentRecorder(this.folder)
    if this.recorder is None:
        kept = this.results
        # Without a checkpoint, the line of step 0 is that of the evaluation of the start.
        at = folder_position(this.checkpoint) if this.checkpoint else position(first_stage(this), 0)
        recorder = Recorder(
            this.folder,
            to_json(this.config, this.options),
            resume=bool(this.config.resume),
            resume_at=(STAGES[at[0]], at[1]) if this.config.resume else None,
        )
        this.recorder = this.open_files.enter_context(recorder)
        if this.config.resume:
            recorder.keep_results(kept)
            set_aside_from(this.folder, (at[0], at[1] + 1))
    return this.recorder


def begin(this: Run, stage: str, policy: Policy, steps: int) -> Training:
    """A stage's training, restored if the run goes on from a checkpoint of this stage."""
    config = this.config
    optimizer = build_optimizer(
        policy.trainable_parameters(),
        kind=config.optimizer,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
    )
    training = Training(
        stage=stage,
        policy=policy,
        optimizer=optimizer,
        recorder=this.recorder,
        config=config,
        total_steps=steps,
        stop=this.stop,
        generator=torch.Generator().manual_seed(config.seed),
    )
    if this.checkpoint and folder_position(this.checkpoint)[0] == STAGES.index(stage):
        training.restore(this.checkpoint)
        print(f"{stage}: going on from {this.checkpoint}", file=sys.stderr)
    training.recorder = open_recorder(this)
    return training


def finish(name: str, this: Run, policy: Policy, step: int, exports: list[Path]) -> None:
    """The models of a stage are on the disk: note it, judge, and write their cards."""
    this.recorder.result(name, {"step": step})
    write_cards(this, policy, exports)
    if this.config.eval_examples:
        evaluate_as(name, this, policy, step)
        write_cards(this, policy, exports)
    this.recorder.curves()


def write_cards(this: Run, policy: Policy, folders: list[Path]) -> None:
    if not is_first():
        return
    settings = {**asdict(this.config), **asdict(this.options)}
    cold_start = this.folder / MODEL[AFTER_SFT]
    for folder in folders:
        about = dict(settings)
        if folder.name == "adapter" and AFTER_SFT in this.results:
            about |= {"model": str(cold_start), "adapter": None}  # what it was trained on
        method = "supervised fine-tuning, before GRPO," if folder == cold_start else "GRPO"
        write_model_card(folder, policy, this.task.name, about, this.results, method)
