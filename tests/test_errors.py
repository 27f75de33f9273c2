"""How a command ends."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.errors import UserError, exit_status

ROOT = Path(__file__).parent.parent
LOUD = "import sys; from grpo.errors import exit_status; sys.exit(exit_status({}, []))"
PRINTING = LOUD.format("lambda argv: print('x' * 200_000) or 0")


def test_a_reader_that_has_seen_enough_is_no_error_and_train_py_once_ended_in_a_traceback():
    """As in `python train.py --dry-run | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", PRINTING], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_another_pipe_that_breaks_is_an_error():
    """Among ranks, say: a run that lost its neighbour has not ended well."""

    def work(_):
        raise BrokenPipeError("a socket")

    with pytest.raises(BrokenPipeError, match="a socket"):
        exit_status(work, [])


def test_a_mistake_is_one_line_and_ctrl_c_says_how_to_go_on(capsys):
    def mistaken(_):
        raise UserError("no such\n  file")

    def interrupted(_):
        raise KeyboardInterrupt

    assert exit_status(mistaken, []) == 2
    assert exit_status(interrupted, [], "go on so") == 130
    assert exit_status(interrupted, []) == 130
    assert capsys.readouterr().err == "error: no such file\n\ngo on so\n"


PROGRAMS = ["grpo.gguf", "grpo.compare", "grpo.report", "data.teacher", "data.maze_pictures",
            "data.gsm8k_files", "data.alfred_files"]  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_has_a_help_and_gsm8k_files_once_began_to_download(name):
    done = subprocess.run(
        [sys.executable, "-m", name, "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ") and name in done.stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_flag_that_no_program_has_is_one_line(name, capsys):
    module = importlib.import_module(name)
    work = next(getattr(module, w) for w in ("main", "compare", "report") if hasattr(module, w))
    assert exit_status(work, ["--no-such-flag"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
