"""Random households with something to do in them: the 7 task types of ALFRED, without ALFRED.

A task is a room, its things and a goal, with a plan that is right by construction. Held-out tasks
are the same for every run; training tasks never are among them.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

from data.alfred_actions import objects
from data.household_goals import TASK_TYPES, Goal, run_plan
from data.household_world import KNIVES, LAMPS, NARROW, STATIONS, VESSELS, World, household

# By room: where things can be put, and what is found there.
_ROOMS = {
    "kitchen": (
        "cabinet countertop diningtable drawer fridge garbagecan microwave shelf sinkbasin",
        """apple bowl bread butterknife cup dishsponge egg fork kettle knife ladle lettuce mug pan
        peppershaker plate pot potato saltshaker spatula spoon tomato winebottle""",
    ),
    "bedroom": (
        "armchair bed desk desklamp drawer dresser garbagecan shelf sidetable",
        """alarmclock baseballbat basketball book bowl box cd cellphone creditcard keychain laptop
        mug pen pencil pillow plate tennisracket""",
    ),
    "livingroom": (
        "armchair coffeetable diningtable dresser floorlamp garbagecan ottoman sidetable sofa",
        """book bowl box candle cellphone creditcard keychain laptop newspaper pillow plate
        remotecontrol statue tissuebox vase watch wateringcan""",
    ),
    "bathroom": (
        "bathtubbasin cabinet cart countertop drawer garbagecan sinkbasin toilet",
        "candle cloth handtowel plunger soapbar soapbottle spraybottle tissuebox toiletpaper",
    ),
}
ROOMS = {room: (places.split(), kinds.split()) for room, (places, kinds) in _ROOMS.items()}
ROOMS_OF = {
    "pick_and_place_simple": list(ROOMS),
    "pick_two_obj_and_place": list(ROOMS),
    "look_at_obj_in_light": ["bedroom", "livingroom"],
    "pick_clean_then_place_in_recep": ["kitchen", "bathroom"],
    "pick_heat_then_place_in_recep": ["kitchen"],
    "pick_cool_then_place_in_recep": ["kitchen"],
    "pick_and_place_with_movable_recep": ["kitchen", "bedroom", "livingroom"],
}
VERB_OF = {
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
}
SLICED_SHARE = 0.5  # of the tasks whose thing can be sliced
PHRASINGS = 4  # of each task type's instruction
MOST_OTHERS = 4  # places, and things, that a task does not need


@dataclass(frozen=True)
class HouseTask:
    """things: (kind, place). plan: one that reaches the goal. phrasing: a number that chooses the
    instruction's words. Tasks that differ in these two only are the same task."""

    room: str
    places: tuple[str, ...]
    things: tuple[tuple[str, str], ...]
    goal: Goal
    plan: tuple[str, ...] = field(compare=False)
    phrasing: int = field(compare=False)

    def world(self) -> World:
        return household(self.places, self.things)


def random_task(rng: random.Random) -> HouseTask:
    """A task whose plan reaches its goal, which does not hold from the start."""
    while True:
        task = _draw(rng)
        world = task.world()
        done = run_plan(world, task.goal, []).success
        if run_plan(world, task.goal, task.plan).success and not done:
            return task


def _draw(rng: random.Random) -> HouseTask:
    task_type = rng.choice(TASK_TYPES)
    room = rng.choice(ROOMS_OF[task_type])
    places, kinds = ROOMS[room]
    stands = [place for place in places if place not in NARROW]
    goal = _draw_goal(task_type, places, kinds, stands, rng)
    things = _needed_things(goal, stands, rng)
    stations, _ = STATIONS.get(VERB_OF.get(task_type), ((), ""))
    plan = with_gotos(_errands(goal, things, next((p for p in stations if p in places), "")))
    needed = {action.removeprefix("goto ") for action in plan if action.startswith("goto ")}
    needed |= {goal.receptacle, goal.lamp} - {""}
    extra = rng.sample(places, rng.randint(1, MOST_OTHERS))
    there = [place for place in places if place in needed or place in extra]
    others = [kind for kind in kinds if all(kind != k for k, _ in things)]
    free = [place for place in there if place not in NARROW]
    for kind in rng.sample(others, rng.randint(1, MOST_OTHERS)):
        things.append((kind, rng.choice(free)))
    return HouseTask(
        room, tuple(there), tuple(sorted(things)), goal, tuple(plan), rng.randrange(PHRASINGS)
    )


def _draw_goal(
    task_type: str, places: list[str], kinds: list[str], stands: list[str], rng: random.Random
) -> Goal:
    if task_type == "look_at_obj_in_light":
        lamp = next(place for place in places if place in LAMPS)
        return Goal(task_type, rng.choice(kinds), lamp=lamp)
    vessel = ""
    if task_type == "pick_and_place_with_movable_recep":
        vessel = rng.choice([kind for kind in kinds if kind in VESSELS])
        kinds = [kind for kind in kinds if kind in VESSELS[vessel]]
    elif task_type in VERB_OF:
        kinds = [kind for kind in kinds if kind in objects(VERB_OF[task_type])]
        kinds = [kind for kind in kinds if VERB_OF[task_type] == "clean" or kind not in KNIVES]
    target = rng.choice(kinds)
    can_slice = target in objects("slice") and task_type != "pick_two_obj_and_place"
    sliced = can_slice and rng.random() < SLICED_SHARE
    return Goal(task_type, target, rng.choice(stands), vessel, sliced=sliced)


def _needed_things(goal: Goal, stands: list[str], rng: random.Random) -> list[tuple[str, str]]:
    """The target first, twice if two are asked for; not yet where it has to go."""
    elsewhere = [place for place in stands if place != goal.receptacle]
    times = 1 + (goal.task_type == "pick_two_obj_and_place")
    things = [(goal.target, rng.choice(elsewhere)) for _ in range(times)]
    if goal.vessel:
        things.append((goal.vessel, rng.choice(stands)))
    if goal.sliced:
        things.append((rng.choice(KNIVES), rng.choice(stands)))
    return things


def _errands(goal: Goal, things: list[tuple[str, str]], station: str) -> Iterator[tuple[str, str]]:
    """What to do, as (the place where, the action), in an order that reaches the goal."""
    where, target, verb = dict(things), goal.target, VERB_OF.get(goal.task_type)
    if goal.sliced:
        knife = next(kind for kind, _ in reversed(things) if kind in KNIVES)
        yield where[knife], f"pickup {knife}"
        yield where[target], f"slice {target}"
        yield where[target], f"put {knife}"
    for kind, place in things:
        if kind != target:
            continue
        yield place, f"pickup {target}"
        if goal.lamp:
            yield goal.lamp, f"toggle {goal.lamp}"
        elif goal.vessel:
            yield where[goal.vessel], f"put {target}"
            if where[goal.vessel] != goal.receptacle:
                yield where[goal.vessel], f"pickup {goal.vessel}"
                yield goal.receptacle, f"put {goal.vessel}"
        else:
            if verb:
                yield station, f"{verb} {target}"
            yield goal.receptacle, f"put {target}"


def with_gotos(errands: Iterator[tuple[str, str]]) -> list[str]:
    """The actions, each in its place.

    >>> with_gotos([("fridge", "pickup apple"), ("fridge", "cool apple"), ("bed", "put apple")])
    ['goto fridge', 'pickup apple', 'cool apple', 'goto bed', 'put apple']
    """
    plan, here = [], ""
    for place, action in errands:
        if place != here:
            plan.append(f"goto {place}")
        plan.append(action)
        here = place
    return plan


# ---------------------------------------------------------------------------------------------
# Which are held out and which are trained on


def held_out_tasks(count: int) -> list[HouseTask]:
    """So many different tasks, the same for all runs."""
    rng = random.Random("held-out")
    found: dict[HouseTask, None] = {}
    while len(found) < count:
        found[random_task(rng)] = None
    return list(found)


class RandomTasks(Sequence[HouseTask]):
    """Tasks of which the i-th is made from (stream, i) each time it is asked for: the first of a
    row of candidates that is not held out. There are so many that repeats do not matter."""

    def __init__(self, count: int, stream: str, held_out: Collection[HouseTask]):
        self.count, self.stream, self.held_out = count, stream, frozenset(held_out)

    def __len__(self) -> int:
        return self.count

    @overload
    def __getitem__(self, index: int) -> HouseTask: ...
    @overload
    def __getitem__(self, index: slice) -> list[HouseTask]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.count))]
        if not -self.count <= index < self.count:
            raise IndexError(index)
        rng = random.Random(f"{self.stream}/{index % self.count}")
        while True:
            task = random_task(rng)
            if task not in self.held_out:
                return task
