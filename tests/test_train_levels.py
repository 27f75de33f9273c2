"""--train-levels: GRPO on the easy problems alone, say; what is evaluated stays as it is."""

import pytest

from grpo.config import parse
from grpo.errors import UserError
from grpo.startup import load_task


def maze(*flags):
    config, options, _ = parse(["--task", "maze", "--maze-train", "60", *flags])
    return load_task(config, options)[0]


def test_only_prompts_of_the_named_levels_are_sampled_and_all_are_evaluated():
    everything, easy = maze(), maze("--train-levels", " easy")
    assert {"easy", "medium"} <= {e.level for e in everything.train}
    assert list(easy.train) == [e for e in everything.train if e.level == "easy"]
    assert list(easy.evaluation) == list(everything.evaluation)
    assert list(easy.sft) == list(everything.sft)
    both = maze("--train-levels", "medium,easy")
    assert {e.level for e in both.train} == {"easy", "medium"}


def test_a_level_that_no_training_example_has_is_refused_with_those_that_there_are():
    with pytest.raises(UserError, match="no training example is of level 'esay'; there are: easy"):
        maze("--train-levels", "easy,esay")
