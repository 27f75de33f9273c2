"""The ALFRED task without its rewards: actions, trajectories, prompts, targets, the files."""

from __future__ import annotations

import io
import json
import os
import subprocess
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import build_tokenizer
from tiny import TEMPLATE

import data.alfred_files as files
import train
from data import task_module
from data.alfred import DEFAULTS, Options, alarms, cuts, load, make_task, scratch_tokens
from data.alfred_actions import ACTION_IDS, ACTIONS, VERBS, objects, split_action
from data.alfred_files import (
    SPLITS,
    Annotation,
    Trajectory,
    compact,
    convert,
    make_trajectory,
    oddities,
    plan_actions,
    read_split,
)
from data.alfred_prompt import INSTRUCTIONS, SHAPE, listing, observe, write_answer
from grpo.config import parse
from grpo.errors import UserError
from grpo.tokenizer import render_prompt, scratch_tokenizer
from rewards.alfred import FIELDS, is_correct

DATA, CASES = os.environ.get("GRPO_DATA"), os.environ.get("GRPO_CASES")
has_data = DATA is not None and Path(DATA, "alfred", "alfred_train.jsonl").is_file()
has_cases = CASES is not None and Path(CASES, "alfred_cases.json").is_file()
with_data = pytest.mark.skipif(not has_data, reason="GRPO_DATA names no folder with alfred/")
with_cases = pytest.mark.skipif(not has_cases, reason="GRPO_CASES names no folder with the cases")
SAMPLES = {}
if has_cases:
    ALL = json.loads(Path(CASES, "alfred_cases.json").read_text("utf-8"))["cases"]
    SAMPLES = {c["id"]: c for c in ALL if c["kind"] == "samples"}

PLAN = [["GotoLocation", "desk"], ["PickupObject", "pen"], ["GotoLocation", "shelf"],
        ["PutObject", "pen", "shelf"], ["NoOp"]]  # fmt: skip
WORDS = ("go to the desk", "Take the  pen. ", "turn to the shelf", "put it there!")


def record(path="train/simple/trial_1", plan=PLAN, scene="FloorPlan1", goals=("Shelve the pen.",)):
    return {
        "path": path,
        "task_type": "pick_and_place_simple",
        "pddl_params": {"object_target": "Pen", "parent_target": "Shelf", "object_sliced": False},
        "scene": scene,
        "high_pddl": plan,
        "anns": [{"task_desc": goal, "high_descs": list(WORDS)} for goal in goals],
    }


def original(given):
    """The same as ALFRED itself writes it."""
    steps = [{"discrete_action": {"action": a, "args": args}} for a, *args in given["high_pddl"]]
    return {
        "task_type": given["task_type"],
        "pddl_params": given["pddl_params"],
        "plan": {"high_pddl": steps, "low_actions": []},
        "scene": {"floor_plan": given["scene"], "object_poses": []},
        "turk_annotations": {"anns": [{**a, "votes": [1]} for a in given["anns"]]},
    }


def some_records(split):
    paths = [f"{split}/simple/trial_{i}" for i in range(3)]
    return [record(path, goals=(f"{split} {i}.", "Again.")) for i, path in enumerate(paths)]


def write_lines(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        lines = "".join(json.dumps(r) + "\n" for r in some_records(split))
        (folder / f"alfred_{split}.jsonl").write_text(lines)


def write_tree(folder):
    for given in (r for split in SPLITS for r in some_records(split)):
        path = folder / given["path"] / "traj_data.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(original(given)))


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A machine without ALFRED, where three trajectories a split are all that was published."""
    monkeypatch.delenv("GRPO_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for split in SPLITS:
        monkeypatch.setitem(SPLITS, split, 3)
    return tmp_path


# ---------------------------------------------------------------------------------------------
# Actions and trajectories


def test_the_ids_are_blocks_a_verb_and_alphabetical_inside():
    first = {verb: ACTION_IDS[f"{verb} {objects(verb)[0]}"] for verb in VERBS}
    assert first == {"goto": 0, "pickup": 69, "put": 122, "toggle": 175, "cool": 177,
                     "slice": 190, "clean": 195, "heat": 216}  # fmt: skip
    assert len(ACTIONS) == len(ACTION_IDS) == 225
    assert all(list(objects(verb)) == sorted(set(objects(verb))) for verb in VERBS)
    assert all(ACTIONS[ACTION_IDS[" ".join(split_action(a))]] == a for a in ACTIONS)


def test_an_object_that_is_empty_is_the_one_last_picked_up_even_when_it_was_put_down():
    plan = [["PickupObject", "Cup"], ["PutObject", "pen", "cup"], ["HeatObject", ""], ["NoOp"]]
    assert plan_actions(plan) == ("pickup cup", "put pen", "heat cup")
    assert plan_actions([["CleanObject", ""], ["CoolObject"]]) == ("clean", "cool")


def test_what_is_odd_is_listed_with_its_path():
    plan = [["PickupObject", "butterknife"], ["CoolObject", ""], ["CleanObject", "cup"], ["NoOp"]]
    odd = make_trajectory(record("train/odd/trial_9", plan))
    assert oddities([make_trajectory(record()), odd]) == [
        ("train/odd/trial_9", "CoolObject of nothing"),
        ("train/odd/trial_9", "no action: cool butterknife"),
        ("train/odd/trial_9", "not what is held: clean cup"),
        ("train/odd/trial_9", "1 descriptions of another length"),
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"high_pddl": None}, "the test splits have none"),
        ({"high_pddl": []}, "there is no plan"),
        ({"high_pddl": [["Fly", "bed"]]}, "no step of a plan"),
        ({"high_pddl": [[]]}, "no step of a plan"),
        ({"high_pddl": [["GotoLocation", 3]]}, "no step of a plan"),
        ({"high_pddl": ["NoOp"]}, "no step of a plan"),
        ({"scene": None}, '"scene"'),
        ({"anns": []}, "no annotations"),
        ({"anns": ["Shelve it."]}, "is no annotation"),
        ({"anns": [{"task_desc": " "}]}, '"task_desc" is empty'),
        ({"anns": [{"task_desc": "\ud800"}]}, "surrogate"),
        ({"anns": [{"task_desc": "Go.", "high_descs": [1]}]}, '"high_descs"'),
    ],
)
def test_a_record_that_is_no_trajectory_is_named_by_file_line_and_path(alone, changes, words):
    write_lines(alone / "alfred")
    path = alone / "alfred" / "alfred_train.jsonl"
    path.write_text(f"{json.dumps(record())}\n{json.dumps({**record(), **changes})}\n")
    with pytest.raises(UserError, match=r"alfred_train\.jsonl, line 2: ") as error:
        read_split("train", str(alone))
    assert words in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------
# Prompts and targets


def test_a_trajectory_makes_an_example_after_each_beginning_of_its_plan():
    found = cuts([make_trajectory(record())])
    assert [(len(c.done), len(c.remaining)) for c in found] == [(0, 4), (1, 3), (2, 2), (3, 1)]
    assert found[2].done == ("goto desk", "pickup pen")
    assert found[2].remaining == ("goto shelf", "put pen")


def test_the_goal_is_in_the_words_of_the_first_annotation_or_of_each():
    trajectory = make_trajectory(record(goals=("One.", "Two.", "Three.")))
    assert {c.annotation.goal for c in cuts([trajectory])} == {"One."}
    task = make_task([trajectory], [trajectory], Options(goals="all"))
    said = Counter(e.messages[-1]["content"].partition("\n")[0] for e in task.train)
    assert said == {"Goal: One.": 4, "Goal: Two.": 4, "Goal: Three.": 4}
    assert len(task.evaluation) == 1, "the evaluation has one goal a trajectory"


def test_the_prompt_says_what_is_done_and_what_follows_from_it():
    task = make_task([make_trajectory(record())], [], Options())
    by_step = sorted(task.train, key=lambda e: len(e.answer.done))
    assert [e.messages[1]["content"] for e in by_step] == [
        "Goal: Shelve the pen.\nDone: nothing\nObservation: At the start, with nothing in hand.",
        "Goal: Shelve the pen.\nDone: goto desk\nObservation: At the desk, with nothing in hand.",
        "Goal: Shelve the pen.\nDone: goto desk, pickup pen\n"
        "Observation: At the desk, with the pen in hand.",
        "Goal: Shelve the pen.\nDone: goto desk, pickup pen, goto shelf\n"
        "Observation: At the shelf, with the pen in hand.",
    ]
    assert observe(by_step[3].answer.done + ("put pen",)) == "At the shelf, with nothing in hand."
    (system,) = {e.messages[0]["content"] for e in task.train}
    assert system == f"{INSTRUCTIONS}\n{listing(ACTIONS)}"
    assert tuple(json.loads(SHAPE)) == FIELDS
    assert by_step[0].level == "train/pick_and_place_simple"


def test_the_listing_gives_each_action_its_id_once():
    words = listing(ACTIONS).split()
    pairs = [(int(n), name) for n, name in zip(words, words[1:], strict=False) if n.isdigit()]
    assert pairs == [(i, split_action(a)[1]) for i, a in enumerate(ACTIONS)]
    assert [line.partition(":")[0] for line in listing(ACTIONS).splitlines()] == list(VERBS)


def test_a_scene_lists_the_actions_with_what_any_of_its_plans_names():
    """The receptacle of a put, too. Another scene's things are not there."""
    other = [["GotoLocation", "bed"], ["PickupObject", "book"], ["PutObject", "book", "sofa"]]
    pens, books, again = (
        make_trajectory(record(scene=s, plan=p))
        for s, p in (("Plan1", PLAN), ("Plan2", other), ("Plan2", other[:1]))
    )
    task = make_task([pens, books], [again], Options(actions="scene"))
    listed = {e.messages[0]["content"].removeprefix(f"{INSTRUCTIONS}\n") for e in task.train}
    assert listed == {
        "goto: 21 desk 42 pen 50 shelf\npickup: 98 pen\nput: 151 pen",
        "goto: 6 bed 55 sofa\npickup: 73 book\nput: 126 book",
    }
    assert task.evaluation[0].messages[0]["content"].endswith("put: 126 book")


def test_the_target_is_in_the_words_of_the_annotation_and_without_them_in_the_actions_names():
    trajectory = make_trajectory(record())
    (example,) = [
        e for e in make_task([trajectory], [], Options()).train if len(e.answer.done) == 1
    ]
    found = json.loads(example.target)
    assert found == {
        "visual_state_description": "At the desk, with nothing in hand.",
        "reasoning_and_reflection": "Done: Go to the desk. Next: Take the pen.",
        "language_plan": "Take the pen. Turn to the shelf. Put it there!",
        "executable_plan": [
            {"action_id": 98, "action_name": "pickup pen"},
            {"action_id": 50, "action_name": "goto shelf"},
            {"action_id": 151, "action_name": "put pen"},
        ],
    }
    assert tuple(found) == FIELDS
    for words in ((), WORDS[:3], ("", *WORDS[1:])):
        plain = json.loads(write_answer(("goto desk",), ("pickup pen", "goto shelf", "x"), words))
        assert plain["language_plan"] == "Pickup pen. Goto shelf. X."
    first = json.loads(write_answer((), ("goto desk",)))
    assert first["reasoning_and_reflection"] == "Nothing is done yet. Next: Goto desk."


def test_the_table_has_a_row_for_each_split_and_below_it_for_each_type_or_number_of_actions_done():
    seen, unseen = (make_trajectory(record(f"valid_{s}/a/trial_1")) for s in ("seen", "unseen"))
    task = make_task([], [unseen, seen], Options(eval_plans="all"))
    kind = "pick_and_place_simple"
    assert task.levels == ["seen", f"seen/{kind}", "unseen", f"unseen/{kind}"]
    task = make_task([], [unseen, seen], Options(eval_plans="all", eval_by="step"))
    assert task.levels == [f"{s}{r}" for s in ("seen", "unseen")
                           for r in ("", "/0 done", "/1 done", "/2 done", "/3 done")]  # fmt: skip
    assert all(e.level.endswith(f"/{len(e.answer.done)} done") for e in task.evaluation)


def test_sft_imitates_no_action_without_an_id_and_grpo_keeps_the_example():
    plan = [["PickupObject", "butterknife"], ["CoolObject", ""], ["GotoLocation", "desk"]]
    task = make_task([make_trajectory(record(plan=plan))], [], Options())
    assert len(task.train) == 3 and [e.answer.actions for e in task.sft] == [("goto desk",)]


def test_the_evaluation_is_of_whole_plans_or_of_all_and_by_split(alone):
    write_lines(alone)
    for split, plans, expected in (
        ("both", "whole", {"seen": 3, "unseen": 3}),
        ("seen", "all", {"seen": 12}),
        ("unseen", "whole", {"unseen": 3}),
    ):
        options = Options(data_dir=str(alone), eval_split=split, eval_plans=plans)
        task = load(options, 0, False)
        assert Counter(e.level.partition("/")[0] for e in task.evaluation) == expected
    assert [e.target for e in task.train] == [e.target for e in load(options, 1, False).train]


# ---------------------------------------------------------------------------------------------
# Lines: the short form


def test_the_short_prompt_has_the_words_that_training_goals_share_and_the_plan_is_lines():
    goals = ("Shelve the pen.", "Put the pen on a SHELF!", "the pen, on the shelf")
    trajectory = make_trajectory(record(goals=goals))
    options = Options(actions="scene")
    task = make_task([trajectory], [trajectory], options, from_scratch=True)
    by_step = sorted(task.train, key=lambda e: len(e.answer.done))
    # "shelve", "put" and "a" are in one goal each, "shelf" and "on" in two.
    assert [e.messages for e in by_step[:2]] == [
        [{"role": "user", "content": "there desk pen shelf\ngoal ? the pen"}],
        [{"role": "user", "content": "there desk pen shelf\ndone goto desk\ngoal ? the pen"}],
    ]
    assert by_step[1].target == "pickup pen\ngoto shelf\nput pen"
    (bare,) = make_task([], [trajectory], Options(), from_scratch=True).evaluation
    assert bare.messages[0]["content"] == "goal ? ? ?"


def test_a_pretrained_model_may_answer_in_lines_and_reads_the_goal_as_it_is_written():
    trajectory = make_trajectory(record())
    options = Options(alfred_format="lines", actions="scene")
    (first, *_) = sorted(
        make_task([trajectory], [], options).train, key=lambda e: len(e.answer.done)
    )
    assert "one on a line" in first.messages[0]["content"]
    assert first.messages[1]["content"] == (
        "In the room: desk, pen, shelf\nDone: nothing\nGoal: Shelve the pen."
    )
    assert first.target.splitlines() == list(first.answer.actions)


@pytest.mark.parametrize(
    ("text", "rewards", "reason"),
    [
        ("goto desk\npickup pen\ngoto shelf\nput pen", (0.25, 1.0), ""),
        ("21; Pickup Pen; 50; put pen", (0.25, 1.0), ""),  # ids, and capitals do not matter
        ("goto desk\npickup pen\nfly", (0.25 * 2 / 3, 0.3), "a step that is no action"),
        ("goto desk\npickup pen", (0.25, 0.3), "stops too early"),
        ("goto desk\npickup pen\ngoto shelf\nput pen\nfly", (0.2, 1.0), "goes on after the end"),
        ("", (0.0, 0.0), "no plan"),
        ('{"executable_plan": []}', (0.0, 0.0), "a step that is no action"),
    ],
)  # fmt: skip
def test_lines_are_rewarded_as_steps_are_without_the_rewards_of_json(text, rewards, reason):
    trajectory = make_trajectory(record())
    task = make_task([trajectory], [trajectory], Options(), from_scratch=True)
    (example,) = task.evaluation
    found = {name: f(text, example) for name, f in task.reward_functions.items()}
    assert found == pytest.approx(dict(zip(("match", "accuracy"), rewards, strict=True)))
    assert task.is_correct(text, example) == (reason == "")
    assert reason in ("", task.failure_reason(text, example))
    assert task.highest_rewards == {"match": 0.25, "accuracy": 1.0}
    assert task.measures["task success"](text, example) == (reason == "")


def test_what_does_not_go_together_is_refused_before_the_data_is_looked_for(alone):
    nowhere = ["--task", "alfred", "--data-dir", "nowhere", "--model"]
    with pytest.raises(UserError, match="--alfred-format json: a model from scratch knows no Engl"):
        parse([*nowhere, "scratch", "--alfred-format", "json"])
    with pytest.raises(UserError, match="--reward-mode verbatim is what the published code pays"):
        parse([*nowhere, "scratch", "--reward-mode", "verbatim"])
    with pytest.raises(UserError, match="--eval-by step: whole plans are all of step 0"):
        parse([*nowhere, "scratch", "--eval-by", "step"])
    _, options, _ = parse([*nowhere, "scratch"])
    assert (options.alfred_format, options.actions, options.goals) == ("lines", "scene", "all")


@with_data
def test_every_published_short_example_is_made_of_the_vocabulary(published):
    held_out = [*published["valid_seen"], *published["valid_unseen"]]
    options = Options(actions="scene", data_dir=str(Path(DATA) / "alfred"))
    tokenizer = scratch_tokenizer(scratch_tokens(options))
    task = make_task(published["train"], held_out, options, from_scratch=True)
    longest = [0, 0]
    for example in [*task.sft[::20], *task.evaluation]:
        prompt = render_prompt(tokenizer, example.messages, "chat")
        target = tokenizer(example.target).input_ids
        assert tokenizer.decode(prompt) == example.messages[0]["content"] + "\n"
        assert tokenizer.decode(target) == example.target
        longest = [max(n, len(ids)) for n, ids in zip(longest, (prompt, target), strict=True)]
    scratch = DEFAULTS["scratch"]
    assert longest[0] <= scratch["max_prompt_length"]
    assert longest[1] < scratch["max_completion_length"]


# ---------------------------------------------------------------------------------------------
# Where the files come from


@pytest.mark.parametrize("below", ["", "alfred", "json_2.1.0", "alfred/json_2.1.0"])
@pytest.mark.parametrize("write", [write_lines, write_tree])
def test_lines_and_the_tree_are_found_and_are_the_same(alone, monkeypatch, capsys, below, write):
    write(alone / "given" / below)
    expected = [make_trajectory(r) for r in some_records("train")]
    assert read_split("train", str(alone / "given")) == expected
    monkeypatch.setenv("GRPO_DATA", str(alone / "given"))
    assert read_split("train", None) == expected
    assert capsys.readouterr().err == "", "that is as many as were published"


def test_a_named_folder_is_the_only_one_and_without_it_comes_the_cache(alone, monkeypatch):
    write_lines(alone / "cache" / "grpo-by-hand" / "alfred")
    (alone / "empty").mkdir()
    with pytest.raises(UserError, match="--data-dir"):
        read_split("train", str(alone / "empty"))
    assert len(read_split("train", None)) == 3
    monkeypatch.setenv("GRPO_DATA", str(alone / "empty"))
    assert len(read_split("train", None)) == 3


def test_without_the_data_one_line_says_what_to_put_where(alone):
    with pytest.raises(UserError) as error:
        load(Options(), 0, False)
    said = str(error.value)
    for word in (
        "make data TASK=alfred",
        "json_2.1.0",
        "--data-dir",
        "GRPO_DATA",
        "traj_data.json",
    ):
        assert word in said
    assert "\n" not in said


def test_fewer_trajectories_than_were_published_are_said(alone, capsys):
    write_tree(alone)
    (alone / "train" / "simple" / "trial_0" / "traj_data.json").unlink()
    assert len(read_split("train", str(alone))) == 2
    assert "2 trajectories, not the 3 of ALFRED's train" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "[]", '{"plan": {"high_pddl": [3]}}', "[" * 100_000])
def test_a_file_of_the_tree_that_is_no_trajectory_is_named(alone, content):
    write_tree(alone)
    path = alone / "train" / "simple" / "trial_1" / "traj_data.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"trial_1/traj_data\.json: no trajectory"):
        read_split("train", str(alone))


def test_a_record_of_the_test_splits_is_refused_by_its_path():
    given = compact({"task_id": "t", "scene": {"floor_plan": "F"}, "task_type": "x"}, "tests/t")
    with pytest.raises(UserError, match="tests/t: there is no plan"):
        make_trajectory(given)


def test_the_archive_is_unpacked_converted_and_thrown_away(alone, monkeypatch, capsys):
    """With a program in 7z's place, since not every machine has it."""
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: io.BytesIO(b"an archive"))
    monkeypatch.setattr("shutil.which", lambda program: "/bin/7z" if program == "7z" else None)

    def unpack(command, **_):
        assert command[:3] == ["7z", "x", "-y"] and Path(command[-1]).read_bytes() == b"an archive"
        write_tree(Path(command[3].removeprefix("-o"), "json_2.1.0"))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("subprocess.run", unpack)
    files.fetch_and_convert()
    kept = alone / "cache" / "grpo-by-hand" / "alfred"
    assert sorted(p.name for p in kept.iterdir()) == sorted(f"alfred_{s}.jsonl" for s in SPLITS)
    assert read_split("train", None) == [make_trajectory(r) for r in some_records("train")]
    assert "3 trajectories" in capsys.readouterr().out


def test_what_stands_in_the_way_of_fetching_is_told_in_a_line(alone, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda program: None)
    with pytest.raises(UserError, match="install 7z"):
        files.fetch_and_convert()
    monkeypatch.setattr("shutil.which", lambda program: program)

    def unreachable(url, timeout):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    with pytest.raises(UserError, match="no route to host.*--data-dir"):
        files.fetch_and_convert()
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: io.BytesIO(b"<html>"))
    failed = subprocess.CompletedProcess([], 2)
    monkeypatch.setattr("subprocess.run", lambda command, **_: failed)
    with pytest.raises(UserError, match="cannot be unpacked"):
        files.fetch_and_convert()
    assert not list((alone / "cache" / "grpo-by-hand" / "alfred").iterdir())


def test_what_cannot_be_read_later_is_not_converted(alone):
    write_tree(alone / "tree")
    path = alone / "tree" / "train" / "simple" / "trial_1" / "traj_data.json"
    path.write_text(json.dumps({**original(record()), "plan": None}))
    with pytest.raises(UserError, match="train/simple/trial_1: there is no plan"):
        convert(alone / "tree", alone)
    assert not list(alone.glob("*.jsonl"))


def test_a_run_of_all_stages(alone, saved_model):
    """A random model of letters: nothing is learned, but every part is gone through."""
    write_lines(alone / "alfred")
    model = saved_model(
        tokenizer=build_tokenizer(chat_template=TEMPLATE), max_position_embeddings=4000
    )
    flags = f"""--task alfred --data-dir {alone} --model {model} --output-dir {alone / "run"}
        --device cpu --threads 1 --sft-steps 1 --sft-batch-size 2 --max-steps 1 --lora-rank 2
        --prompts-per-step 2 --num-generations 2 --max-completion-length 480 --eval-examples 2"""
    assert train.main(flags.split()) == 0
    lines = (alone / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "loss" in line]
    assert [line["stage"] for line in steps] == ["sft", "grpo"]
    for name in ("structure", "valid", "match", "accuracy"):
        assert f"rewards/{name}/mean" in steps[-1]
    results = json.loads((alone / "run" / "results.json").read_text())
    assert results["after_grpo"]["examples"] == 2


def test_a_run_of_all_stages_from_scratch(alone):
    """Without --model on a CPU; its vocabulary is in the data."""
    write_lines(alone / "alfred")
    flags = f"""--task alfred --data-dir {alone} --output-dir {alone / "run"} --device cpu
        --threads 1 --sft-steps 1 --sft-batch-size 2 --max-steps 1 --eval-examples 2
        --scratch-hidden-size 20 --scratch-layers 1"""
    assert train.main(flags.split()) == 0
    lines = (alone / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "loss" in line]
    assert [line["stage"] for line in steps] == ["sft", "grpo"]
    assert {"rewards/match/mean", "rewards/accuracy/mean"} < steps[-1].keys()
    results = json.loads((alone / "run" / "results.json").read_text())
    assert list(results["after_grpo"]["levels"])[0] == "seen"


# ---------------------------------------------------------------------------------------------
# Alarms


def test_a_policy_that_writes_no_json_is_told_how_to_begin():
    (example,) = make_task([], [make_trajectory(record())], Options()).evaluation
    (line,) = alarms([("Go to the desk.", example)] * 16)
    assert "none of 16 outputs" in line and "SFT" in line
    assert alarms([("Go.", example)] * 15 + [(example.target, example)]) == []
    assert alarms([("Go.", example)] * 15) == [], "too few to say"


def test_plans_that_grow_or_repeat_one_action_raise_an_alarm():
    (example,) = make_task([], [make_trajectory(record())], Options()).evaluation
    good, gold = example.target, example.answer.actions
    long = write_answer((), gold + gold + ("goto bed",) * 2)
    (line,) = alarms([(long, example)] * 2 + [(good, example)] * 14)
    assert line == "2 of 16 plans are over 2 times as long as needed"
    assert alarms([(long, example)] + [(good, example)] * 15) == []
    same = write_answer((), ("goto bed",) * 3)
    (line,) = alarms([(same, example)] * 9 + [(good, example)] * 7)
    assert line == "9 of 16 plans are 'goto bed' again and again"


def test_the_alarms_know_lines_too():
    (example,) = make_task([], [make_trajectory(record())], Options(), True).evaluation
    good = (example.target, example)
    for text in ("", "fly\ngoto", example.target.upper().replace("\n", " ")):
        (line,) = alarms([(text, example)] * 16)
        assert line.startswith("none of 16 outputs is a plan in lines: ")
    assert alarms([good] * 16) == alarms([("", example)] * 15 + [good]) == []
    (line,) = alarms([("goto bed\n" * 3, example)] * 9 + [good] * 7)
    assert line == "9 of 16 plans are 'goto bed' again and again"


# ---------------------------------------------------------------------------------------------
# The published data


@pytest.fixture(scope="module")
def published():
    return {split: read_split(split, DATA) for split in SPLITS}


@with_data
def test_the_published_splits_have_as_many_trajectories_and_samples_as_they_should(published):
    samples = {split: sum(len(t.actions) for t in found) for split, found in published.items()}
    assert {s: len(found) for s, found in published.items()} == SPLITS
    assert samples == {"train": 43_898, "valid_seen": 1_666, "valid_unseen": 1_599}


@with_data
def test_the_actions_are_those_of_the_published_map_and_of_the_train_plans(published):
    path = Path(DATA, "embodied", "rft_alfred_action_map.json")
    assert json.loads(path.read_text()) == {str(i): a for i, a in enumerate(ACTIONS)}
    written = {
        plan_actions([step])[0]
        for t in published["train"]
        for step in t.high_pddl
        if step[0] != "NoOp" and step[1]
    }
    by_verb = {v: sorted(a for a in written if split_action(a)[0] == v) for v in VERBS}
    assert tuple(action for verb in VERBS for action in by_verb[verb]) == ACTIONS


@with_data
def test_the_oddities_of_the_published_plans(published):
    found = {split: oddities(trajectories) for split, trajectories in published.items()}
    kinds = Counter(what for _, what in found["train"] if "length" not in what)
    assert kinds == {
        "CleanObject of nothing": 18,
        "HeatObject of nothing": 3,
        "CoolObject of nothing": 1,
        "no action: cool butterknife": 1,
        "not what is held: heat knife": 1,
        "not what is held: clean butterknife": 1,
    }
    assert sum("length" in what for _, what in found["train"]) == 6
    assert sorted(what for _, what in found["valid_seen"]) == [
        "CoolObject of nothing",
        "no action: cool butterknife",
        "not what is held: clean knife",
    ]
    assert [what for _, what in found["valid_unseen"]] == ["6 descriptions of another length"]


@with_data
def test_the_original_files_read_like_their_extract(published, capsys):
    tree = Path(DATA, "alfred", "raw")
    extract = {t.path: t for found in published.values() for t in found}
    for split, count in (("train", 36), ("valid_seen", 2)):
        found = read_split(split, str(tree))
        assert len(found) == count and all(extract[t.path] == t for t in found)
    assert "36 trajectories, not the 6,574" in capsys.readouterr().err


@with_data
@pytest.mark.parametrize("actions", ["all", "scene"])
def test_every_published_plan_is_a_target_that_earns_everything(published, actions):
    held_out = [*published["valid_seen"], *published["valid_unseen"]]
    task = make_task(published["train"], held_out, Options(actions=actions))
    assert (len(task.train), len(task.sft), len(task.evaluation)) == (43_898, 43_889, 506)
    for example in [*task.sft[::50], *task.evaluation]:
        lines = dict(line.split(":") for line in example.messages[0]["content"].splitlines()[3:])
        gold = example.answer.actions
        sayable = all(a in ACTION_IDS for a in gold)
        assert is_correct(example.target, example) == sayable
        rewards = [f(example.target, example) for f in task.reward_functions.values()]
        assert (sum(rewards) == 1.5) == sayable
        for verb, name in map(split_action, gold):
            assert not sayable or f" {ACTION_IDS[f'{verb} {name}']} {name}" in lines[verb]


# ---------------------------------------------------------------------------------------------
# What a plan brings in the household


def shelving(mode):
    """The task of one trajectory, and its example after `step` actions."""
    trajectory = make_trajectory(record())
    task = make_task([trajectory], [trajectory], Options(reward_mode=mode, eval_plans="all"))
    return task, {len(e.answer.done): e for e in task.evaluation}


def answered(*actions):
    return write_answer((), actions)


def test_success_pays_any_plan_that_reaches_the_goal_and_nothing_else():
    task, examples = shelving("success")
    (success,) = task.reward_functions.values()
    assert success(examples[0].target, examples[0]) == 1
    detour = answered("goto shelf", "goto desk", "pickup pen", "goto shelf", "put pen")
    assert success(detour, examples[0]) == 1 and not task.is_correct(detour, examples[0])
    assert success(answered("goto desk", "pickup pen"), examples[0]) == 0
    assert success(answered("goto shelf", "put pen"), examples[0]) == 0  # nothing is held yet
    assert success(answered("goto shelf", "put pen"), examples[2]) == 1  # after the pickup
    assert success("no plan", examples[0]) == 0
    assert (task.accuracy, task.highest_rewards) == ("success", {"success": 1.0})


def test_the_evaluation_measures_the_prefix_the_goal_and_its_conditions():
    task, examples = shelving("documented")
    halfway = answered("goto desk", "pickup pen", "goto desk")
    found = {name: measure(halfway, examples[0]) for name, measure in task.measures.items()}
    assert found == {"prefix score": 0.3, "task success": 0, "goal conditions": 0}
    assert {m(examples[0].target, examples[0]) for m in task.measures.values()} == {1.0}


@with_data
def test_every_whole_gold_plan_of_the_validation_splits_measures_as_the_household_says(published):
    """Of valid_seen three plans stop short of their goal or treat the wrong thing."""
    held_out = [*published["valid_seen"], *published["valid_unseen"]]
    task = make_task(published["train"], held_out, Options())
    success = [task.measures["task success"](e.target, e) for e in task.evaluation]
    assert (len(success), sum(success)) == (506, 503)


# ---------------------------------------------------------------------------------------------
# The cases that quote records of the data


@with_cases
def test_every_case_of_samples_is_read():
    assert len(SAMPLES) == 15
    assert sum("split" in c["input"] for c in SAMPLES.values()) == 2


@with_cases
@pytest.mark.parametrize(
    "case", [c for c in SAMPLES.values() if c["input"].get("high_pddl")], ids=lambda c: c["id"]
)
def test_case_samples(case):
    """An empty object is filled in here, where the cases take that or leave it empty."""
    given, expected = case["input"], dict(case["expected"])
    expected |= (expected.get("also_acceptable") or [{}])[0]
    trajectory = Trajectory(
        path=given["path"],
        task_type=given["task_type"],
        scene="",
        pddl_params={},
        high_pddl=tuple(map(tuple, given["high_pddl"])),
        annotations=tuple(Annotation(goal, ()) for goal in given["task_descs"]),
    )
    assert list(trajectory.actions) == expected["actions"] and "" not in trajectory.actions
    assert [ACTION_IDS.get(a) for a in trajectory.actions] == expected["action_ids"]
    found = cuts([trajectory])
    assert len(found) == expected["k"]
    for sample in expected["samples"]:
        cut = found[sample["step"] - 1]
        done = sample["step"] - 1
        assert cut.step == done and list(cut.done) == expected["actions"][:done]
        assert list(cut.remaining) == expected["actions"][done:]
        if case["expected"]["actions"] == expected["actions"]:
            assert (list(cut.done), list(cut.remaining)) == (sample["history"], sample["target"])


@with_cases
@with_data
def test_the_cases_of_the_whole_train_split(published):
    train_split = published["train"]
    steps = [step for t in train_split for step in t.high_pddl]
    lengths = [len(t.actions) for t in train_split]
    assert SAMPLES["samples/totals-train"]["expected"] == {
        "trajectories": len(train_split),
        "samples": sum(lengths),
        "steps_with_empty_argument": sum(step[0] != "NoOp" and not step[1] for step in steps),
        "trajectories_with_empty_argument": sum(
            any(step[0] != "NoOp" and not step[1] for step in t.high_pddl) for t in train_split
        ),
        "longest": max(lengths),
        "shortest": min(lengths),
        "noop_dropped": sum(step[0] == "NoOp" for step in steps),
    }
    bare = [plan_actions([step])[0] for step in steps if step[0] != "NoOp"]
    assert SAMPLES["samples/vocabulary"]["expected"] == {
        "map_size": len(ACTIONS),
        "map_actions_used": len(set(bare) & set(ACTIONS)),
        "not_in_map": sorted(set(bare) - set(ACTIONS)),
    }


@with_cases
def test_the_case_of_a_record_without_a_plan():
    case = SAMPLES["samples/no-plan"]
    assert case["expected"]["or_raises"]
    with pytest.raises(UserError, match="there is no plan"):
        make_trajectory({**record(), **case["input"]})
    assert task_module("alfred").load is load
    assert replace(make_trajectory(record()), high_pddl=()).actions == ()
