"""The maze task: find the way through a small maze that is given as text.

After AlphaMaze: supervised fine-tuning on mazes with their ways, then GRPO, evaluated on held-out
mazes in the manner of MazeBench. The grid is in maze_grid.py, its text in maze_text.py, the
choice of mazes in maze_sets.py, the rewards in rewards/maze.py.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data import Example, Task
from data.maze_grid import (
    LARGEST,
    LEVELS,
    MOVES,
    SMALLEST,
    Maze,
    Walk,
    level,
    moves_in,
    moves_text,
    solve,
    walk,
)
from data.maze_sets import SMALLEST_BENCH, bench_mazes, held_out_mazes, training_mazes
from data.maze_text import (
    BLANK,
    ORIGIN,
    RESET,
    TARGET,
    can_reset,
    cell_tokens,
    direct_target,
    maze_tokens,
    read_mazes,
    render,
    reset_target,
    thinking_tokens,
    visual_target,
)
from grpo.config import option
from grpo.errors import UserError
from rewards.maze import CLOSE, MazeAnswer, answer_text, highest_rewards, reward_functions

TARGETS = {"visual": visual_target, "direct": direct_target, "reset": reset_target}

# Of a batch: above these shares an alarm is raised.
LONG_SHARE, CONSTANT_SHARE, UNCLOSED_SHARE = 0.1, 0.5, 0.2


@dataclass
class Options:
    """The maze task's own flags."""

    # fmt: off
    maze_size: int = option(0, "cells a side, 3 to 20; 0 = 5, or 3 for a model from scratch",
                            at_least=0, at_most=LARGEST)
    maze_format: str = option("auto", "what a completion looks like: visual = draw the maze "
                              "at each step, then answer; direct = answer at once; reset = as "
                              "visual, with wrong steps taken back; auto = visual, or direct for "
                              "a model from scratch",
                              choices=("auto", "visual", "direct", "reset"))
    reward_mode: str = option("documented", "the rewards as AlphaMaze describes them, as its "
                              "published code computes them (verbatim), or its later code (v2)",
                              choices=("documented", "verbatim", "v2"))
    maze_instructions: str = option("auto", "whether the prompt explains the task; auto = yes, but "
                                    "not for a model from scratch", choices=("auto", "on", "off"))
    maze_train: int = option(10_000, "mazes for GRPO, or as many as there are (3x3: 2,824)",
                             positive=True)
    maze_sft: int = option(200_000, "mazes for SFT, or as many as there are", positive=True)
    maze_bench: str = option("auto", "evaluate on 100 mazes, 50 easy, 40 medium, 10 hard; off = on "
                             "mazes as the generator makes them; auto = on, but not for 3x3 or a "
                             "model from scratch",
                             choices=("auto", "on", "off"))
    maze_held_out: int = option(200, "how many mazes to hold out with --maze-bench off",
                                positive=True, at_most=1000)
    maze_file: str | None = option(None, 'train on the mazes of this JSONL file, {"maze": text} a '
                                   "line, instead of random ones")
    # fmt: on


# AlphaMaze's own settings, but for SFT's learning rate: the source trained all weights, at 1e-5;
# here it is LoRA, which wants more.
_SOURCE = {
    "prompts_per_step": 2,
    "num_generations": 4,
    "max_prompt_length": 1024,
    "max_completion_length": 4096,
    "temperature": 0.9,
    "beta": 0.04,
    "learning_rate": 1e-6,
    "weight_decay": 0.1,
    "max_grad_norm": 0.1,
    "loss_type": "grpo",
    "max_steps": 1600,
    "sft_steps": 3125,
    "sft_learning_rate": 1e-4,
    "eval_examples": 100,
}
_GPU = {**_SOURCE, "model": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "eval_every": 200}

DEFAULTS = {
    "scratch": {
        "scratch_hidden_size": 128,
        "scratch_layers": 6,
        "scratch_heads": 4,
        "max_prompt_length": 128,  # size x (size + 1) tokens: up to 10x10
        "max_completion_length": 64,  # a path has size x size - 1 moves at most: up to 8x8
        "sft_steps": 900,
        "sft_batch_size": 32,
        "sft_learning_rate": 2e-3,
        "sft_lr_scheduler": "constant",
        "warmup_ratio": 0.02,
        "weight_decay": 0.1,
        "max_steps": 400,
        "prompts_per_step": 32,
        "num_generations": 8,
        "learning_rate": 3e-4,
        "temperature": 1.2,
        "eval_every": 50,
    },
    # What a CPU can bear. The drawings of 5x5 are some 450 tokens each: 1,024 would cut most.
    "cpu": {
        **_SOURCE,
        "maze_size": 3,
        "max_completion_length": 1024,
        "sft_steps": 500,
        "sft_batch_size": 4,
        "max_steps": 200,
    },
    "a10": {**_GPU, "quantize": "nf4"},
    "a6000": _GPU,
}


def load(options: Options, seed: int, from_scratch: bool) -> Task:
    """The task for these flags; seed chooses the training mazes, never the held-out ones."""
    options = resolve(options, from_scratch)
    size, thinks = options.maze_size, options.maze_format != "direct"
    if options.maze_bench == "on":
        held_out = bench_mazes(size)
    else:
        held_out = held_out_mazes(size, options.maze_held_out)
    train, sft = _training_mazes(options, seed, held_out)
    return Task(
        name="maze",
        train=Examples(train, options),
        sft=Examples(sft, options),
        evaluation=Examples(held_out, options),
        reward_functions=reward_functions(options.reward_mode, thinks),
        highest_rewards=highest_rewards(options.reward_mode, thinks),
        is_correct=is_correct,
        failure_reason=failure_reason,
        alarms=alarms,
        new_tokens=maze_tokens(size),
        draw=draw_answers,
        levels=(*LEVELS, "beyond"),
    )


def resolve(options: Options, from_scratch: bool) -> Options:
    """The options with every "auto" decided. Raises UserError for what does not go together."""
    size = options.maze_size or (3 if from_scratch else 5)
    if not SMALLEST <= size <= LARGEST:
        raise UserError(f"--maze-size {size}: mazes have {SMALLEST} to {LARGEST} cells a side")
    if options.maze_bench == "on" and size < SMALLEST_BENCH:
        raise UserError(
            f"--maze-bench on: a {size}x{size} maze has no path of 9 moves, so none is hard; "
            "use --maze-bench off"
        )
    if options.maze_instructions == "on" and from_scratch:
        raise UserError(
            "--maze-instructions on: a model from scratch knows no words; leave the flag out"
        )
    decided = {
        "maze_size": size,
        "maze_format": "direct" if from_scratch else "visual",
        "maze_instructions": "off" if from_scratch else "on",
        "maze_bench": "off" if from_scratch or size < SMALLEST_BENCH else "on",
    }
    open_ones = {n: v for n, v in decided.items() if getattr(options, n) in ("auto", 0)}
    return replace(options, **open_ones)


def _training_mazes(
    options: Options, seed: int, held_out: list[Maze]
) -> tuple[Sequence[Maze], Sequence[Maze]]:
    """The mazes of GRPO and of SFT; both keep clear of the held-out ones, not of each other."""
    usable = can_reset if options.maze_format == "reset" else lambda maze: True
    if options.maze_file is None:
        size = options.maze_size
        return (
            training_mazes(size, options.maze_train, f"train/{seed}/{size}", held_out),
            training_mazes(size, options.maze_sft, f"sft/{seed}/{size}", held_out, usable),
        )
    given = read_mazes(options.maze_file, options.maze_size)
    mazes = [maze for maze in dict.fromkeys(given) if maze not in set(held_out)]
    if not mazes:
        raise UserError(f"{options.maze_file}: every maze in it is one of the held-out ones")
    if len(mazes) < len(given):
        print(
            f"{options.maze_file}: {len(given) - len(mazes)} mazes left out, since they are "
            "repeated or held out for the evaluation",
            file=sys.stderr,
        )
    return mazes, [maze for maze in mazes if usable(maze)]


class Examples(Sequence[Example]):
    """The examples of some mazes, each made when it is asked for."""

    def __init__(self, mazes: Sequence[Maze], options: Options):
        self.mazes, self.options = mazes, options

    def __len__(self) -> int:
        return len(self.mazes)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return make_example(self.mazes[index], self.options)


def make_example(maze: Maze, options: Options) -> Example:
    """The prompt, the target and the answer of one maze; options as `resolve` gives them.

    In the reset format a maze of which no reset data can be made has the visual target.
    """
    path = solve(maze)
    text = render(maze)
    if options.maze_instructions == "on":
        text = f"{instructions(options.maze_format)}\n\n{text}"
    target: Callable[[Maze], str] = TARGETS[options.maze_format]
    if target is reset_target and not can_reset(maze):
        target = visual_target
    return Example(
        messages=[{"role": "user", "content": text}],
        target=target(maze),
        answer=MazeAnswer(moves_text(path), options.maze_format != "direct", maze),
        level=level(len(path)),
    )


def instructions(maze_format: str) -> str:
    """What a pretrained model is told before the maze."""
    sentences = [
        "Find the way through a maze. It is written below, one row of cells a line. A cell is its "
        "coordinate <|row-column|>, then the sides that have a wall (<|up_left_wall|> is closed "
        "above and to the left, <|no_wall|> nowhere, <|all_wall|> everywhere), then a marker: "
        f"{ORIGIN} is where you start, {TARGET} is where you have to end, {BLANK} is any other "
        "cell. You cannot walk through walls.",
    ]
    if maze_format != "direct":
        sentences.append(
            'First think between <think> and </think>: write each step as a line "Step 1: Go up" '
            "and draw the whole maze under it, with the move in place of the marker of the cell "
            "you stand on."
        )
    if maze_format == "reset":
        sentences.append(f"On a wrong way, write {RESET} and begin again.")
    sentences.append(
        "Answer with the moves one after another, without spaces and without a word: "
        f"{', '.join(MOVES[:-1])} and {MOVES[-1]}."
    )
    return " ".join(sentences)


def scratch_tokens(options: Options) -> list[str]:
    """The vocabulary for a model from scratch: every prompt and target is made of these strings.

    A whole cell is one token, which makes sequences about 2.7 times shorter than one token a
    coordinate, a wall and a marker would. At any place of a text at most one split into longest
    matches is possible, and joining the tokens gives the text back.
    """
    options = resolve(options, from_scratch=True)
    thinks = options.maze_format != "direct"
    markers = (BLANK, ORIGIN, TARGET, *MOVES) if thinks else (BLANK, ORIGIN, TARGET)
    tokens = [*MOVES, "\n", *cell_tokens(options.maze_size, markers)]
    return tokens + thinking_tokens(options.maze_format == "reset") if thinks else tokens


# ---------------------------------------------------------------------------------------------
# Judging


def is_correct(text: str, example: Example) -> bool:
    """MazeBench: the moves of the answer end on the target, whatever the way."""
    return walk_of(text, example).solved


def failure_reason(text: str, example: Example) -> str:
    """Why the walk failed. ("ran out of tokens" is for the evaluator, who knows how it ended.)"""
    return walk_of(text, example).reason


def walk_of(text: str, example: Example) -> Walk:
    """The way an answer takes, for pictures too."""
    return walk(example.answer.maze, answer_text(text, example.answer.thinks))


def alarms(batch: Sequence[tuple[str, Example]]) -> list[str]:
    """A line for each sign that the policy games the rewards instead of solving mazes.

    A right answer of one direction is no sign: short paths are often straight.
    """
    if not batch:
        return []
    long, constant, unclosed = 0, Counter(), 0
    for text, example in batch:
        gold: MazeAnswer = example.answer
        moves = moves_in(answer_text(text, gold.thinks))
        long += len(moves) >= len(gold.maze.doors)  # longer than any path that visits no cell twice
        if len(set(moves)) == 1 and moves_text(moves) != gold.path:
            constant[moves[0]] += 1
        unclosed += gold.thinks and CLOSE not in text
    lines = []
    if long > LONG_SHARE * len(batch):
        lines.append(f"{long} of {len(batch)} answers have as many moves as the maze has cells")
    move, times = max(constant.items(), key=lambda item: item[1], default=(0, 0))
    if times > CONSTANT_SHARE * len(batch):
        lines.append(f"{times} of {len(batch)} answers are {MOVES[move]} and nothing else, wrongly")
    if unclosed > UNCLOSED_SHARE * len(batch):
        lines.append(f"{unclosed} of {len(batch)} outputs never close their thinking with {CLOSE}")
    return lines


def draw_answers(path: Path, answers: Sequence) -> None:
    """A contact sheet of evaluated mazes: the way walked, green if solved, red with why not."""
    from data.maze_pictures import save_contact_sheet  # PIL is needed here alone

    items = [(a.example.answer.maze, walk_of(a.text, a.example)) for a in answers]
    save_contact_sheet(path, items, reasons=[a.reason for a in answers])
