"""One run from start to end, or from where it was stopped to its end.

    evaluate the start → sft → evaluate → grpo → evaluate
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from grpo.checkpoint import STAGES
from grpo.collect import collect_stage
from grpo.config import Config, describe
from grpo.distributed import from_first, is_first, process_group
from grpo.errors import UserError
from grpo.evaluate import table
from grpo.interrupt import Stopped, StopRequest
from grpo.memory import describe_memory, estimate, tokens_per_step
from grpo.policy import load_shape
from grpo.pretrained import pick_device
from grpo.record import cannot_write, check_output, disk_is_full, only_run_in
from grpo.results import AFTER_GRPO, AFTER_SFT, START, results_until
from grpo.stages import Run, evaluate_saved, evaluate_start, grpo_stage, sft_stage
from grpo.startup import (
    as_on_this_machine,
    disk_needed,
    keep_screen_clear,
    load_task,
    prepare_cpu,
    refuse_idle_ranks,
    resume_point,
    trained_stages,
)


def run(config: Config, options, flags: set[str]) -> int:
    """All stages that config.stage names; the exit status, 130 after Ctrl-C or SIGTERM."""
    keep_screen_clear()
    refuse_idle_ranks(config)
    prepare_cpu(config.threads)
    ranks = process_group(pick_device(config.device))
    with ranks, StopRequest() as stop, ExitStack() as open_files:
        config.output_dir = from_first(lambda: config.output_dir)  # its name may be the time
        folder = Path(config.output_dir)
        if is_first():
            check_output(folder, bool(config.resume))
            open_files.enter_context(only_run_in(folder))
        checkpoint = going_on_from(config, options) if config.resume else None
        stages = stages_left(config, checkpoint)
        if not stages:
            print(f"{folder}: this run is finished, there is nothing left to do")
            return 0
        task, scratch_tokens = load_task(config, options)
        if is_first():
            check_output(folder, bool(config.resume), disk_needed(config, scratch_tokens))
        this = Run(config, options, task, scratch_tokens, checkpoint, stop, open_files)
        try:
            with explained(this):
                for stage in stages:
                    stage(this)
                    # The other ranks, too, must not look for its results before they are written.
                    stop.check_together()
        except Stopped:
            if this.recorder:
                this.recorder.curves()
            print(how_to_go_on(this))
            return 130
        if config.stage != "collect":
            summarise(this)
    return 0


def going_on_from(config: Config, options) -> Path | None:
    """The checkpoint that the first rank finds; looking can rename what a kill left behind."""
    found = from_first(lambda: str(resume_point(config, options) or ""))
    return Path(found) if found else None


@contextmanager
def explained(this: Run) -> Iterator[None]:
    """What the machine is short of, in one line instead of a traceback."""
    try:
        yield
    except OSError as error:
        if not disk_is_full(error):
            raise
        raise cannot_write(this.folder, error) from error
    except torch.OutOfMemoryError as error:
        folder = shlex.quote(str(this.folder))
        again = f"go on by --resume {folder}" if this.recorder else "try again"
        raise UserError(
            f"the device's memory is full; {again} with a lower --tokens-per-micro-batch or "
            "--rollout-rows, or --gradient-checkpointing"
        ) from error


def stages_left(config: Config, checkpoint: Path | None) -> list[Callable[[Run], None]]:
    """The stages that config.stage names, without those that the folder shows as done."""
    folder = Path(config.output_dir)
    results = results_until(folder, checkpoint)
    if config.stage == "collect":
        return [collect_stage]  # it says itself if all is there

    def trained(name: str, steps: int) -> bool:
        return results.get(name, {}).get("step", -1) >= steps

    def judged(name: str) -> bool:
        return config.eval_examples == 0 or "accuracy" in results.get(name, {})

    left: list[Callable[[Run], None]] = [] if judged(START) else [evaluate_start]
    for stage in STAGES:
        name, steps, function = {
            "sft": (AFTER_SFT, config.sft_steps, sft_stage),
            "grpo": (AFTER_GRPO, config.max_steps, grpo_stage),
        }[stage]
        if stage in trained_stages(config) and not trained(name, steps):
            left.append(function)
        elif name in results and not judged(name):
            left.append(partial(evaluate_saved, name))
    return left


def how_to_go_on(this: Run) -> str:
    if this.recorder is None and not this.config.resume:
        return "stopped; nothing was done yet"
    return f"stopped and saved; to go on: python train.py --resume {shlex.quote(str(this.folder))}"


def summarise(this: Run) -> None:
    """The table of all evaluations, and where everything is."""
    found = {name: r for name, r in this.results.items() if "accuracy" in r}
    if found:
        print(table(found))
    names = ("results.json", "curves.png", "completions/", "evaluations/")
    there = ", ".join(name for name in names if (this.folder / name).exists())
    print(f"everything is in {this.folder}: {there}")


# ---- --dry-run ----------------------------------------------------------------------------------


def dry_run(config: Config, options, flags: set[str]) -> int:
    """Print the resolved settings, the tokens of a step and the memory; compute nothing."""
    refuse_idle_ranks(config)
    _, scratch_tokens = load_task(config, options)
    shape, dtype = load_shape(config, scratch_tokens)
    here = as_on_this_machine(config, dtype)
    print(describe(here, options, flags))
    print()
    for name, count in tokens_per_step(config).items():
        print(f"{name:<22}{count:>12,}")
    print()
    print(describe_memory(estimate(shape, here, dtype.itemsize)))
    return 0
