"""--train-levels: GRPO on the easy problems alone, say; what is evaluated stays as it is."""

from collections.abc import Sequence

import pytest

from data import Example
from grpo.config import parse
from grpo.errors import UserError
from grpo.startup import load_task, of_levels


def maze(*flags):
    config, options, _ = parse(["--task", "maze", "--maze-train", "60", *flags])
    return load_task(config, options)[0]


def test_only_prompts_of_the_named_levels_are_sampled_and_all_are_evaluated():
    everything, easy = maze(), maze("--train-levels", " easy")
    assert {"easy", "medium"} <= {e.level for e in everything.train}
    assert list(easy.train) == [e for e in everything.train if e.level == "easy"]
    assert list(easy.evaluation) == list(everything.evaluation)
    assert list(easy.sft) == list(everything.sft)
    assert easy.train[0] == easy.train[:1][0]
    both = maze("--train-levels", "medium,easy")
    assert {e.level for e in both.train} == {"easy", "medium"}


def test_a_row_above_stands_for_all_levels_below_it_and_nothing_is_made_before_it_is_asked_for():
    made = []

    class Lazy(Sequence):
        def __len__(self):
            return 3

        def __getitem__(self, place):
            level = ("train/heat", "train/cool", "other")[place]
            made.append(place)
            return Example([], "", None, level)

    chosen = of_levels(Lazy(), "train")
    assert made == [0, 1, 2], "once each, for their levels"
    assert [e.level for e in chosen] == ["train/heat", "train/cool"] and made[3:] == [0, 1]
    assert [e.level for e in of_levels(Lazy(), "train/cool, other")] == ["train/cool", "other"]


def test_levels_are_refused_where_a_task_has_none_or_nothing_is_sampled():
    with pytest.raises(UserError, match="there are: none in this task"):
        of_levels([Example([], "", None)], "easy")
    with pytest.raises(UserError, match="--stage sft samples no training prompts"):
        maze("--train-levels", "easy", "--stage", "sft")


def test_a_level_that_no_training_example_has_is_refused_with_those_that_there_are():
    with pytest.raises(UserError, match="no training example is of level 'esay'; there are: easy"):
        maze("--train-levels", "easy,esay")
