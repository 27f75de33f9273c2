"""From a trajectory of ALFRED to the household it took place in, and its goal.

A trajectory does not list what is in its room, so that is read from plans: its own tells its things
and where each of them is first found, the train plans of the same floor plan tell its other places.
Which places stand together, so that a thing can be put down at one from the other, follows from
actions done away from the last goto: after "goto countertop", a put into the sink basin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from data.alfred_actions import objects, split_action
from data.alfred_files import NO_OPERATION, Trajectory
from data.household_goals import Goal
from data.household_world import FLOOR, KNIVES, START, STATIONS, World, household

# What one can go to that stays where it is; all else that one goes to can be picked up.
PLACES = frozenset(objects("goto")) - frozenset(objects("pickup"))


class Step(NamedTuple):
    """receptacle: where a put puts it, which the action's name does not say; else ""."""

    verb: str
    target: str
    receptacle: str = ""


@dataclass
class Room:
    """What plans tell of a room: its places, and the pairs of them that stand together."""

    places: set[str] = field(default_factory=set)
    together: set[tuple[str, str]] = field(default_factory=set)

    def add(self, other: Room) -> None:
        self.places |= other.places
        self.together |= other.together


@dataclass(eq=False)
class _Thing:
    """first: where the plan finds it, "" for what its slicing makes. where: a place, or the vessel
    that it lies in, None while it is held."""

    kind: str
    first: str
    where: str | _Thing | None
    sliced: bool = False

    def place(self) -> str | None:
        return self.where.place() if isinstance(self.where, _Thing) else self.where


class _Reader:
    """Follows a plan that names its receptacles, and notes what it takes for granted."""

    def __init__(self, goal: Goal):
        self.goal, self.room, self.things = goal, Room(), []
        self.room.places |= {goal.receptacle, goal.lamp} - {""}
        self.place, self.held = START, None
        self.beside: dict[str, str] = {}  # the place at which a thing stands that was gone to

    def follow(self, step: Step) -> None:
        if step.verb in STATIONS:
            self.treat(step.verb)
        else:
            getattr(self, step.verb)(step.target, step.receptacle)

    def find(self, kind: str, anywhere: bool = False, whole: bool = False) -> _Thing:
        """A thing of this kind at this place, or anywhere; a new one if none is known."""
        known = [
            thing
            for thing in self.things
            if thing.kind == kind
            and not (whole and thing.sliced)
            and thing is not self.held
            and (anywhere or thing.place() == self.place)
            and not self.is_delivered(thing)
        ]
        return known[-1] if known else self.new(kind, FLOOR + kind if anywhere else self.place)

    def is_delivered(self, thing: _Thing) -> bool:
        """A plan that brings two things does not mean the first when it goes for the second."""
        two = self.goal.task_type == "pick_two_obj_and_place"
        return two and (thing.kind, thing.where) == (self.goal.target, self.goal.receptacle)

    def new(self, kind: str, place: str) -> _Thing:
        self.things.append(_Thing(kind, place, place))
        return self.things[-1]

    def goto(self, target: str, _: str) -> None:
        if target in PLACES:
            self.room.places.add(target)
            self.place = target
        else:
            whole = self.held is not None and self.held.kind in KNIVES
            self.place = self.find(target, anywhere=True, whole=whole).place()

    def pickup(self, target: str, _: str) -> None:
        self.held = self.find(target)
        self.held.where = None

    def put(self, target: str, receptacle: str) -> None:
        if receptacle in PLACES:
            self.also_here(receptacle)
        thing, self.held = self.held, None
        if thing is not None:
            thing.where = receptacle if receptacle in PLACES else self.find(receptacle)

    def slice(self, target: str, _: str) -> None:
        thing = self.find(target, whole=True)
        thing.sliced = True
        self.things.append(_Thing(target, "", thing.where, sliced=True))

    def toggle(self, target: str, _: str) -> None:
        self.also_here(target)

    def treat(self, verb: str) -> None:
        stations, _ = STATIONS[verb]
        if self.place not in stations:
            self.also_here(stations[0])

    def also_here(self, place: str) -> None:
        """Something is done here that needs this place, so it is within reach."""
        self.room.places.add(place)
        if self.place.startswith(FLOOR):
            self.beside.setdefault(self.place, place)
        elif self.place not in ("", place):
            self.room.together.add((self.place, place))


def read_plan(goal: Goal, steps: Iterable[Step]) -> tuple[Room, list[tuple[str, str]]]:
    """What a plan tells: its room, and its things as (kind, where the plan first finds it)."""
    reader = _Reader(goal)
    for step in steps:
        reader.follow(step)
    things = [(t.kind, reader.beside.get(t.first, t.first)) for t in reader.things if t.first]
    return reader.room, things


# ---------------------------------------------------------------------------------------------
# Trajectories


def goal_of(trajectory: Trajectory) -> Goal:
    """What its task type and its parameters ask for."""
    given = trajectory.pddl_params
    names = ("object_target", "parent_target", "mrecep_target", "toggle_target")
    target, receptacle, vessel, lamp = (str(given.get(name, "")).lower() for name in names)
    sliced = bool(given.get("object_sliced"))
    return Goal(trajectory.task_type, target, receptacle, vessel, lamp, sliced)


def steps_of(trajectory: Trajectory) -> list[Step]:
    """Its actions, with the receptacles of its puts."""
    receptacles = [
        (*arguments, "", "")[1].lower()
        for action, *arguments in trajectory.high_pddl
        if action != NO_OPERATION
    ]
    steps = zip(trajectory.actions, receptacles, strict=True)
    return [Step(*split_action(action), receptacle) for action, receptacle in steps]


def learn_rooms(trajectories: Iterable[Trajectory]) -> dict[str, Room]:
    """By floor plan, what all plans there tell of their rooms together."""
    rooms: dict[str, Room] = {}
    for trajectory in trajectories:
        room, _ = read_plan(goal_of(trajectory), steps_of(trajectory))
        rooms.setdefault(trajectory.scene, Room()).add(room)
    return rooms


def world_of(trajectory: Trajectory, rooms: Mapping[str, Room]) -> World:
    """The household at the start of a trajectory. rooms: as `learn_rooms` gives them; what the
    trajectory's own plan tells is added."""
    own, things = read_plan(goal_of(trajectory), steps_of(trajectory))
    own.add(rooms.get(trajectory.scene, Room()))
    return household(sorted(own.places), things, sorted(own.together))
