"""The gsm8k task without its rewards: problems, prompts, targets, where the files come from."""

from __future__ import annotations

import hashlib
import io
import json
import os
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import build_tokenizer
from tiny import TEMPLATE

import train
from data import gsm8k_files, task_module
from data.gsm8k import Options, load
from data.gsm8k_files import SPLITS, Split, make_problem, read_problems, read_split
from data.word_problems import (
    SYSTEM_PROMPT,
    Problem,
    alarms,
    level,
    make_example,
    make_task,
    target,
    worked_example,
)
from grpo.config import Config, parse
from grpo.errors import UserError
from grpo.startup import load_task
from rewards.gsm8k import normalise

DATA, CASES = os.environ.get("GRPO_DATA"), os.environ.get("GRPO_CASES")
has_data = DATA is not None and Path(DATA, "gsm8k", "train.jsonl").is_file()
has_cases = CASES is not None and Path(CASES, "gsm8k_reward_cases.json").is_file()
with_data = pytest.mark.skipif(not has_data, reason="GRPO_DATA names no folder with gsm8k/")

ADDED = Problem("Two and two?", "2+2 = 4", "4")
HALVED = Problem("Half of 2,160?", "Halve it.\n2160/2 = 1080", "1,080")


def some_problems(count: int, name: str = "p") -> list[Problem]:
    return [Problem(f"{name} {i}?", f"It is {i}.", str(i)) for i in range(count)]


def record(problem: Problem) -> str:
    return json.dumps(
        {"question": problem.question, "answer": f"{problem.solution}\n#### {problem.gold}"}
    )


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A machine without gsm8k: no GRPO_DATA, an empty cache, no network. Returns a folder."""
    monkeypatch.delenv("GRPO_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def unreachable(url, timeout):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    return tmp_path


@pytest.fixture
def small(alone, monkeypatch):
    """The published splits are two files of 4 and 2 problems; returns a folder that has them."""
    folder = alone / "small"
    folder.mkdir()
    for name, problems in {"train": some_problems(4), "test": some_problems(2, "t")}.items():
        content = "".join(record(p) + "\n" for p in problems).encode()
        (folder / f"{name}.jsonl").write_bytes(content)
        split = Split(f"{name}.jsonl", len(problems), hashlib.sha256(content).hexdigest())
        monkeypatch.setitem(SPLITS, name, split)
    return folder


# ---------------------------------------------------------------------------------------------
# Problems, prompts, targets


def test_the_calculator_s_marks_leave_the_solution_and_the_gold_keeps_its_comma():
    answer = "Halve it.\n2160/2 = $<<2160/2=1080>>1080\n#### 1,080 "
    problem = make_problem({"question": " Half of 2,160?\n", "answer": answer})
    assert problem == replace(HALVED, solution="Halve it.\n2160/2 = $1080")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"question": None}, '"question"'),
        ({"question": " "}, '"question" is empty'),
        ({"answer": 4}, '"answer"'),
        ({"answer": "It is 4"}, "####"),
        ({"answer": "It is 4\n####"}, "no number: ''"),
        ({"answer": "#### four"}, "no number: 'four'"),
        ({"answer": "#### 4 apples"}, "no number"),
        ({"question": "\ud800?"}, "surrogate"),
        ({"answer": "\udfff #### 4"}, "surrogate"),
    ],
)
def test_a_record_without_question_steps_and_number_is_named(tmp_path, changes, words):
    good = {"question": "Two and two?", "answer": "2+2 = 4\n#### 4"}
    path = tmp_path / "own.jsonl"
    path.write_text(f"{json.dumps(good)}\n\n{json.dumps({**good, **changes})}\n")
    with pytest.raises(UserError, match=r"own\.jsonl, line 3: ") as error:
        read_problems(path)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_the_prompt_asks_for_the_format_that_the_target_has():
    example = make_example(HALVED)
    assert [m["role"] for m in example.messages] == ["system", "user"]
    system, question = (m["content"] for m in example.messages)
    assert question == "Half of 2,160?" and example.answer == "1,080"
    assert example.target == (
        "<reasoning>\nHalve it.\n2160/2 = 1080\n</reasoning>\n<answer>\n1,080\n</answer>"
    )
    shape = target(Problem("", "...", "..."))
    assert system == SYSTEM_PROMPT and shape in system


def test_a_target_earns_all_that_can_be_earned():
    for mode, full in {"documented": 4.0, "verbatim": 3.5}.items():
        task = make_task("t", [ADDED], [], Options(reward_mode=mode))
        (example,) = task.train
        values = {n: f(example.target, example) for n, f in task.reward_functions.items()}
        if mode == "verbatim":  # its xml_count charges a text that does not end with a line break
            assert values.pop("xml_count") < 0.5
        assert sum(values.values()) == full
        assert task.is_correct(example.target, example)


def test_levels_are_the_steps_of_the_solution():
    steps = ["", "a", "a\nb", "a\n\nb\nc", "a\nb\nc\nd", "a\nb\nc\nd\ne", "a\n" * 9]
    assert [level(Problem("?", s, "1")) for s in steps] == [
        "", "1 step", "2 steps", "3 steps", "4 steps", "5+ steps", "5+ steps",
    ]  # fmt: skip


def test_worked_examples_are_turns_of_the_chat_and_are_not_trained_on():
    training, held_out = some_problems(30), some_problems(5, "t")
    task = make_task("t", training, held_out, Options(shots=2))
    *turns, question = task.evaluation[0].messages[1:]
    assert question == {"role": "user", "content": "t 0?"}
    shown = [p for p in training if worked_example(p)[0] in turns]
    assert len(shown) == 2 and len(turns) == 4
    assert [m["role"] for m in turns] == ["user", "assistant"] * 2
    for ours, answer in zip(turns[::2], turns[1::2], strict=True):
        (problem,) = (p for p in shown if p.question == ours["content"])
        assert answer["content"] == target(problem)
    asked = [e.messages[-1]["content"] for e in task.train]
    assert asked == [p.question for p in training if p not in shown] and task.sft == task.train
    for example in [*task.train, *task.evaluation]:
        assert example.messages[1:-1] == turns, "the same for all"
    assert make_task("t", training, held_out, Options(shots=2)).evaluation == task.evaluation


def test_as_many_worked_examples_as_problems_would_leave_none():
    with pytest.raises(UserError, match="--shots 3: there are only 3"):
        make_task("t", some_problems(3), [], Options(shots=3))


# ---------------------------------------------------------------------------------------------
# Settings


@pytest.mark.parametrize("name", ["gsm8k", "gsm_symbolic"])
def test_a_model_that_knows_no_words_is_refused(name):
    with pytest.raises(UserError, match=f"--task {name}: a model from scratch knows no words"):
        parse(["--task", name, "--model", "scratch"])
    assert parse(["--task", name])[0].model == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_the_a10_preset_has_the_source_s_settings():
    """But for the prompts, which it cut at 256 tokens: here they are refused, and at 512."""
    config, options, _ = parse(["--task", "gsm8k", "--preset", "a10"])
    source = dict(
        model="Qwen/Qwen2.5-0.5B-Instruct", lora_rank=0, learning_rate=5e-6, adam_beta1=0.9,
        adam_beta2=0.99, weight_decay=0.1, lr_scheduler="cosine", warmup_ratio=0.1,
        max_grad_norm=0.1, num_generations=8, prompts_per_step=4, max_completion_length=200,
        temperature=0.9, beta=0.04, max_steps=1868, checkpoint_every=100, loss_type="grpo",
        num_iterations=1, scale_rewards="group", sft_steps=0, max_prompt_length=512,
    )  # fmt: skip
    assert {name: getattr(config, name) for name in source} == source
    assert options.reward_mode == "documented" and options.shots == 0
    assert config.eval_examples == SPLITS["test"].problems
    assert config.max_steps == SPLITS["train"].problems // config.prompts_per_step


def test_the_levels_that_are_sampled_are_told_and_hold_where_something_is_sampled(small, capsys):
    flags = ["--task", "gsm8k", "--data-dir", str(small), "--train-levels"]
    config, options, _ = parse([*flags, "2 steps"])
    with pytest.raises(UserError, match="there are: 1 step; --train-levels none takes all"):
        load_task(config, options)
    config.stage = "eval"  # as when a run is resumed for its evaluation alone
    load_task(config, options)
    assert "levels" not in capsys.readouterr().err
    task, _ = load_task(*parse([*flags, "1 step"])[:2])
    told = f"of {len(task.train)} training prompts the {len(task.train)} of the levels 1 step are"
    assert told in capsys.readouterr().err


def test_defaults_name_real_settings():
    for name in ("gsm8k", "gsm_symbolic"):
        module = task_module(name)
        assert module.DEFAULTS.keys() == {"cpu", "a10", "a6000"}
        for values in module.DEFAULTS.values():
            assert all(hasattr(Config, n) or hasattr(module.Options, n) for n in values)


# ---------------------------------------------------------------------------------------------
# Where the files come from


def test_the_files_are_found_in_a_folder_or_in_gsm8k_there(small, monkeypatch, capsys):
    for options in (Options(data_dir=str(small)), Options(data_dir=str(small.parent))):
        if options.data_dir == str(small.parent):
            small.rename(small.parent / "gsm8k")
        task = load(options, 0, False)
        assert [e.answer for e in task.train] == ["0", "1", "2", "3"]
        assert [e.messages[-1]["content"] for e in task.evaluation] == ["t 0?", "t 1?"]
    monkeypatch.setenv("GRPO_DATA", str(small.parent))
    assert load(Options(), 0, False).train == task.train
    assert capsys.readouterr().err == "", "these are the published files"


def test_a_file_that_is_not_the_published_one_is_said_by_count_or_checksum(small, capsys):
    path = small / "train.jsonl"
    published = path.read_text()
    path.write_text(published.replace("It is 3", "It is not 3"))
    read_split("train", str(small))
    assert (
        f"{path} is not gsm8k's train split as it was published (sha256" in capsys.readouterr().err
    )
    path.write_text(published + record(ADDED))
    assert len(read_split("train", str(small))) == 5
    assert "(5 problems, not 4)" in capsys.readouterr().err


@pytest.mark.parametrize("variable", [False, True])
def test_a_folder_without_the_files_is_named_and_nothing_else_is_taken(
    small, monkeypatch, variable
):
    empty = small / "empty"
    empty.mkdir()
    monkeypatch.setenv("GRPO_DATA", str(empty if variable else small))
    what = f"GRPO_DATA={empty}" if variable else f"--data-dir {empty}"
    with pytest.raises(UserError, match=what) as error:
        load(Options(data_dir=None if variable else str(empty)), 0, False)
    assert "--task gsm_symbolic" in str(error.value)


def test_without_data_or_network_one_line_names_the_ways(alone, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(UserError) as error:
        load(Options(), 0, False)
    said = str(error.value)
    for word in ("no route to host", "--data-dir", "GRPO_DATA", "grade-school-math",
                 "--task gsm_symbolic"):  # fmt: skip
        assert word in said
    assert "\n" not in said and not (alone / "cache").exists()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        load(Options(), 0, False)


def test_a_download_is_checked_kept_and_not_fetched_again(small, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    asked = []

    def answer(url, timeout):
        asked.append(url)
        return io.BytesIO((small / url.rpartition("/")[2]).read_bytes())

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    for _ in range(2):
        task = load(Options(), 0, False)
        assert len(task.train) == 4 and len(task.evaluation) == 2
    assert asked == [gsm8k_files.DOWNLOAD + f"{name}.jsonl" for name in ("train", "test")]
    kept = small.parent / "cache" / "grpo-by-hand" / "gsm8k"
    assert sorted(p.name for p in kept.iterdir()) == ["test.jsonl", "train.jsonl"]


def test_a_cache_that_cannot_be_written_is_named(small, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    content = (small / "train.jsonl").read_bytes()
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: io.BytesIO(content))
    (small.parent / "cache").write_text("a file where a folder should be")
    with pytest.raises(UserError, match=r"gsm8k/train\.jsonl: .*XDG_CACHE_HOME"):
        load(Options(), 0, False)


@pytest.mark.parametrize("content", [b"<html>Sign in to the network</html>", b""])
def test_a_download_that_is_something_else_is_not_kept(small, monkeypatch, content):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: io.BytesIO(content))
    with pytest.raises(UserError, match="not the published file") as error:
        load(Options(), 0, False)
    assert "--task gsm_symbolic" in str(error.value)
    assert not (small.parent / "cache").exists()


def test_own_problems_are_trained_on_without_those_of_the_test_split(small, tmp_path, capsys):
    tested = some_problems(1, "t")[0]
    own = tmp_path / "own.jsonl"
    own.write_text("\n".join(map(record, [HALVED, tested, ADDED, HALVED])))
    task = load(Options(data_dir=str(small), gsm8k_file=str(own)), 0, False)
    assert [e.answer for e in task.train] == ["1,080", "4"] and len(task.evaluation) == 2
    assert "own.jsonl: 2 problems left out" in capsys.readouterr().err
    own.write_text(record(tested))
    with pytest.raises(UserError, match="every problem in it is in the test split"):
        load(Options(data_dir=str(small), gsm8k_file=str(own)), 0, False)


def test_a_run_of_all_stages(small, saved_model, tmp_path, monkeypatch):
    """A random model of letters: nothing is learned, but every part is gone through."""
    model = saved_model(
        tokenizer=build_tokenizer(chat_template=TEMPLATE), max_position_embeddings=1000
    )
    flags = f"""--task gsm8k --data-dir {small} --model {model} --output-dir {tmp_path / "run"}
        --device cpu --threads 1 --shots 1 --sft-steps 1 --sft-batch-size 2 --max-steps 1
        --prompts-per-step 2 --num-generations 2 --max-completion-length 90 --lora-rank 2
        --filter none"""
    assert train.main(flags.split()) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "loss" in line]
    assert [line["stage"] for line in steps] == ["sft", "grpo"]
    for name in ("correctness", "integer", "strict_format", "soft_format", "xml_count"):
        assert f"rewards/{name}/mean" in steps[-1]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["after_grpo"]["levels"]["1 step"]["examples"] == 2
    assert len(results["start"]["accuracy_lenient_95"]) == 2
    rows = (tmp_path / "run" / "evaluations" / "after_grpo.jsonl").read_text().splitlines()
    kept = [json.loads(row) for row in rows]
    assert [row["index"] for row in kept] == [0, 1]
    assert all({"correct_lenient", "answer"} <= row.keys() for row in kept)


# ---------------------------------------------------------------------------------------------
# Alarms


def test_a_policy_that_never_opens_the_tags_is_told_how_to_begin():
    example = make_example(ADDED)
    (line,) = alarms([("It is 4.", example)] * 32)
    assert "none of 32 outputs" in line and "SFT" in line and "--shots" in line
    assert alarms([("It is 4.", example)] * 31 + [(example.target, example)]) == []
    assert alarms([("It is 4.", example)] * 8) == [], "too few to say"


def test_answers_without_reasoning_raise_an_alarm():
    example = make_example(ADDED)
    bare = "<reasoning>\n\n</reasoning>\n<answer>\n4\n</answer>"
    (line,) = alarms([(bare, example)] * 20 + [(make_example(HALVED).target, example)] * 12)
    assert line.startswith("20 of 32 outputs reason in less than 10 characters")
    assert alarms([(make_example(HALVED).target, example)] * 32) == []


# ---------------------------------------------------------------------------------------------
# The published data


@pytest.fixture(scope="module")
def published():
    return {name: read_split(name, DATA) for name in SPLITS}


@with_data
def test_the_published_files_are_what_the_checksums_say(published, capsys):
    for name, split in SPLITS.items():
        assert len(read_split(name, DATA)) == split.problems
    assert capsys.readouterr().err == ""
    questions = {name: {p.question for p in problems} for name, problems in published.items()}
    assert not questions["train"] & questions["test"]


@with_data
def test_the_published_answers_have_commas_and_signs_and_nothing_else(published):
    for name, commas, negative in (("train", 79, 3), ("test", 14, 2)):
        golds = [p.gold for p in published[name]]
        assert sum("," in gold for gold in golds) == commas
        assert sum(gold.startswith("-") for gold in golds) == negative
        assert all(gold.lstrip("-").replace(",", "").isdigit() for gold in golds)


@with_data
def test_every_published_solution_is_a_target_that_earns_everything():
    task = load(Options(data_dir=DATA), 0, False)
    assert len(task.train) == 7473 and len(task.evaluation) == 1319
    for example in [*task.train, *task.evaluation]:
        assert "<<" not in example.target and ">>" not in example.target
        assert sum(f(example.target, example) for f in task.reward_functions.values()) == 4.0
        assert task.is_correct(example.target, example) and example.level.endswith("steps")


@with_data
@pytest.mark.skipif(not has_cases, reason="GRPO_CASES names no folder with the gsm8k cases")
def test_the_cases_of_published_gold_answers(published):
    cases = json.loads(Path(CASES, "gsm8k_reward_cases.json").read_text("utf-8"))["cases"]
    golds = [c for c in cases if c["kind"] == "gold"]
    assert len(golds) == 7
    for case in golds:
        problems, expected = published[case["input"]["split"]], case["expected"]
        if "index" in case["input"]:
            gold = problems[case["input"]["index"]].gold
            assert (gold, normalise(gold)) == (expected["gold"], expected["normalised"])
        else:
            assert len(problems) == expected["records"]
            not_digits = sum(not p.gold.isdigit() for p in problems)
            assert not_digits == expected["golds_not_all_digits"]
