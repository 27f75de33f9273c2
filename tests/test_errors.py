"""How a command ends."""

import os
import subprocess
import sys

import pytest

from grpo.errors import UserError, exit_status

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
