"""What is found out before a run computes anything: answers that cannot be, settings of here."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from tiny import letters_task, settings, tiny_policy

from data import Example
from grpo.errors import UserError
from grpo.startup import as_on_this_machine, check_prompts, physical_cores

ROOT = Path(__file__).parent.parent


def task_with_targets(*lengths):
    """SFT targets of so many letters: a token each, and the stop token comes on top."""
    examples = [Example([{"role": "user", "content": "a"}], "b" * n, "b") for n in lengths]
    return letters_task(None, sft=examples)


def check(task, **changes):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check_prompts(settings(**changes), task, tiny_policy())
    return [str(warning.message) for warning in said]


def test_sft_without_examples_is_refused_with_the_way_out():
    """It was refused already, but by the stage itself, after the first evaluation."""
    task = letters_task(None, sft=())
    for stage in ("all", "sft"):
        with pytest.raises(UserError, match="letters has no examples with targets.*--sft-steps 0"):
            check(task, stage=stage)
    assert check(task, sft_steps=0) == check(task, stage="grpo") == check(task, stage="eval") == []


def test_completions_too_short_for_most_answers_are_refused_with_the_length_needed():
    """Every answer would be cut, every reward the same, and the run would learn nothing."""
    with pytest.raises(UserError, match=r"--max-completion-length 5: 2 of .* 3 .* up to 8 tokens"):
        check(task_with_targets(4, 5, 7), max_completion_length=5)
    assert check(task_with_targets(4, 5, 7), max_completion_length=8) == []
    assert check(task_with_targets(4, 5, 7), max_completion_length=5, stage="grpo") == []


def test_completions_too_short_for_some_answers_are_warned_of_in_one_line():
    (line,) = check(task_with_targets(4, 5), max_completion_length=5)
    assert "1 of the first 2 SFT targets" in line and "up to 6 tokens" in line
    assert "\n" not in line
    # Only the first hundred are looked at: others would have to be made for it.
    assert check(task_with_targets(*[1] * 100, 99), max_completion_length=5) == []


def test_every_stage_checks_but_the_warning_is_shown_once():
    task, config, policy = task_with_targets(4, 5), settings(max_completion_length=5), tiny_policy()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            check_prompts(config, task, policy)
    assert len(said) == 1


def test_of_thousands_of_prompts_the_longest_is_the_one_that_is_named():
    """All of them were encoded, a second or more; and the first over the limit was named, so that
    the limit could be raised to a length that the next prompt was over again."""
    prompts = ["a" * 9] * 1_500 + ["a" * 17, "a" * 30, "a" * 17] + ["a" * 9] * 100
    with pytest.raises(UserError, match="training example 1502 has a prompt of 30 tokens"):
        check(letters_task(None, prompts=prompts), stage="grpo")
    assert check(letters_task(None, prompts=prompts[:1_500]), stage="grpo") == []


def test_a_dry_run_shows_the_machine_as_it_is():
    shown = as_on_this_machine(settings(device="auto"), torch.bfloat16)
    assert shown.device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert (shown.dtype, shown.threads) == ("bfloat16", physical_cores())
    assert as_on_this_machine(settings(device="cpu", threads=3), torch.float32).threads == 3


@pytest.mark.parametrize(
    "flags, imported",
    [((), False), (("--quantize", "nf4"), True), (("--optimizer", "adamw_8bit"), True)],
)
def test_bitsandbytes_is_imported_only_for_what_is_held_in_few_bits(flags, imported):
    """peft imports it wherever it is installed, and with it torch's compiler: a second a start."""
    pytest.importorskip("bitsandbytes")
    code = (
        "import sys, train; from grpo.config import parse; "
        "train.import_run(parse(sys.argv[1:])[0]); print(sys.modules['bitsandbytes'] is not None)"
    )
    command = [sys.executable, "-c", code, "--task", "maze", "--model", "some/model", *flags]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.split() == [str(imported)], found.stderr
