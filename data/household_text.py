"""A household in words: for a pretrained model in English, for one from scratch in few tokens.

The short form is a line a place, a vessel with something in it, the hand and the goal:

    at fridge apple mug
    at sinkbasin
    goal clean sliced apple fridge
"""

from __future__ import annotations

from data.alfred_actions import ACTIONS, VERBS, actions_on
from data.household_goals import Goal
from data.household_tasks import ROOMS, HouseTask
from data.household_world import (
    CLEAN,
    COLD,
    HOT,
    REASONS,
    SLICED,
    State,
    Thing,
    World,
    held,
    reason_kind,
)

# By task type: the word of the short form, and the instruction as different people might put it.
WORDS = {
    "pick_and_place_simple": "place",
    "pick_two_obj_and_place": "two",
    "look_at_obj_in_light": "light",
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
    "pick_and_place_with_movable_recep": "in",
}
PHRASES = {
    "place": (
        "Put the {target} at the {receptacle}.",
        "Bring the {target} to the {receptacle}.",
        "The {target} belongs at the {receptacle}; take it there.",
        "Move the {target} to the {receptacle}.",
    ),
    "two": (
        "Put two things of the kind {target} at the {receptacle}.",
        "Bring both of the kind {target} to the {receptacle}.",
        "There are two of the kind {target}: leave both at the {receptacle}.",
        "Gather two of the kind {target} at the {receptacle}.",
    ),
    "light": (
        "Look at the {target} in the light of the {lamp}.",
        "Hold the {target} under the {lamp}, switched on.",
        "Turn on the {lamp} and look at the {target} by it.",
        "Examine the {target} by the light of the {lamp}.",
    ),
    "clean": (
        "Wash the {target} and put it at the {receptacle}.",
        "Put the {target} at the {receptacle}, clean.",
        "The {target} is dirty: clean it, then leave it at the {receptacle}.",
        "Leave the {target} at the {receptacle} once it is washed.",
    ),
    "heat": (
        "Heat the {target} and put it at the {receptacle}.",
        "Put the {target} at the {receptacle}, hot.",
        "Warm up the {target}, then bring it to the {receptacle}.",
        "Leave the {target} at the {receptacle} once it is heated.",
    ),
    "cool": (
        "Cool the {target} and put it at the {receptacle}.",
        "Put the {target} at the {receptacle}, cold.",
        "Chill the {target}, then bring it to the {receptacle}.",
        "Leave the {target} at the {receptacle} once it is cooled.",
    ),
    "in": (
        "Put the {target} in the {vessel} and the {vessel} at the {receptacle}.",
        "Bring the {vessel} with the {target} in it to the {receptacle}.",
        "At the {receptacle} there should be the {vessel}, and in it the {target}.",
        "Move the {vessel} to the {receptacle} with the {target} inside.",
    ),
}
_MARKS = (SLICED, CLEAN, HOT, COLD)


def level(goal: Goal) -> str:
    """The row of the evaluation table: a word for the task type."""
    return WORDS[goal.task_type]


def instruction(task: HouseTask) -> str:
    goal = task.goal
    text = PHRASES[level(goal)][task.phrasing].format(
        target=goal.target, receptacle=goal.receptacle, vessel=goal.vessel, lamp=goal.lamp
    )
    return text + f" The {goal.target} has to be sliced." * goal.sliced


def possible_actions(task: HouseTask) -> list[str]:
    """Those whose place or thing is in this household, whether or not they make sense."""
    there = {*task.places, *(kind for kind, _ in task.things)}
    return actions_on(there)


def marks(thing: Thing) -> list[str]:
    return [mark for mark in _MARKS if mark in thing.marks]


# ---------------------------------------------------------------------------------------------
# English


def describe(world: World) -> str:
    """Where the agent is, what it holds, and what is where; a line a place.

    Of the readings that a world follows this is the first.
    """
    state = world.states[0]
    hand = held(state)
    holding = _in_words(state, hand) if hand is not None else "nothing"
    place = f"at the {state.place}" if state.place else "at the start"
    lines = [f"You are {place}, with {holding} in hand. What there is:"]
    for place in world.near:
        things = [_in_words(state, i) for i, t in enumerate(state.things) if t.where == place]
        lit = " (on)" * (place in state.lit)
        lines.append(f"{place}{lit}: {', '.join(things) or 'nothing'}")
    return "\n".join(lines)


def _in_words(state: State, number: int) -> str:
    thing = state.things[number]
    inside = [_in_words(state, i) for i, t in enumerate(state.things) if t.where == number]
    text = " ".join([*marks(thing), thing.kind])
    return f"{text} ({', '.join(inside)} in it)" if inside else text


def failure_text(world: World, done: int, action: str, reason: str) -> str:
    """What the agent hears of a plan that did not reach the goal. done: how many of its actions
    were done; action: the one that failed, "" if none did."""
    kind, _, details = reason.partition(": ")
    if action:
        told = f"{done} of your actions were done. Then '{action:.40}' failed: {reason}."
    elif kind == "no plan":
        told = f"Nothing was done: {details}."
    else:
        told = f"All of that was done, but the goal is not reached: {details}."
    return f"{told}\n{describe(world)}\nPlan again from here."


# ---------------------------------------------------------------------------------------------
# The short form


def short_scene(world: World) -> str:
    """As `describe`, without the hand and the agent's place while they say nothing."""
    state = world.states[0]
    lines = [f"here {state.place}"] if state.place else []
    hand = held(state)
    lines += [f"hand{_short(state.things[hand])}"] if hand is not None else []
    for place in world.near:
        lit = " lit" * (place in state.lit)
        things = "".join(_short(thing) for thing in state.things if thing.where == place)
        lines.append(f"at {place}{lit}{things}")
    for number, vessel in enumerate(state.things):
        things = "".join(_short(thing) for thing in state.things if thing.where == number)
        lines += [f"in {vessel.kind}{things}"] * bool(things)
    return "\n".join(lines)


def _short(thing: Thing) -> str:
    return "".join(f" {word}" for word in [thing.kind, *marks(thing)])


def short_goal(goal: Goal) -> str:
    """
    >>> short_goal(Goal("pick_and_place_with_movable_recep", "pen", "desk", vessel="mug"))
    'goal in pen mug desk'
    """
    sliced = [SLICED] * goal.sliced
    names = [n for n in (goal.target, goal.vessel, goal.receptacle, goal.lamp) if n]
    return " ".join(["goal", level(goal), *sliced, *names])


def short_failure(world: World, goal: Goal, action: str, reason: str) -> str:
    lines = [f"failed {reason_kind(reason)}"]
    lines += [action] * (action in ACTIONS)
    return "\n".join([*lines, short_scene(world), short_goal(goal)])


def short_tokens() -> list[str]:
    """The vocabulary: a token a word, with the blank before it unless it begins a line."""
    first = ["at", "in", "here", "hand", "goal", "failed", *VERBS]
    kinds = [name for places, things in ROOMS.values() for name in (*places, *things)]
    words = [*kinds, *WORDS.values(), *_MARKS, "lit", *REASONS]
    return ["\n", *first, *(f" {word}" for word in dict.fromkeys(words))]
