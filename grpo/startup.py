"""What a run does before it computes anything: threads, the task, the disk, where to go on."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import torch
import transformers
from tqdm import tqdm

from data import Example, Task, table_rows, task_module
from data.sft_file import read_sft_file
from grpo.checkpoint import find_checkpoint, folder_position
from grpo.config import Config, changed_settings, from_json, resolved
from grpo.distributed import local_world_size, world_size
from grpo.errors import UserError
from grpo.filtering import check_filter
from grpo.memory import ModelShape, trainable_parameters
from grpo.policy import Policy, load_shape
from grpo.pretrained import pick_device
from grpo.scratch import SCRATCH, made_from_scratch
from grpo.tokenizer import encode_target, render_prompt
from rewards import weighted_sum

SEEN_PROMPTS, CHECKED_PROMPTS = 2_000, 200  # of the first so many of a set, so many are encoded
CHECKED_TARGETS = 100  # and of so many SFT targets
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
LOG_BYTES = 50_000_000  # metrics, TensorBoard, completions and pictures of a long run
ADAM_BYTES = {"adamw": 8}  # of a weight's two states; 2 if they are held in 8 bits


def prepare_cpu(threads: int) -> None:
    """Threads, and memory that is kept.

    torch's own default counts hyper-threads, which slow matrix products down. And glibc gives
    large blocks back to the system as soon as they are free, to fault them in again, zeroed, a
    moment later: a tenth of a training pass.
    """
    torch.set_num_threads(threads or default_threads())
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: None)
        mallopt(MMAP_THRESHOLD, 2**30)
        mallopt(TRIM_THRESHOLD, 2**31 - 1)


def default_threads() -> int:
    """The cores, shared by the processes that torchrun has started on this machine."""
    return max(1, physical_cores() // local_world_size())


def physical_cores() -> int:
    """Cores that this process may use, two threads of one core counted once."""
    cores = set()
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    for cpu in usable:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(topology.read_text() if topology.is_file() else str(cpu))
    return len(cores)


def as_on_this_machine(config: Config, dtype: torch.dtype) -> Config:
    """The settings with device, dtype and threads as they are here, to be shown. In config.json
    they stay as they were given: a resume may be on another machine."""
    return replace(
        config,
        device=pick_device(config.device).type,
        dtype=str(dtype).removeprefix("torch."),
        threads=config.threads or default_threads(),
    )


def keep_screen_clear() -> None:
    """Warnings as a line above the bar; no bars of the libraries but those of downloads; no
    traceback of TensorBoard's writer thread, whose full disk the recorder tells in a line."""
    # A library's announcement to another library is nothing that a user could act on.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.showwarning = lambda text, *_, **__: tqdm.write(f"warning: {text}", file=sys.stderr)
    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.utils.enable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    threading.excepthook = _thread_failed


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)


def load_task(config: Config, options) -> tuple[Task, list[str] | None]:
    """The task, and the vocabulary of a model made from scratch for it, if the task has one."""
    module, tokens = task_module(config.task), None
    if config.model == SCRATCH and hasattr(module, "scratch_tokens"):
        tokens = module.scratch_tokens(options)
    task = module.load(options, config.seed, made_from_scratch(config.model))
    if config.sft_data and "sft" in trained_stages(config):
        task = replace(task, sft=read_sft_file(config.sft_data))
    samples = "grpo" in trained_stages(config) or config.stage == "collect"
    if config.train_levels is not None and samples:
        chosen = of_levels(task.train, config.train_levels)
        print(
            f"note: of {len(task.train):,} training prompts the {len(chosen):,} of the levels "
            f"{config.train_levels} are sampled (--train-levels)",
            file=sys.stderr,
        )
        task = replace(task, train=chosen)
    weights = {**task.reward_weights, **config.weights_of_rewards()}
    weighted_sum({name: [] for name in task.reward_functions}, weights, 0)  # refuses unknown names
    check_filter(config, task, weights)
    if config.turns > 1 and task.reply is None:
        raise UserError(
            f"--turns {config.turns}: the task {task.name} replies to no answer; leave it at 1"
        )
    return task, tokens


class Chosen(Sequence[Example]):
    """Some of the examples, each still made when it is asked for."""

    def __init__(self, examples: Sequence[Example], places: list[int]):
        self.examples, self.places = examples, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self.examples[place] for place in self.places[index]]
        return self.examples[self.places[index]]


def of_levels(examples: Sequence[Example], levels: str) -> Chosen:
    """The examples of the levels "name,name"; raises UserError if one of these names none."""
    places: dict[str, list[int]] = {}
    for place, example in enumerate(examples):
        places.setdefault(example.level, []).append(place)
    rows = {row for level in places for row in table_rows(level)}
    wanted = {name.strip() for name in levels.split(",")}
    for name in sorted(wanted - rows):
        raise UserError(
            f"--train-levels: no training example is of level '{name}'; there are: "
            f"{', '.join(sorted(rows)) or 'none in this task'}; --train-levels none takes all"
        )
    chosen = [places[level] for level in places if wanted.intersection(table_rows(level))]
    return Chosen(examples, sorted(place for some in chosen for place in some))


def trained_stages(config: Config) -> list[str]:
    """Which of "sft" and "grpo" config.stage asks for, in their order."""
    sft = config.stage in ("sft", "all") and config.sft_steps > 0
    return ["sft"] * sft + ["grpo"] * (config.stage in ("grpo", "all"))


def refuse_idle_ranks(config: Config) -> None:
    """Raise UserError if torchrun has started more processes than a step has parts."""
    for stage, flag, parts in (
        ("sft", "--sft-batch-size", config.sft_batch_size),
        ("grpo", "--prompts-per-step", config.prompts_per_step),
    ):
        if stage in trained_stages(config) and parts < world_size():
            raise UserError(
                f"{flag} {parts} (of the whole step) cannot be shared by {world_size()} processes; "
                "raise it, or start fewer (torchrun --nproc-per-node)"
            )


def resume_point(config: Config, options) -> Path | None:
    """The checkpoint to go on from; says what is passed over and which settings have changed."""
    given, folder = Path(config.resume), Path(config.output_dir)
    if folder_position(given) is None and given.resolve() != folder.resolve():
        raise UserError(
            f"--resume {given}: neither the folder of a run nor one of its checkpoints; a "
            "checkpoint that was set aside has to be renamed to <stage>-step-<number> first"
        )
    checkpoint, notes = find_checkpoint(given)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    saved = folder / "config.json"
    before = resolved(*from_json(saved.read_text("utf-8"), str(saved)))
    for line in changed_settings(before, (config, options)):
        print(f"warning: another setting than before the stop: {line}", file=sys.stderr)
    if checkpoint is not None and folder_position(checkpoint)[0] < 0:
        raise UserError(f"--resume {checkpoint}: a checkpoint of no stage that this program knows")
    return checkpoint


def disk_needed(config: Config, scratch_tokens: list[str] | None) -> int:
    """Bytes that the run will still write, roughly: checkpoints, exported models, logs."""
    stages = len(trained_stages(config))
    if not stages:
        return LOG_BYTES
    shape, dtype = load_shape(config, scratch_tokens)
    weight_bytes = dtype.itemsize
    models = (shape.linear_parameters + shape.other_parameters) * weight_bytes
    # One more than are kept: the next is whole before the oldest goes.
    checkpoints = (config.keep_checkpoints + 1) * checkpoint_bytes(config, shape, weight_bytes)
    folder = Path(config.output_dir)
    there = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) if config.resume else 0
    return max(0, stages * (checkpoints + models) - there) + LOG_BYTES


def checkpoint_bytes(config: Config, shape: ModelShape, weight_bytes: int) -> int:
    """The trained weights, in float32 too if the model holds fewer bits, and AdamW's states."""
    masters = 4 if config.lora_rank > 0 or weight_bytes == 4 else weight_bytes + 4
    return trainable_parameters(shape, config) * (masters + ADAM_BYTES.get(config.optimizer, 2))


def check_prompts(config: Config, task: Task, policy: Policy) -> None:
    """Refuse a prompt over max_prompt_length, since cutting it would change the question, one that
    the tokenizer cannot spell, a stage without examples, and answers that could never be right."""
    stages, collects = trained_stages(config), config.stage == "collect"
    if "sft" in stages and not task.sft:
        raise UserError(
            f"--stage {config.stage}: the task {task.name} has no examples with targets to start "
            "from; leave SFT out with --sft-steps 0"
        )
    sets = {
        "SFT": task.sft if "sft" in stages else (),
        "training": task.train if "grpo" in stages or collects else (),
        "held-out": () if collects else task.evaluation[: config.eval_examples],
    }
    if ("grpo" in stages or collects) and not task.train:
        raise UserError(f"the task {task.name} has no training examples; give it some")
    for name, examples in sets.items():
        for i, example in _longest(examples):
            _check_prompt(config, policy, example, f"{name} example {i + 1}")
    if "sft" in stages:
        _check_targets(config, task, policy)


def _longest(examples: Sequence[Example]) -> list[tuple[int, Example]]:
    """(index, example) of the longest prompts, in bytes: nearly always those of the most tokens.
    To encode every prompt would take a second for each thousand or two."""
    seen = [(i, examples[i]) for i in range(min(len(examples), SEEN_PROMPTS))]
    return sorted(seen, key=_prompt_bytes, reverse=True)[:CHECKED_PROMPTS]


def _prompt_bytes(numbered: tuple[int, Example]) -> int:
    return sum(len(m["content"].encode("utf-8", "replace")) for m in numbered[1].messages)


def _check_prompt(config: Config, policy: Policy, example: Example, what: str) -> None:
    ids = render_prompt(policy.tokenizer, example.messages, config.prompt_format)
    if len(ids) > config.max_prompt_length:
        raise UserError(
            f"{what} has a prompt of {len(ids)} tokens, over --max-prompt-length "
            f"{config.max_prompt_length}; raise it, or leave the example out (it is never cut)"
        )
    unknown = policy.tokenizer.unk_token_id
    if unknown is not None and unknown in ids:
        raise UserError(
            f"--model {config.model}: its tokenizer cannot spell the prompt of {what}; give the "
            "task's settings that the model was trained with (config.json of its run has them)"
        )


def _check_targets(config: Config, task: Task, policy: Policy) -> None:
    """Whether what SFT teaches, stop token included, could be sampled within the longest length."""
    limit, count = config.max_completion_length, min(len(task.sft), CHECKED_TARGETS)
    targets = (encode_target(policy.tokenizer, task.sft[i].target) for i in range(count))
    lengths = [len(ids) + 1 for ids in targets]
    over = sum(length > limit for length in lengths)
    found = (
        f"--max-completion-length {limit}: {over} of the first {count} SFT targets are longer, up "
        f"to {max(lengths)} tokens"
    )
    if over > count / 2:
        raise UserError(f"{found}; no sample of theirs could ever be right: raise it")
    if over:
        warnings.warn(f"{found}; no sample of theirs can be right", stacklevel=2)
