"""Rejection sampling: a policy's own right answers to the training prompts become SFT data.

As between the rounds of DeepSeek-R1 (arXiv 2501.12948): a model trained by GRPO alone finds ways of
its own, the right ones among its answers are the cold start of the next round, and that one begins
from the base model again.

    python train.py --task T --model BASE --stage grpo --output-dir zero
    python train.py --resume zero --stage collect
    python train.py --task T --model BASE --sft-data zero/collected.jsonl

Prompts go in batches. What a batch has found is appended to collected.jsonl, then counted in
collected.json; a kill in between is undone by the count. A prompt's random numbers depend on the
seed and its place alone, so that neither a stop nor the number of ranks changes what is collected.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from data import Task
from grpo.checkpoint import STAGES, folder_position
from grpo.config import Config
from grpo.distributed import from_first, is_first
from grpo.episodes import Episode, play
from grpo.errors import UserError
from grpo.evaluate import FULL_BATCHES
from grpo.interrupt import shared_out
from grpo.policy import Policy
from grpo.record import write_aside
from grpo.results import AFTER_GRPO, AFTER_SFT, MODEL, STAGE
from grpo.sampling import Sampling
from grpo.scratch import SCRATCH
from grpo.stages import Run, open_recorder, start_policy
from grpo.tokenizer import render_prompt

ROWS, COUNT = "collected.jsonl", "collected.json"
EPOCHS = 2  # of the SFT that is proposed, as DeepSeek-R1's on such data


@dataclass
class Tally:
    """What has been collected so far; collected.json."""

    policy: str  # that is sampled
    prompts: int = 0  # asked
    solved: int = 0  # of them, with an answer that is kept: the rows of the file
    right: int = 0  # right completions
    cut: int = 0  # of those, how many were cut by the length: they do not show how to stop
    size: int = 0  # bytes of the file


@dataclass
class Found:
    """Of one prompt: the kept answer as a row of the file, if any; how many were right, and cut."""

    row: dict | None
    right: int
    cut: int


def collect_stage(this: Run) -> None:
    """Sample the policy that the run's folder has finished last, or else config.model."""
    config, name = sampled_policy(this)
    if config.train_levels:  # other prompts: what was collected of all does not count
        name += f", asked of the levels {config.train_levels}"
    policy = start_policy(this, config, with_reference=False)
    open_recorder(this)
    total = min(config.collect_prompts or sys.maxsize, len(this.task.train))
    tally = collect(policy, this.task, config, this.folder, name, total, this.stop.check)
    print(summary(tally, config, this.folder / ROWS))


def sampled_policy(this: Run) -> tuple[Config, str]:
    """The settings that load it, and its name."""
    config, results = this.config, this.results
    if this.checkpoint:
        stage, step = folder_position(this.checkpoint)
        name = next(n for n in STAGE if STAGE[n] == STAGES[stage])
        if results.get(name, {}).get("step", -1) < step:
            raise UserError(
                f"--stage collect: the {STAGES[stage]} of {this.folder} is not finished; first go "
                f"on with --resume {this.folder} --stage all"
            )
    for name in (AFTER_GRPO, AFTER_SFT):
        if name in results:
            plain = replace(config, adapter=None, quantize="none")
            plain.model = str(this.folder / MODEL[name])
            return plain, f"{MODEL[name]} after step {results[name]['step']}"
    if config.model == SCRATCH:
        raise UserError(f"--stage collect: {this.folder} has no trained model to sample")
    return config, " with ".join(filter(None, (config.model, config.adapter)))


def collect(
    policy: Policy,
    task: Task,
    config: Config,
    folder: Path,
    name: str,
    total: int,
    check_stop: Callable[[], None] = lambda: None,
) -> Tally:
    """Ask the prompts up to `total` that are not asked yet, and keep what is right in the folder.

    Raises Stopped, the batch in progress lost, if check_stop does so on a rank.
    """
    tally = Tally(**from_first(lambda: asdict(go_back(folder, name))))
    size = config.num_generations
    batch = max(1, FULL_BATCHES * config.rollout_rows // size)
    every = 0.1 if sys.stderr.isatty() else 10.0  # seconds; a log file gets a line now and then

    def on_finish(rows: int) -> None:
        bar.update(rows)
        check_stop()

    with tqdm(total=total * size, initial=tally.prompts * size, desc="collect", unit="row",
              leave=False, mininterval=every) as bar:  # fmt: skip
        while tally.prompts < total:
            places = range(tally.prompts, min(tally.prompts + batch, total))
            rows = shared_out(lambda own: sample(policy, task, config, own, on_finish), places)
            keep(folder, tally, [Found(**row) for row in rows])
            bar.set_postfix_str(f"{tally.solved} of {tally.prompts} solved", refresh=False)
            bar.update(tally.prompts * size - bar.n)  # under torchrun, those of the other ranks
    return tally


def sample(
    policy: Policy, task: Task, config: Config, places: range, on_finish: Callable[[int], None]
) -> list[dict]:
    """G completions of each of these training prompts, judged: the fields of Found."""
    examples = [task.train[i] for i in places]
    groups = play(
        policy,
        task,
        [render_prompt(policy.tokenizer, e.messages, config.prompt_format) for e in examples],
        examples,
        config.num_generations,
        config.max_completion_length,
        Sampling(config.temperature, config.top_k, config.top_p, config.min_p),
        turns=config.turns,
        prompt_format=config.prompt_format,
        max_rows=config.rollout_rows,
        on_finish=on_finish,
        uniforms=torch.cat([random_numbers(config, i) for i in places]),
    )
    return [asdict(pick(task, config, group)) for group in groups]


def random_numbers(config: Config, place: int) -> torch.Tensor:
    """[G, C], one a token of a prompt's completions."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + place)
    return torch.rand(config.num_generations, config.max_episode_length, generator=generator)


def pick(task: Task, config: Config, episodes: list[Episode]) -> Found:
    """One of the right answers that end by themselves, by --collect-keep.

    Of an episode of several turns it is the last answer, and the turns before are its prompt.
    """
    right = [e for e in episodes if e.text.strip() and task.is_correct(e.text, e.example)]
    whole = [e for e in right if e.completion.finish_reason == "stop"]
    cut = len(right) - len(whole)
    if not whole:
        return Found(None, len(right), cut)

    def tokens(episode: Episode) -> int:
        return len(episode.completion.logprobs)

    best = min(whole, key=tokens) if config.collect_keep == "shortest" else whole[0]
    row = {
        "prompt": best.example.messages,
        "completion": best.text,
        "level": best.example.level,
        "tokens": tokens(best),
        "right": len(right),
        "of": len(episodes),
    }
    return Found(row, len(right), cut)


# ---- the files -----------------------------------------------------------------------------------


def go_back(folder: Path, name: str) -> Tally:
    """The count, with the file cut to it: rows that were written after it are sampled again."""
    rows, count = folder / ROWS, folder / COUNT
    if not count.exists():
        if rows.exists():
            raise UserError(f"{rows}: there is no {COUNT} beside it to go on from; move it away")
        write_aside(count, as_text(Tally(name)))
    try:
        tally = Tally(**json.loads(count.read_bytes()))
    except (ValueError, TypeError):
        raise UserError(f"{count}: this is not the count of {ROWS}; move both away") from None
    if tally.policy != name:
        raise UserError(
            f"{rows}: these are answers of another policy ({tally.policy}; now it is {name}); move "
            f"it and {COUNT} away to collect again"
        )
    rows.touch()
    if rows.stat().st_size < tally.size:
        raise UserError(f"{rows} has lost rows that {COUNT} counts; move both away to start afresh")
    os.truncate(rows, tally.size)
    return tally


def keep(folder: Path, tally: Tally, found: list[Found]) -> None:
    """Add a batch to the tally and, on the first rank, to the files."""
    kept = [f.row for f in found if f.row]
    text = "".join(json.dumps(row) + "\n" for row in kept).encode()
    tally.prompts += len(found)
    tally.solved += len(kept)
    tally.right += sum(f.right for f in found)
    tally.cut += sum(f.cut for f in found)
    tally.size += len(text)
    if is_first():
        with open(folder / ROWS, "ab") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # before the count says that it is there
        write_aside(folder / COUNT, as_text(tally))


def as_text(tally: Tally) -> str:
    return json.dumps(asdict(tally), indent=2) + "\n"


def summary(tally: Tally, config: Config, file: Path) -> str:
    """How much was solved, and the command that goes on; UserError if there is nothing to go on
    with."""
    size, length = config.num_generations, config.max_completion_length
    if not tally.solved:
        why = f"in {size} completions each, none of the {tally.prompts} prompts has a right answer"
        way = "try more --num-generations, an easier task, or a policy that was trained for longer"
        if tally.cut:
            why = f"all {tally.cut} right answers were cut by --max-completion-length {length}"
            way = "raise it"
        raise UserError(f"--stage collect: {why}; nothing is collected; {way}, in a new run")
    steps = max(1, round(EPOCHS * tally.solved / config.sft_batch_size))
    share_right = tally.right / (tally.prompts * size)
    return (
        f"{tally.solved} of {tally.prompts} prompts are solved "
        f"({tally.solved / tally.prompts:.1%}; of all completions {share_right:.1%}), one answer "
        f"each is in {file}\nto go on, with the settings of the task and the model to be trained: "
        f"python train.py --task {config.task} --stage all --sft-data {shlex.quote(str(file))} "
        f"--sft-steps {steps}"
    )
