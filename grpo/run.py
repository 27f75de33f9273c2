"""One run from start to end: its stages, their models and evaluations, and going on after a stop.

    evaluate the start → sft → evaluate → grpo → evaluate

Which stage comes next is read off the run's folder: results.json has the evaluations, sft/ and
grpo/ the finished models, checkpoints/ the unfinished stage.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

import grpo.loop
import grpo.sft
from data import Task, task_module
from grpo.checkpoint import find_checkpoint, folder_position
from grpo.config import Config, changed_settings, describe, from_json, to_json
from grpo.errors import UserError
from grpo.evaluate import Evaluation, evaluate, table
from grpo.export import save_adapter, save_merged, write_model_card
from grpo.interrupt import StopRequest
from grpo.memory import describe_memory, estimate, model_shape, tokens_per_step
from grpo.optimizer import build_optimizer
from grpo.policy import SCRATCH, Policy, load_policy, load_shape
from grpo.record import Recorder
from grpo.supported import check_supported
from grpo.tokenizer import render_prompt
from grpo.training import Training

START, AFTER_SFT, AFTER_GRPO = "start", "after_sft", "after_grpo"
CHECKED_PROMPTS = 2_000  # lengths of so many training prompts are looked up before the start


@dataclass
class Run:
    """What the stages share."""

    config: Config
    options: object
    task: Task
    recorder: Recorder
    stop: StopRequest
    scratch_tokens: list[str] | None

    @property
    def folder(self) -> Path:
        return self.recorder.run_dir


def run(config: Config, options, flags: set[str]) -> int:
    """All stages that config.stage names; the exit status, 130 after Ctrl-C or SIGTERM."""
    use_threads(config.threads)
    task, scratch_tokens = load_task(config, options)
    checkpoint = resume_point(config, options) if config.resume else None
    at = folder_position(checkpoint) if checkpoint else None
    with (
        Recorder(
            config.output_dir,
            to_json(config, options),
            resume=config.resume is not None,
            resume_at=at and (("sft", "grpo")[at[0]], at[1]),
        ) as recorder,
        StopRequest() as stop,
    ):
        this = Run(config, options, task, recorder, stop, scratch_tokens)
        for stage in stages(config):
            stage(this)
            if stop.requested:
                print(f"stopped and saved; to go on: python train.py --resume {this.folder}")
                return 130
        summarise(this)
    return 0


def stages(config: Config) -> list[Callable[[Run], None]]:
    """The stages in their order; each returns at once if the run folder shows it done."""
    order: list[Callable[[Run], None]] = [evaluate_start]
    if config.stage in ("sft", "all") and config.sft_steps > 0:
        order.append(sft_stage)
    if config.stage in ("grpo", "all"):
        order.append(grpo_stage)
    return order


# ---- before anything is computed ----------------------------------------------------------------


def use_threads(threads: int) -> None:
    """torch's own default counts hyper-threads, which slow matrix products down."""
    torch.set_num_threads(threads or physical_cores())


def physical_cores() -> int:
    """Cores that this process may use, two threads of one core counted once."""
    cores = set()
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    for cpu in usable:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(topology.read_text() if topology.is_file() else str(cpu))
    return len(cores)


def load_task(config: Config, options) -> tuple[Task, list[str] | None]:
    """The task, and the vocabulary of a model made from scratch for it, if the task has one."""
    module = task_module(config.task)
    scratch = config.model == SCRATCH
    tokens = module.scratch_tokens(options) if scratch and hasattr(module, "scratch_tokens") else None
    return module.load(options, config.seed, scratch), tokens


def resume_point(config: Config, options) -> Path | None:
    """The checkpoint to go on from; says what is passed over and which settings have changed."""
    checkpoint, notes = find_checkpoint(config.resume)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    saved = Path(config.output_dir) / "config.json"
    before = from_json(saved.read_text("utf-8"), str(saved))
    for line in changed_settings(before, (config, options)):
        print(f"warning: another setting than before the stop: {line}", file=sys.stderr)
    return checkpoint


def check_lengths(this: Run, policy: Policy) -> None:
    """Refuse a prompt over max_prompt_length: cutting it would change the question."""
    config = this.config
    sets = {"training": this.task.train, "held-out": this.task.evaluation}
    for name, examples in sets.items():
        for i in range(min(len(examples), CHECKED_PROMPTS)):
            length = len(
                render_prompt(policy.tokenizer, examples[i].messages, config.prompt_format)
            )
            if length > config.max_prompt_length:
                raise UserError(
                    f"{name} example {i + 1} has a prompt of {length} tokens, over "
                    f"--max-prompt-length {config.max_prompt_length}; raise it, or leave the "
                    "example out (it is never cut)"
                )


def start_policy(this: Run, model: str, with_reference: bool) -> Policy:
    """The policy that a stage starts from, checked."""
    config = replace(this.config, model=model)
    policy = load_policy(
        config,
        this.scratch_tokens,
        this.task.new_tokens,
        with_reference=with_reference,
    )
    check_supported(policy, config.max_prompt_length + config.max_completion_length)
    check_lengths(this, policy)
    return policy


# ---- the stages ---------------------------------------------------------------------------------


def evaluate_start(this: Run) -> None:
    """The evaluation that the others are compared with."""
    if this.config.eval_examples and START not in results(this):
        evaluate_as(START, this, start_policy(this, this.config.model, with_reference=False))


def sft_stage(this: Run) -> None:
    """The cold start. Its adapter is merged, so that GRPO begins at its own reference: KL is 0."""
    config, target = this.config, this.folder / "sft"
    if not target.is_dir():
        policy = start_policy(this, config.model, with_reference=False)
        training = begin(this, "sft", policy, config.sft_steps)
        try:
            grpo.sft.train(policy, this.task, config, training)
        except UserError:
            training.save()
            raise
        this.recorder.curves()
        if this.stop.requested:
            return
        save_merged(policy, target)
        evaluate_as(AFTER_SFT, this, policy)
        write_card(this, policy, target)
    elif config.eval_examples and AFTER_SFT not in results(this):
        evaluate_as(AFTER_SFT, this, start_policy(this, str(target), with_reference=False))


def grpo_stage(this: Run) -> None:
    """GRPO from the cold start's model if there is one in the run, else from config.model."""
    config, target = this.config, this.folder / "grpo"
    done = results(this).get(AFTER_GRPO, {}).get("step", -1) if target.is_dir() else -1
    if done >= config.max_steps:
        return
    start = this.folder / "sft"
    policy = start_policy(this, str(start) if start.is_dir() else config.model, config.beta > 0)
    training = begin(this, "grpo", policy, config.max_steps)

    def evaluate_now():
        found = judge(this, policy)
        this.recorder.metrics("grpo", training.step, {"eval/accuracy": found.accuracy})

    try:
        grpo.loop.train(policy, this.task, config, training, evaluate_now)
    except UserError:
        training.save()
        raise
    this.recorder.curves()
    if this.stop.requested:
        return
    if policy.has_adapter:
        save_adapter(policy, target / "adapter")
    save_merged(policy, target / "merged")
    evaluate_as(AFTER_GRPO, this, policy, step=training.step)
    for folder in target.iterdir():
        write_card(this, policy, folder)


def begin(this: Run, stage: str, policy: Policy, steps: int) -> Training:
    """A stage's training, restored from its newest checkpoint if there is one."""
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
    source = config.resume or this.folder
    checkpoint = find_checkpoint(source, stage)[0]
    if checkpoint and folder_position(checkpoint)[0] == ("sft", "grpo").index(stage):
        training.restore(checkpoint)
        print(f"{stage}: going on from {checkpoint}", file=sys.stderr)
    return training


# ---- evaluations and results --------------------------------------------------------------------


def judge(this: Run, policy: Policy, label: str = "eval") -> Evaluation:
    """Evaluate the policy on the held-out examples, with a progress bar."""
    config = this.config
    examples = this.task.evaluation[: config.eval_examples]
    greedy_and_samples = 1 + (config.eval_samples if config.eval_samples > 1 else 0)
    with tqdm(total=len(examples) * greedy_and_samples, desc=label, unit="row", leave=False) as bar:
        return evaluate(
            policy,
            this.task,
            examples,
            max_new_tokens=config.max_completion_length,
            prompt_format=config.prompt_format,
            max_rows=config.rollout_rows,
            samples=config.eval_samples,
            temperature=config.temperature,
            seed=config.seed,
            on_finish=bar.update,
        )


def evaluate_as(name: str, this: Run, policy: Policy, **more) -> None:
    """Evaluate, and keep the summary in results.json and every answer in evaluations/."""
    if not this.config.eval_examples:
        this.recorder.result(name, more)
        return
    found = judge(this, policy, f"eval {name}")
    folder = this.folder / "evaluations"
    folder.mkdir(exist_ok=True)
    with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
        for answer in found.answers:
            row = {
                "prompt": answer.example.messages,
                "completion": answer.text,
                "correct": answer.correct,
                "reason": answer.reason,
                "level": answer.example.level,
                "tokens": answer.tokens,
                "samples_correct": answer.samples_correct,
            }
            file.write(json.dumps(row) + "\n")
    if this.task.draw is not None:
        this.task.draw(folder / f"{name}.png", found.answers)
    this.recorder.result(name, found.summary() | more)
    print(f"{name}: {found.accuracy:.1%} of {len(found.answers)}", file=sys.stderr)


def results(this: Run) -> dict[str, dict]:
    """results.json as it stands."""
    path = this.folder / "results.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def write_card(this: Run, policy: Policy, folder: Path) -> None:
    settings = {**asdict(this.config), **asdict(this.options)}
    write_model_card(folder, policy, this.task.name, settings, results(this))


def summarise(this: Run) -> None:
    """The table of all evaluations, and where everything is."""
    found = {name: r for name, r in results(this).items() if "accuracy" in r}
    if found:
        print(table(found))
    print(f"everything is in {this.folder}: results.json, curves.png, completions/, evaluations/")


# ---- --dry-run ----------------------------------------------------------------------------------


def dry_run(config: Config, options, flags: set[str]) -> int:
    """Print the resolved settings, the tokens of a step and the memory; compute nothing."""
    _, scratch_tokens = load_task(config, options)
    shape, compute_bytes = load_shape(config, scratch_tokens)
    print(describe(config, options, flags))
    print()
    for name, count in tokens_per_step(config).items():
        print(f"{name:<22}{count:>12,}")
    print()
    print(describe_memory(estimate(shape, config, compute_bytes)))
    return 0
