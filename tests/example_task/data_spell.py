"""A new task is this file, as data/spell.py, and rewards/spell.py: write a word backwards."""

import itertools
import random
from dataclasses import dataclass

from data import Example, Task
from grpo.config import option
from rewards import spell

LETTERS = "abcde"
DEFAULTS = {"scratch": dict(max_completion_length=16, sft_learning_rate=1e-3, learning_rate=3e-4)}


@dataclass
class Options:
    spell_letters: int = option(4, "letters in a word", positive=True)


def load(options, seed, from_scratch):
    words = ["".join(w) for w in itertools.product(LETTERS, repeat=options.spell_letters)]
    random.Random(0).shuffle(words)  # never by the run's seed: held-out words stay held out
    examples = [Example([{"role": "user", "content": w}], w[::-1], answer=w[::-1]) for w in words]
    held_out, known = examples[: len(words) // 5], examples[len(words) // 5 :]
    rewards = {"correct": spell.correct, "letters": spell.letters}
    return Task("spell", known, held_out, rewards, spell.correct, sft=known)


def scratch_tokens(options):
    return [*LETTERS, "\n"]  # a fresh model's prompt ends with a line break
