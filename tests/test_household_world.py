"""The symbolic household: what actions need and change, and what goals ask. No torch, no ALFRED."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from data.alfred_actions import ACTIONS
from data.household_goals import Goal, run_plan
from data.household_world import (
    MOST_ACTIONS,
    MOST_STATES,
    REASONS,
    act,
    execute,
    household,
    reason_kind,
)

PLACES = ["countertop", "desk", "desklamp", "fridge", "microwave", "sinkbasin", "sofa"]
PAIR = [("countertop", "sinkbasin")]
THINGS = [
    ("apple", "fridge"),
    ("bread", "countertop"),
    ("knife", "countertop"),
    ("mug", "sinkbasin"),
    ("pen", "desk"),
    ("pen", "sofa"),
    ("plate", "countertop"),
]


def kitchen():
    return household(PLACES, THINGS)


def failure(*plan: str) -> tuple[int | None, str]:
    """The index of the action that fails, and the kind of reason."""
    index, reason = execute(kitchen(), plan)
    return index, reason_kind(reason)


@pytest.mark.parametrize(
    ("plan", "index", "reason"),
    [
        (["goto countertop", "put plate"], 1, "not held"),
        (["goto microwave", "heat plate"], 1, "not held"),
        (["goto countertop", "pickup plate", "goto fridge", "heat plate"], 3, "wrong place"),
        (["goto fridge", "pickup apple", "cool plate"], 2, "not held"),
        (["goto fridge", "pickup apple", "pickup apple"], 2, "hands full"),
        (["goto fridge", "pickup apple", "goto apple"], 2, "already held"),
        (["goto safe"], 0, "not in this household"),
        (["goto cup"], 0, "not in this household"),
        (["goto fridge", "pickup egg"], 1, "not in this household"),
        (["goto sofa", "pickup apple"], 1, "out of reach"),
        (["pickup apple"], 0, "out of reach"),
        (["toggle desklamp"], 0, "out of reach"),
        (["toggle floorlamp"], 0, "not in this household"),
        (["goto countertop", "slice bread"], 1, "no knife"),
        (["goto countertop", "pickup knife", "slice bread", "slice bread"], 3, "already sliced"),
        (["goto countertop", "pickup knife", "slice apple"], 2, "out of reach"),
        (["goto fridge", "pickup apple", "goto desklamp", "put apple"], 3, "nothing to put it on"),
        (["open fridge"], 0, "no such action"),
        (["goto"], 0, "no such action"),
        (["goto desk"] * (MOST_ACTIONS + 1), MOST_ACTIONS, "too long"),
    ],
)
def test_a_wrong_plan_fails_where_it_is_wrong_and_for_the_right_reason(plan, index, reason):
    assert failure(*plan) == (index, reason)
    assert reason in REASONS


def test_an_action_that_fails_changes_nothing_and_is_told_in_plain_words():
    world = kitchen()
    act(world, "goto fridge")
    before = list(world.states)
    assert act(world, "put apple") == "not held: you hold nothing, so not the apple"
    assert (
        act(world, "pickup pen") == "out of reach: you are at the fridge, and the pen is not there"
    )
    assert world.states == before


def test_names_may_have_capitals_and_blanks():
    assert failure(" Goto Fridge ", "PICKUP apple") == (None, "")


def test_each_of_the_225_actions_is_done_or_refused_for_a_known_reason():
    for action in ACTIONS:
        reason = act(kitchen(), action)
        assert not reason or reason_kind(reason) in REASONS


def test_a_plan_leaves_the_world_that_it_is_tried_in_as_it_was():
    world = kitchen()
    goal = Goal("pick_and_place_simple", "apple", "desk")
    plan = ["goto fridge", "pickup apple", "goto desk", "put apple"]
    assert run_plan(world, goal, plan) == run_plan(world, goal, plan)
    assert world.states == kitchen().states


# ---------------------------------------------------------------------------------------------
# Readings


def test_a_put_may_mean_the_vessel_that_stands_there_or_the_place():
    goal = Goal("pick_and_place_with_movable_recep", "apple", "desk", vessel="plate")
    into = ["goto fridge", "pickup apple", "goto countertop", "put apple"]
    plan = [*into, "pickup plate", "goto desk", "put plate"]
    assert run_plan(kitchen(), goal, plan).success
    there = Goal("pick_and_place_simple", "apple", "countertop")
    assert run_plan(kitchen(), there, into).success


def test_a_name_may_mean_any_of_two_things_of_a_kind():
    goal = Goal("pick_and_place_simple", "pen", "fridge")
    plan = ["goto pen", "pickup pen", "goto fridge", "put pen"]
    assert run_plan(kitchen(), goal, plan).success
    # One reading is at the sofa, one at the desk: both pens have to be fetched from somewhere.
    two = Goal("pick_two_obj_and_place", "pen", "fridge")
    assert run_plan(kitchen(), two, plan).conditions_met == 1
    assert run_plan(kitchen(), two, plan * 2).success


def test_what_stands_together_is_in_reach_from_either():
    world = household(["countertop", "sinkbasin"], [("mug", "sinkbasin")], PAIR)
    goal = Goal("pick_clean_then_place_in_recep", "mug", "countertop")
    assert run_plan(world, goal, ["goto countertop", "pickup mug", "clean mug", "put mug"]).success
    apart = household(["countertop", "sinkbasin"], [("mug", "sinkbasin")])
    assert run_plan(apart, goal, ["goto countertop", "pickup mug"]).failed_at == 1


def test_readings_do_not_multiply_without_end():
    """Ten vessels and things, put down again and again: 4,096 readings and more."""
    kinds = ["bowl", "box", "pan", "plate", "pot", "egg", "fork", "spoon", "knife", "ladle"]
    world = household(["desk"], [(kind, "desk") for kind in kinds])
    moves = [f"{verb} {kind}" for kind in kinds[5:] for verb in ("pickup", "put")]
    assert execute(world, ["goto desk", *moves * 5]) == (None, "")
    assert len(world.states) == MOST_STATES


# ---------------------------------------------------------------------------------------------
# Goals

HEATED = ["goto fridge", "pickup apple", "goto microwave", "heat apple"]
SLICED = ["goto countertop", "pickup knife", "slice bread", "put knife", "pickup bread"]


@pytest.mark.parametrize(
    ("goal", "plan", "met"),
    [
        (("pick_and_place_simple", "apple", "desk"), HEATED[:2], "0/1"),
        (("pick_and_place_simple", "apple", "microwave"), [*HEATED, "put apple"], "1/1"),
        (("pick_heat_then_place_in_recep", "apple", "desk"), HEATED, "1/3"),
        (
            ("pick_heat_then_place_in_recep", "apple", "desk"),
            [*HEATED, "goto desk", "put apple"],
            "3/3",
        ),
        (
            ("pick_heat_then_place_in_recep", "apple", "desk"),
            [*HEATED, "goto fridge", "cool apple", "goto desk", "put apple"],
            "1/3",
        ),
        (
            ("pick_cool_then_place_in_recep", "apple", "fridge"),
            [*HEATED[:2], "cool apple", "put apple"],
            "3/3",
        ),
        (("look_at_obj_in_light", "pen", "", "", "desklamp"), ["goto desk", "pickup pen"], "0/2"),
        (
            ("look_at_obj_in_light", "pen", "", "", "desklamp"),
            ["goto desk", "pickup pen", "goto desklamp", "toggle desklamp"],
            "2/2",
        ),
        (
            ("look_at_obj_in_light", "pen", "", "", "desklamp"),
            ["goto desk", "pickup pen", "goto desklamp", "toggle desklamp", "toggle desklamp"],
            "1/2",
        ),
        (
            ("look_at_obj_in_light", "pen", "", "", "desklamp"),
            ["goto desklamp", "toggle desklamp", "goto desk", "pickup pen"],
            "1/2",
        ),
        (
            ("pick_and_place_simple", "bread", "desk", "", "", True),
            [*SLICED, "goto desk", "put bread"],
            "2/2",
        ),
        (
            ("pick_and_place_simple", "bread", "desk", "", "", True),
            ["goto countertop", "pickup bread", "goto desk", "put bread"],
            "0/2",
        ),
        (
            ("pick_and_place_with_movable_recep", "apple", "desk", "plate"),
            ["goto countertop", "pickup plate", "goto desk", "put plate"],
            "1/3",
        ),
        (
            ("pick_and_place_simple", "apple", "desk"),
            ["goto fridge", "pickup apple", "goto"],
            "0/1",
        ),
    ],
)
def test_conditions_are_counted(goal, plan, met):
    found = run_plan(kitchen(), Goal(*goal), plan)
    assert f"{found.conditions_met}/{found.conditions}" == met
    whole = found.conditions_met == found.conditions
    assert found.success == whole and bool(found.reason) != whole


def test_a_plan_that_goes_on_to_an_action_that_fails_is_no_success():
    goal = Goal("pick_and_place_simple", "apple", "microwave")
    found = run_plan(kitchen(), goal, [*HEATED, "put apple", "put apple"])
    assert (found.conditions_met, found.failed_at, found.success) == (1, 5, False)


def test_a_sliced_thing_is_two_things():
    goal = Goal("pick_two_obj_and_place", "bread", "desk", sliced=True)
    bring = ["goto desk", "put bread"]
    again = ["goto countertop", "pickup bread", *bring]
    assert not run_plan(kitchen(), goal, [*SLICED, *bring]).success
    assert run_plan(kitchen(), goal, [*SLICED, *bring, *again]).success


def test_the_household_runs_without_torch():
    code = "import sys; sys.modules['torch'] = None; import data.household, data.alfred_scenes"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent)
    assert done.returncode == 0
