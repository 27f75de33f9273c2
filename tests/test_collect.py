"""A policy's right answers as SFT data: what is kept, stops, ranks, and the route that R1 took."""

import json
from pathlib import Path

import pytest
from conftest import MARKOV_TOKENS, build_markov, build_tokenizer
from test_command_line import TINY, Server, steps
from tiny import TEMPLATE, letters_task, policy_of, settings

import grpo.collect
from grpo.collect import collect, summary
from grpo.errors import UserError
from grpo.interrupt import Stopped

SETTINGS = dict(num_generations=8, max_completion_length=6, rollout_rows=4, stage="collect")


def markov_policy():
    """Writes letters a to d at random, and an end after a few."""
    tokenizer = build_tokenizer(MARKOV_TOKENS, special=["<end>"], chat_template=TEMPLATE)
    return policy_of(build_markov(), [2, 3], tokenizer)


def task(is_correct=lambda text, example: example.answer in text):
    return letters_task(len, prompts=tuple("abcd" * 5), is_correct=is_correct)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "collected.jsonl").read_text().splitlines()]


def run(folder, total=20, what=None, check_stop=lambda: None, **changes):
    folder.mkdir(exist_ok=True)
    config = settings(**{**SETTINGS, **changes})
    tally = collect(markov_policy(), what or task(), config, folder, "m", total, check_stop)
    return tally, rows_of(folder)


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


# -- what is kept -------------------------------------------------------------------------------


def test_one_right_answer_a_prompt_is_kept_and_all_are_counted(tmp_path):
    tally, rows = run(tmp_path)
    assert 0 < len(rows) == tally.solved < tally.prompts == 20
    assert tally.right >= sum(row["right"] for row in rows) > len(rows)
    for row in rows:
        assert row["prompt"][0]["content"] in row["completion"] and row["of"] == 8
        assert "<" not in row["completion"], "the stop token is no part of an answer"
    pairs = {(row["prompt"][0]["content"], row["completion"]) for row in rows}
    assert len(pairs) > 4, "the four prompts come five times, each with random numbers of its own"


def test_the_shortest_or_the_first_is_kept(tmp_path):
    _, shortest = run(tmp_path / "shortest")
    _, first = run(tmp_path / "first", collect_keep="first")
    assert [r["prompt"] for r in shortest] == [r["prompt"] for r in first]
    lengths = [(s["tokens"], f["tokens"]) for s, f in zip(shortest, first, strict=True)]
    assert all(s <= f for s, f in lengths) and any(s < f for s, f in lengths)


def test_an_answer_that_was_cut_would_teach_to_stop_in_the_middle(tmp_path):
    tally, rows = run(tmp_path, max_completion_length=1)
    assert tally.cut == tally.right > 0 and rows == []
    with pytest.raises(UserError, match="cut by --max-completion-length 1"):
        summary(tally, settings(**{**SETTINGS, "max_completion_length": 1}), tmp_path)


def test_nothing_right_is_an_error_that_says_what_to_try(tmp_path):
    tally, rows = run(tmp_path, what=task(lambda text, example: False))
    assert rows == []
    with pytest.raises(UserError, match="none of the 20 prompts .*--num-generations"):
        summary(tally, settings(**SETTINGS), tmp_path)


# -- stops --------------------------------------------------------------------------------------


def stop_after(rows):
    def check():
        nonlocal rows
        rows -= 1
        if rows < 0:
            raise Stopped

    return check


@pytest.mark.parametrize("rows", [3, 16, 41])
def test_a_stopped_collection_goes_on_to_the_same_file(tmp_path, rows):
    run(tmp_path / "whole")
    with pytest.raises(Stopped):
        run(tmp_path / "stopped", check_stop=stop_after(rows))
    half = json.loads((tmp_path / "stopped" / "collected.json").read_text())
    assert half["prompts"] == rows // 16 * 2, "a batch is 4 x 4 rows: no more than one is lost"
    run(tmp_path / "stopped")
    assert files(tmp_path / "stopped") == files(tmp_path / "whole")


def test_rows_that_a_kill_left_uncounted_are_not_kept_twice(tmp_path, monkeypatch):
    """Killed between the two files, in the middle of a line at that."""
    run(tmp_path / "whole")
    run(tmp_path / "killed", total=8)
    with open(tmp_path / "killed" / "collected.jsonl", "a") as file:
        file.write('{"prompt": [{"role": "us')
    run(tmp_path / "killed")
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


def test_more_prompts_go_on_and_neither_rows_in_flight_nor_ranks_change_an_answer(
    tmp_path, monkeypatch
):
    run(tmp_path / "whole")
    run(tmp_path / "more", total=7)
    run(tmp_path / "more", rollout_rows=9)
    assert files(tmp_path / "more") == files(tmp_path / "whole")
    config, policy = settings(**SETTINGS), markov_policy()
    alone = [grpo.collect.sample(policy, task(), config, range(i, i + 1), int) for i in range(20)]
    assert [f["row"] for (f,) in alone if f["row"]] == rows_of(tmp_path / "whole")


def test_answers_of_two_policies_are_not_mixed(tmp_path):
    run(tmp_path, total=4)
    with pytest.raises(UserError, match="another policy .m; now it is n."):
        collect(markov_policy(), task(), settings(**SETTINGS), tmp_path, "n", 8)


@pytest.mark.parametrize(
    "name, left", [("collected.json", "collected.jsonl"), ("collected.jsonl", "collected.json")]
)
def test_a_file_without_its_other_half_is_refused_and_left(tmp_path, name, left):
    run(tmp_path)
    (tmp_path / name).unlink()
    before = (tmp_path / left).read_bytes()
    with pytest.raises(UserError, match="away"):
        run(tmp_path)
    assert (tmp_path / left).read_bytes() == before


# -- by the command line ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def zero(server, tmp_path_factory):
    """(the base model, the run of GRPO alone on it, with what was collected from it)"""
    folder = tmp_path_factory.mktemp("zero")
    base, run_of_zero = folder / "base", folder / "zero"
    for argv in (
        [*TINY, "--stage", "sft", "--eval-examples", 0, "--output-dir", base],
        [*TINY, "--stage", "grpo", "--model", base / "sft", "--output-dir", run_of_zero],
        ["--resume", run_of_zero, "--stage", "collect", "--num-generations", 8],
    ):
        status, text = server.run(*argv)
        assert status == 0, text
    return base / "sft", run_of_zero, text


def test_from_zero_to_a_cold_start_and_grpo_by_the_command_that_is_printed(server, zero, tmp_path):
    base, run_of_zero, text = zero
    rows = rows_of(run_of_zero)
    assert f"{len(rows)} of 50 prompts are solved" in text and len(rows) > 0
    assert json.loads((run_of_zero / "collected.json").read_text())["policy"] == (
        "grpo/merged after step 6"
    )
    command = text.splitlines()[-1].partition("python train.py ")[2].split()
    assert command[command.index("--sft-data") + 1] == str(run_of_zero / "collected.jsonl")
    folder = tmp_path / "next"
    flags = [*TINY, "--model", base, "--output-dir", folder, *command]
    status, text = server.run(*flags)
    assert status == 0, text
    assert json.loads((folder / "config.json").read_text())["sft_data"] == command[5]
    assert len(steps(folder, "sft")) == int(command[-1]) and len(steps(folder, "grpo")) == 6
    assert (folder / "grpo/merged/model.safetensors").is_file()


def test_collecting_again_asks_nothing_and_says_the_same(server, zero):
    _, folder, text = zero
    before = files_below(folder)
    status, again = server.run("--resume", folder)
    assert status == 0 and again.splitlines()[-1] == text.splitlines()[-1]
    assert files_below(folder) == before


def files_below(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_cannot_be_collected_from_is_refused(server, zero, tmp_path):
    base, _, _ = zero
    flags = [*TINY, "--stage", "collect", "--output-dir", tmp_path / "run"]
    for wrong, words in (
        ([], "untrained"),
        (["--model", base, "--temperature", 0], "equal"),
        (["--model", base, "--sft-data", "x.jsonl"], "no SFT"),
        (["--model", base, "--max-prompt-length", 4], "--max-prompt-length"),
    ):
        status, text = server.run(*flags, *wrong)
        assert status == 2 and words in text and len(text.splitlines()) == 1, text
    status, text = server.run(*TINY, "--collect-prompts", 3)
    assert status == 2 and "--stage collect" in text, text


def test_half_a_grpo_is_not_sampled_as_if_it_were_its_start(server, zero, tmp_path):
    _, run_of_zero, _ = zero
    checkpoint = Path(run_of_zero, "checkpoints", "grpo-step-000004")
    before = files_below(run_of_zero)
    status, text = server.run("--resume", checkpoint, "--stage", "collect")
    assert status == 2 and "is not finished" in text, text
    assert files_below(run_of_zero) == before
