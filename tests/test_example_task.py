"""A new task is one file in data/ and one in rewards/; nothing in grpo/ changes.

The two files in example_task/ are those that the README shows.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import build_config
from tiny import settings, training_of

import data
import grpo.loop
import grpo.sft
import rewards
from grpo.evaluate import evaluate
from grpo.policy import load_policy

EXAMPLE = Path(__file__).parent / "example_task"
REPOSITORY = EXAMPLE.parent.parent


def test_the_example_is_short_enough_to_be_read():
    files = sorted(EXAMPLE.glob("*.py"))
    assert [f.name for f in files] == ["data_spell.py", "rewards_spell.py"]
    assert all(len(f.read_text().splitlines()) <= 30 for f in files)


@pytest.fixture
def spell(tmp_path, monkeypatch):
    """The module data.spell, as if the two files lay in data/ and rewards/."""
    for package, folder in ((rewards, "rewards"), (data, "data")):
        (tmp_path / folder).mkdir()
        shutil.copy(EXAMPLE / f"{folder}_spell.py", tmp_path / folder / "spell.py")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / folder)])
    yield importlib.import_module("data.spell")
    for package in (data, rewards):
        sys.modules.pop(f"{package.__name__}.spell")
        delattr(package, "spell")


def test_the_task_keeps_its_promises(spell):
    task = spell.load(spell.Options(), seed=0, from_scratch=True)
    held_out = {e.messages[0]["content"] for e in task.evaluation}
    assert len(held_out) == 125 and len(task.train) == 500
    assert not held_out & {e.messages[0]["content"] for e in [*task.train, *task.sft]}
    again = spell.load(spell.Options(), seed=1, from_scratch=True)
    assert again.evaluation == task.evaluation
    for example in task.evaluation:
        assert task.is_correct(example.target, example)
        assert [f(example.target, example) for f in task.reward_functions.values()] == [1.0, 1.0]
    assert not task.is_correct("", task.evaluation[0])


def test_it_is_learned(spell):
    """Held-out words: about half are right after a short cold start, and GRPO lifts that by at
    least 15 points, to 65% or more. (Seed 0: 50% to 79%.)"""
    options = spell.Options()
    task = spell.load(options, seed=0, from_scratch=True)
    policy = load_policy(
        build_config(scratch_hidden_size=64, beta=0.0), spell.scratch_tokens(options)
    )
    config = settings(
        sft_steps=100, sft_batch_size=32, sft_learning_rate=3e-3,
        max_steps=150, prompts_per_step=16, num_generations=8, learning_rate=3e-4,
        max_completion_length=6, rollout_rows=128,
    )  # fmt: skip

    def accuracy():
        found = evaluate(
            policy, task, task.evaluation, max_new_tokens=6, prompt_format="chat", max_rows=128
        )
        return found.accuracy

    grpo.sft.train(policy, task, config, training_of(policy, config, "sft"))
    after_sft = accuracy()
    run = training_of(policy, config)
    grpo.loop.train(policy, task, config, run)
    after_grpo = accuracy()
    assert 0.3 < after_sft < 0.7
    assert after_grpo >= 0.65 and after_grpo - after_sft >= 0.15
    earned = [line["reward"] for line in run.recorder.lines]
    assert sum(earned[-20:]) - sum(earned[:20]) > 20 * 0.15


def test_the_command_trains_it(tmp_path):
    """In a copy of the repository with the two files added: --task spell, its flag, its folder."""
    shutil.copy(REPOSITORY / "train.py", tmp_path)  # a link would lead python back to its folder
    (tmp_path / "grpo").symlink_to(REPOSITORY / "grpo")
    for name in ("data", "rewards"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=ignored)
        shutil.copy(EXAMPLE / f"{name}_spell.py", tmp_path / name / "spell.py")
    small = {
        "task": "spell", "spell-letters": 2, "output-dir": "out", "sft-steps": 3, "max-steps": 2,
        "prompts-per-step": 2, "num-generations": 2, "eval-examples": 5, "threads": 1,
        "scratch-hidden-size": 16, "scratch-layers": 1, "scratch-heads": 2, "device": "cpu",
    }  # fmt: skip
    flags = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "train.py", *flags],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {"start", "after_sft", "after_grpo"} <= results.keys()
    text = (tmp_path / "out" / "metrics.jsonl").read_text()
    steps = [line for line in map(json.loads, text.splitlines()) if "loss" in line]
    assert [line["stage"] for line in steps] == ["sft"] * 3 + ["grpo"] * 2
    assert {"rewards/correct/mean", "rewards/letters/mean"} <= steps[-1].keys()


def test_the_readme_shows_these_two_files():
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    for file in EXAMPLE.glob("*.py"):
        assert f"```python\n{file.read_text('utf-8')}```" in readme, f"README.md lacks {file.name}"
