"""What `make train` would run, as `make -n` prints it."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

ROOT = Path(__file__).parents[1]
MODEL = "models/SmolLM2-135M-Instruct"


def commands(*variables: str) -> str:
    """What `make train` with these variables would do, nothing of it done."""
    done = subprocess.run(
        ["make", "-n", "train", *variables], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize("task", ["gsm8k", "gsm_symbolic"])
def test_the_word_problems_train_the_model_that_pypi_has(task):
    assert f"train.py --task {task} --model {MODEL}" in commands(f"TASK={task}")


@pytest.mark.parametrize(
    "arguments", ["--model my/model", "--model=my/model", "--preset a10", "--resume runs/mine"]
)
def test_a_model_that_the_user_chose_is_left_alone(arguments):
    assert MODEL not in commands("TASK=gsm8k", f"ARGS={arguments}")


@pytest.mark.parametrize("task", ["maze", "household", "alfred"])
def test_a_task_that_a_model_from_scratch_can_learn_needs_none(task):
    assert MODEL not in commands(f"TASK={task}")
