"""The household task: random households, what is read and written, rewards, turns of an episode."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest

from data import Example, household, task_module
from data.alfred_actions import ACTION_IDS
from data.household import Options, alarms, load, make_example, reply, resolve, scratch_tokens
from data.household_goals import TASK_TYPES, Goal, run_plan
from data.household_tasks import HouseTask, RandomTasks, held_out_tasks, random_task
from data.household_text import PHRASES, WORDS
from data.household_world import LAMPS, REASONS, reason_kind
from grpo.errors import UserError
from rewards.alfred import planned
from rewards.household import MODES, HouseAnswer, outcome, reward_functions

APPLE = HouseTask(
    room="kitchen",
    places=("cabinet", "fridge", "microwave"),
    things=(("apple", "cabinet"), ("fork", "fridge"), ("plate", "fridge")),
    goal=Goal("pick_heat_then_place_in_recep", "apple", "fridge"),
    plan=(
        "goto cabinet",
        "pickup apple",
        "goto microwave",
        "heat apple",
        "goto fridge",
        "put apple",
    ),
    phrasing=1,
)
SHORT, LONG = make_example(APPLE, lines=True), make_example(APPLE, lines=False)


def some_tasks(count: int, stream: str = "test") -> list[HouseTask]:
    return list(RandomTasks(count, stream, []))


# ---------------------------------------------------------------------------------------------
# Random households


def test_every_plan_reaches_its_goal_that_does_not_hold_from_the_start():
    for task in some_tasks(500):
        assert run_plan(task.world(), task.goal, task.plan).success
        for stop in range(len(task.plan)):
            assert not run_plan(task.world(), task.goal, task.plan[:stop]).success
        assert set(task.plan) <= ACTION_IDS.keys()


def test_all_task_types_and_rooms_and_sliced_things_appear():
    tasks = some_tasks(500)
    types = [t.goal.task_type for t in tasks]
    assert {*types} == {*TASK_TYPES} == {*WORDS}
    assert min(types.count(kind) for kind in TASK_TYPES) > 40
    assert {t.room for t in tasks} == {"kitchen", "bedroom", "livingroom", "bathroom"}
    assert {t.phrasing for t in tasks} == {0, 1, 2, 3}
    assert 15 < sum(t.goal.sliced for t in tasks) < 100
    assert not any(place in LAMPS for t in tasks for _, place in t.things)


def test_the_same_stream_gives_the_same_tasks_in_any_order_of_asking():
    tasks = RandomTasks(50, "a", [])
    assert list(tasks) == [tasks[i] for i in reversed(range(50))][::-1] == tasks[:50]
    assert tasks[-1] == tasks[49] and len({*tasks}) == 50
    assert list(RandomTasks(50, "b", [])) != list(tasks)
    with pytest.raises(IndexError):
        tasks[50]


def test_held_out_tasks_are_different_and_never_trained_on():
    held_out = held_out_tasks(200)
    assert len({*held_out}) == 200 and held_out_tasks(300)[:200] == held_out
    plain = RandomTasks(100, "a", [])
    refusing = RandomTasks(100, "a", plain[:50])
    assert not {*refusing} & {*plain[:50]} and refusing[50:] == plain[50:]


def test_other_words_for_the_same_task_do_not_make_it_another_one():
    assert replace(APPLE, phrasing=3, plan=()) == APPLE
    assert replace(APPLE, places=("cabinet", "fridge", "microwave", "sofa")) != APPLE


def test_training_follows_the_seed_and_held_out_households_do_not():
    one, two = (load(Options(), seed, from_scratch=True) for seed in (0, 1))
    assert list(one.evaluation) == list(two.evaluation) and len(one.evaluation) == 400
    assert one.train[0] != two.train[0] and one.train[0] != one.sft[0]
    trained = {e.answer.task for e in [*one.train[:300], *one.sft[:300]]}
    assert not trained & {e.answer.task for e in one.evaluation}


# ---------------------------------------------------------------------------------------------
# What is read and written


def test_the_short_form():
    assert SHORT.messages == [
        {
            "role": "user",
            "content": "at cabinet apple\nat fridge fork plate\nat microwave\n"
            "goal heat apple fridge",
        }
    ]
    assert SHORT.target == "\n".join(APPLE.plan) and SHORT.level == LONG.level == "heat"


def test_a_pretrained_model_reads_english_and_writes_the_json_of_alfred():
    system, user = (m["content"] for m in LONG.messages)
    ids = [f"{ACTION_IDS[f'pickup {kind}']} {kind}" for kind, _ in APPLE.things]
    assert f"\npickup: {' '.join(ids)}\n" in system and "pickup mug" not in system
    assert user.startswith("Goal: Put the apple at the fridge, hot.\nDone: nothing\n")
    assert "\nfridge: fork, plate\nmicrowave: nothing" in user
    plan = json.loads(LONG.target)["executable_plan"]
    assert [step["action_name"] for step in plan] == list(APPLE.plan)
    assert all(ACTION_IDS[step["action_name"]] == step["action_id"] for step in plan)


@pytest.mark.parametrize("word", PHRASES)
def test_instructions_name_all_that_the_goal_needs(word):
    task_type = next(kind for kind, w in WORDS.items() if w == word)
    needed = {"light": {"lamp"}, "in": {"vessel", "receptacle"}}.get(word, {"receptacle"})
    for phrase in PHRASES[word]:
        assert {*re.findall(r"{(\w+)}", phrase)} == needed | {"target"}
    assert task_type in TASK_TYPES


def test_every_short_text_is_made_of_the_vocabulary_in_one_way():
    tokens = scratch_tokens(Options())
    assert len(tokens) == len({*tokens})
    longest_first = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
    rng = random.Random(0)
    for task in some_tasks(300):
        example = make_example(task, lines=True)
        wrong = "\n".join(rng.sample(task.plan, len(task.plan)))
        told = reply(wrong, example) or ""
        for text in (example.messages[0]["content"], example.target, told):
            assert longest_first.sub("", text) == ""
            words = re.findall(r"\n|(?:^| )[a-z]+", text, re.M)
            assert told is text or longest_first.findall(text) == words


@pytest.mark.parametrize(
    ("text", "lines", "actions"),
    [
        ("goto bed\npickup pen", True, ["goto bed", "pickup pen"]),
        (" goto bed ;; pickup pen;\n", True, ["goto bed", "pickup pen"]),
        ("6\n98\n225\n²", True, ["goto bed", "pickup pen", "225", "²"]),
        ("", True, []),
        ('{"executable_plan":[{"action_id":6,"action_name":"goto bed"}]}', False, ["goto bed"]),
        ('```json\n{"executable_plan":[{"action_id":6}]}\n```', False, ["goto bed"]),
        ('{"executable_plan":[{"action_id":225},{},7]}', False, ["225", "None", "7"]),
        ('{"executable_plan":"goto bed"}', False, []),
        ("goto bed", False, []),
        ("[" * 100_000, False, []),
    ],
)
def test_plans_are_read(text, lines, actions):
    assert planned(text, lines) == actions


def test_what_does_not_go_together_is_refused():
    assert resolve(Options(), True).household_format == "lines"
    assert resolve(Options(), False).household_format == "json"
    with pytest.raises(UserError, match="--household-format json: a model from scratch"):
        resolve(Options(household_format="json"), True)
    with pytest.raises(UserError, match="--reward-mode verbatim rewards ALFRED's JSON"):
        resolve(Options(reward_mode="verbatim"), True)
    with pytest.raises(UserError, match="none of success, progress, documented, verbatim"):
        reward_functions("other")
    assert task_module("household") is household


# ---------------------------------------------------------------------------------------------
# Rewards


def rewards(mode: str, text: str, example: Example) -> dict[str, float]:
    return {name: f(text, example) for name, f in reward_functions(mode).items()}


@pytest.mark.parametrize("example", [SHORT, LONG])
@pytest.mark.parametrize("mode", MODES)
def test_the_plan_written_down_earns_everything(mode, example):
    if mode in ("documented", "verbatim") and example is SHORT:
        return
    full = {"success": 1.0, "progress": 1.5}.get(mode, 1.5)
    assert sum(rewards(mode, example.target, example).values()) == full
    assert household.is_correct(example.target, example)


def test_any_plan_that_reaches_the_goal_is_right():
    detour = "goto fridge\npickup fork\nput fork\n" + SHORT.target
    assert rewards("success", detour, SHORT) == {"success": 1.0}
    assert household.is_correct(detour, SHORT)


@pytest.mark.parametrize(
    ("text", "progress", "reason"),
    [
        ("", 0.0, "no plan"),
        ("nonsense", 0.0, "no such action"),
        ("goto cabinet\npickup apple\ngoto microwave\nheat apple", 0.5 / 3, "goal not reached"),
        ("goto cabinet\npickup apple\ngoto fridge\nput apple", 0.5 / 3, "goal not reached"),
        ("goto cabinet\npickup apple\nheat apple\ngoto fridge\nput apple", 0.0, "wrong place"),
        (SHORT.target + "\nput apple", 0.5, "not held"),
    ],
)
def test_wrong_plans(text, progress, reason):
    assert rewards("progress", text, SHORT) == {"success": 0.0, "progress": pytest.approx(progress)}
    assert household.failure_reason(text, SHORT) == reason and reason in REASONS


def test_what_held_from_the_start_is_not_paid_for():
    """A plate that stands where it has to go, without the fork in it, is no merit of a plan's."""
    goal = Goal("pick_and_place_with_movable_recep", "fork", "fridge", vessel="plate")
    task = replace(APPLE, goal=goal, things=(("fork", "cabinet"), ("plate", "fridge")))
    example = Example([], "", HouseAnswer(task, True))
    assert rewards("progress", "goto fridge", example)["progress"] == 0.0


def test_alarms():
    assert not alarms([("", SHORT)] * 15) and not alarms([(SHORT.target, SHORT)] * 16)
    assert "none of 16 outputs is a plan" in alarms([("", SHORT)] * 16)[0]
    long = "\n".join(["goto fridge"] * 13)
    assert "16 of 16 plans are over 2 times" in alarms([(long, SHORT)] * 16)[0]


# ---------------------------------------------------------------------------------------------
# Several turns


def turns(example: Example, *plans: str) -> Example:
    """The example as it is after these plans, each followed by what the agent heard."""
    messages = list(example.messages)
    for plan in plans:
        told = reply(plan, replace(example, messages=messages))
        messages += [{"role": "assistant", "content": plan}, {"role": "user", "content": told}]
    return replace(example, messages=messages)


def test_the_household_stays_as_the_plans_so_far_have_left_it():
    second = turns(SHORT, "goto cabinet\npickup apple\nheat apple\ngoto sofa")
    assert second.messages[-1]["content"] == (
        "failed wrong place\nheat apple\nhere cabinet\nhand apple\n"
        "at cabinet\nat fridge fork plate\nat microwave\ngoal heat apple fridge"
    )
    rest = "goto microwave\nheat apple\ngoto fridge\nput apple"
    assert reply(rest, second) is None
    assert household.is_correct(rest, second) and not household.is_correct(rest, SHORT)
    third = turns(SHORT, "goto cabinet\npickup apple\nheat apple", "goto microwave\nheat apple")
    assert "hand apple hot" in third.messages[-1]["content"]
    assert third.messages[-1]["content"].startswith("failed goal not reached\nhere microwave\n")
    assert household.is_correct("goto fridge\nput apple", third)


def test_the_agent_hears_in_english_what_failed():
    def answer(*actions: str) -> str:
        return json.dumps({"executable_plan": [{"action_name": a} for a in actions]})

    told = reply(answer("goto cabinet", "pickup apple", "put fork"), LONG)
    assert told == (
        "2 of your actions were done. Then 'put fork' failed: not held: you hold the apple, not "
        "the fork.\nYou are at the cabinet, with apple in hand. What there is:\ncabinet: nothing\n"
        "fridge: fork, plate\nmicrowave: nothing\nPlan again from here."
    )
    told = reply(answer("goto cabinet"), LONG)
    assert told.startswith("All of that was done, but the goal is not reached: 0 of its 3 ")
    told = reply("I would go to the cabinet.", LONG)
    assert told.startswith("Nothing was done: the answer has no actions that can be read.\n")
    assert reply(LONG.target, LONG) is None


def test_a_household_in_which_much_has_changed_is_told():
    """Vessels with things in them, marks and lamps, in both forms."""
    task = HouseTask(
        "bedroom",
        ("desk", "desklamp"),
        (("mug", "desk"), ("pen", "desk")),
        Goal("pick_and_place_simple", "pen", "bed"),
        (),
        0,
    )
    example = Example([], "", HouseAnswer(task, True))
    plan = "goto desklamp\ntoggle desklamp\ngoto desk\npickup pen\nput pen\npickup mug"
    assert "at desklamp lit" in reply(plan, example)
    assert outcome(plan, example).failed_at is None
    in_words = reply(
        json.dumps({"executable_plan": [{"action_name": a} for a in plan.split("\n")]}),
        Example([], "", HouseAnswer(task, False)),
    )
    assert "desklamp (on): nothing" in in_words and reason_kind("a: b") == "a"


def test_random_tasks_are_seeded():
    assert random_task(random.Random(3)) == random_task(random.Random(3))
