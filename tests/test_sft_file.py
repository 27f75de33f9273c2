"""--sft-data: what is read, and what is wrong with a line told by file and line."""

import json

import pytest

from data.sft_file import read_sft_file
from grpo.config import parse
from grpo.errors import UserError
from grpo.startup import load_task

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1?"}]


def written(path, *rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def test_a_prompt_is_a_chat_or_one_turn_of_text(tmp_path):
    rows = [
        {"prompt": CHAT, "completion": "2", "level": "x"},
        {"prompt": "2 + 2?", "completion": "4"},
    ]
    first, second = read_sft_file(written(tmp_path / "f.jsonl", *rows))
    assert (first.messages, first.target) == (CHAT, "2")
    assert second.messages == [{"role": "user", "content": "2 + 2?"}]


@pytest.mark.parametrize(
    "row, words",
    [
        ("{", "not JSON"),
        ({"prompt": "a"}, '"completion"'),
        ({"prompt": "a", "completion": " "}, '"completion" is empty'),
        ({"prompt": "", "completion": "b"}, '"prompt" is empty'),
        ({"prompt": 3, "completion": "b"}, '"prompt"'),
        ({"prompt": [], "completion": "b"}, "no turns"),
        ({"prompt": ["a"], "completion": "b"}, 'turn 1 .* "role"'),
        ({"prompt": [*CHAT, {"role": "user"}], "completion": "b"}, 'turn 3 .*"content"'),
        ({"prompt": [{"role": "me", "content": "a"}], "completion": "b"}, 'no "role" of system'),
        ({"prompt": [{"role": "assistant", "content": "a"}], "completion": "b"}, "assistant"),
        ({"prompt": "a", "completion": "\ud800"}, "surrogate"),
    ],
)
def test_a_bad_line_is_named(tmp_path, row, words):
    path = written(tmp_path / "f.jsonl", {"prompt": "a", "completion": "b"}, "", row)
    with pytest.raises(UserError, match=rf"f.jsonl, line 3: .*{words}"):
        read_sft_file(path)


def test_it_takes_the_place_of_the_task_s_examples_where_there_is_sft(tmp_path):
    path = written(tmp_path / "f.jsonl", {"prompt": CHAT, "completion": "2"})
    config, options, _ = parse(["--task", "maze", "--sft-data", str(path)])
    task, _ = load_task(config, options)
    assert [e.target for e in task.sft] == ["2"] and len(task.train) > 1
    config.stage = "grpo"  # a run that is resumed after its SFT does not need the file any more
    path.unlink()
    task, _ = load_task(config, options)
    assert len(task.sft) > 1


@pytest.mark.parametrize("argv", ["--stage grpo", "--stage eval --model m", "--sft-steps 0"])
def test_a_file_that_nothing_would_read_is_refused(argv):
    with pytest.raises(UserError, match="--sft-data f.*no SFT"):
        parse(["--sft-data", "f", *argv.split()])
