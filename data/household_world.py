"""A household in symbols: what each of the 225 actions needs and what it changes.

After ALFRED (Shridhar et al. 2020, arXiv 1912.01734), whose plans name kinds and not things: "goto
apple" does not say which apple, "put apple" not even where. So every reading of an action is
followed: a world is a list of possible states, an action fails only if it fails in all of them, and
a plan succeeds if one of them meets the goal (household_goals.py).

Doors open by themselves: there is no action for them. What has been heated stays hot until it is
cooled, what has been cleaned stays clean. A sliced apple is two things, each a sliced apple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from data.alfred_actions import ACTION_IDS, split_action

HAND = "hand"  # where a thing is that is held
START = ""  # where the agent is before its first goto
FLOOR = "floor by "  # before the name of a thing that stands on the floor, a place of its own

CLEAN, HOT, COLD, SLICED = "clean", "hot", "cold", "sliced"
LAMPS = ("desklamp", "floorlamp")
KNIVES = ("butterknife", "knife")
# The places where something is done, and what becomes of the thing.
STATIONS = {
    "clean": (("sinkbasin", "bathtubbasin"), CLEAN),
    "heat": (("microwave",), HOT),
    "cool": (("fridge",), COLD),
}
_OPPOSITE = {HOT: COLD, COLD: HOT}

_FOOD = "apple bread egg lettuce potato tomato"
_CUTLERY = "butterknife fork knife spoon"
_KITCHENWARE = f"{_FOOD} {_CUTLERY} dishsponge ladle spatula"
_SMALL = "cd candle cellphone cloth creditcard keychain pen pencil remotecontrol watch"
# Places and things that take only some kinds; a thing that is not in here takes nothing.
VESSELS = {
    "bowl": f"{_KITCHENWARE} {_SMALL} mug".split(),
    "box": f"{_SMALL} alarmclock book dishsponge glassbottle mug statue tissuebox vase".split(),
    "cup": ["butterknife", "fork", "spoon"],
    "mug": f"{_CUTLERY} keychain pen pencil watch".split(),
    "pan": _KITCHENWARE.split(),
    "plate": f"{_KITCHENWARE} {_SMALL} alarmclock book glassbottle mug tissuebox".split(),
    "pot": _KITCHENWARE.split(),
}
NARROW = {
    "coffeemachine": ["mug"],
    "handtowelholder": ["handtowel"],
    "stoveburner": ["kettle", "pan", "pot"],
    "toiletpaperhanger": ["toiletpaper"],
    **{lamp: [] for lamp in LAMPS},
}

# The kinds of reasons for which an action or a plan fails.
REASONS = (
    "no plan",
    "no such action",
    "not in this household",
    "out of reach",
    "already held",
    "hands full",
    "not held",
    "nothing to put it on",
    "wrong place",
    "no knife",
    "already sliced",
    "too long",
    "goal not reached",
)

MOST_STATES = 64  # readings that are followed at the same time
MOST_ACTIONS = 60  # the longest of ALFRED's plans has 19


class Thing(NamedTuple):
    """where: a place's name, HAND, or the number of the vessel that it lies in."""

    kind: str
    where: str | int
    marks: frozenset[str] = frozenset()


class State(NamedTuple):
    place: str
    things: tuple[Thing, ...]
    lit: frozenset[str] = frozenset()


@dataclass
class World:
    """near: for each place of the household the places in reach of one who stands there, itself
    among them. states: what may be the case, most natural reading first."""

    near: Mapping[str, frozenset[str]]
    states: list[State]

    def copy(self) -> World:
        return World(self.near, list(self.states))

    def reach(self, place: str) -> frozenset[str]:
        return self.near.get(place, frozenset([place]))


def household(
    places: Sequence[str], things: Sequence[tuple[str, str | int]], together: Sequence = ()
) -> World:
    """A world from its places, its things as (kind, where), and pairs of places close together.

    >>> world = household(["fridge"], [("apple", "fridge")])
    >>> act(world, "goto fridge"), act(world, "pickup apple"), act(world, "pickup apple")
    ('', '', 'hands full: you hold the apple already')
    """
    near = {place: {place} for place in places}
    for one, other in together:
        near[one].add(other)
        near[other].add(one)
    state = State(START, tuple(Thing(kind, where) for kind, where in things))
    return World({place: frozenset(near[place]) for place in near}, [state])


# ---------------------------------------------------------------------------------------------
# Actions


def act(world: World, action: str) -> str:
    """Does an action, or says why it cannot be done and leaves the world as it is.

    The reason is "kind: details in words", "" where there is none.
    """
    action = action.strip().lower()
    if action not in ACTION_IDS:
        return f"no such action: '{action:.40}' is none of the {len(ACTION_IDS)} actions"
    verb, kind = split_action(action)
    after: dict[State, None] = {}
    reasons = []
    for state in world.states:
        result = _ACTS[verb](world, state, kind)
        if isinstance(result, str):
            reasons.append(result)
        else:
            after.update(dict.fromkeys(result))
    if not after:
        return reasons[0]
    world.states = list(after)[:MOST_STATES]
    return ""


def reason_kind(reason: str) -> str:
    """The few words that a table can count."""
    return reason.partition(":")[0]


def held(state: State) -> int | None:
    """The number of the thing in the agent's hand."""
    return next((i for i, thing in enumerate(state.things) if thing.where == HAND), None)


def place_of(state: State, thing: Thing) -> str:
    """The place where a thing is, in a vessel or not; the agent's own place for what it holds."""
    while isinstance(thing.where, int):
        thing = state.things[thing.where]
    return state.place if thing.where == HAND else thing.where


def _in_reach(world: World, state: State, kind: str) -> Iterator[int]:
    """The numbers of the things of a kind that can be touched from here, but for the one held."""
    reach = world.reach(state.place)
    for i, thing in enumerate(state.things):
        if thing.kind == kind and thing.where != HAND and place_of(state, thing) in reach:
            yield i


def _change(state: State, number: int, **changes) -> State:
    things = list(state.things)
    things[number] = things[number]._replace(**changes)
    return state._replace(things=tuple(things))


def _missing(world: World, state: State, kind: str) -> str:
    """Why a thing or a lamp cannot be touched from here."""
    if kind in world.near or any(thing.kind == kind for thing in state.things):
        return f"out of reach: {_standing(state)}, and the {kind} is not there"
    return f"not in this household: there is no {kind} here"


def _standing(state: State) -> str:
    if state.place == START:
        return "you have not gone anywhere yet"
    return f"you are at the {state.place.removeprefix(FLOOR)}"


def _not_held(state: State, kind: str) -> str:
    number = held(state)
    if number is None:
        return f"not held: you hold nothing, so not the {kind}"
    return f"not held: you hold the {state.things[number].kind}, not the {kind}"


Result = list[State] | str


def _goto(world: World, state: State, kind: str) -> Result:
    """To a place, or to wherever a thing of this kind is."""
    places = [kind] if kind in world.near else []
    places += [place_of(state, t) for t in state.things if t.kind == kind and t.where != HAND]
    if places:
        return [state._replace(place=place) for place in places]
    if any(thing.kind == kind for thing in state.things):
        return f"already held: the {kind} is in your hand"
    return _missing(world, state, kind)


def _pickup(world: World, state: State, kind: str) -> Result:
    number = held(state)
    if number is not None:
        return f"hands full: you hold the {state.things[number].kind} already"
    found = [_change(state, i, where=HAND) for i in _in_reach(world, state, kind)]
    return found or _missing(world, state, kind)


def _put(world: World, state: State, kind: str) -> Result:
    """Down at this place, at one beside it, or into a vessel that stands there."""
    number = held(state)
    if number is None or state.things[number].kind != kind:
        return _not_held(state, kind)
    reach = world.reach(state.place) & world.near.keys()
    spots: list[str | int] = sorted(reach, key=lambda place: (place != state.place, place))
    spots = [spot for spot in spots if kind in NARROW.get(spot, [kind])]
    for vessel, kinds in VESSELS.items():
        if kind in kinds:
            spots += _in_reach(world, state, vessel)
    if not spots:
        return f"nothing to put it on: {_standing(state)}, where the {kind} finds no place"
    return [_change(state, number, where=spot) for spot in spots]


def _treat(verb: str) -> Callable[[World, State, str], Result]:
    """Clean, heat or cool what is held, where there is something to do it with."""
    stations, mark = STATIONS[verb]

    def treat(world: World, state: State, kind: str) -> Result:
        number = held(state)
        if number is None or state.things[number].kind != kind:
            return _not_held(state, kind)
        if world.reach(state.place).isdisjoint(stations):
            needed = " or ".join(stations)
            return f"wrong place: to {verb} needs a {needed}, and {_standing(state)}"
        marks = state.things[number].marks - {_OPPOSITE.get(mark)} | {mark}
        return [_change(state, number, marks=marks)]

    return treat


def _slice(world: World, state: State, kind: str) -> Result:
    number = held(state)
    if number is None or state.things[number].kind not in KNIVES:
        return f"no knife: to slice the {kind} hold a {' or a '.join(KNIVES)}"
    near = list(_in_reach(world, state, kind))
    if not near:
        return _missing(world, state, kind)
    whole = [i for i in near if SLICED not in state.things[i].marks]
    if not whole:
        return f"already sliced: there is no whole {kind} here"
    cut = [_change(state, i, marks=state.things[i].marks | {SLICED}) for i in whole]
    return [s._replace(things=(*s.things, s.things[i])) for s, i in zip(cut, whole, strict=True)]


def _toggle(world: World, state: State, lamp: str) -> Result:
    if lamp not in world.reach(state.place):
        return _missing(world, state, lamp)
    return [state._replace(lit=state.lit ^ {lamp})]


_ACTS: dict[str, Callable[[World, State, str], Result]] = {
    "goto": _goto,
    "pickup": _pickup,
    "put": _put,
    "toggle": _toggle,
    "slice": _slice,
    **{verb: _treat(verb) for verb in STATIONS},
}


def execute(world: World, plan: Sequence[str]) -> tuple[int | None, str]:
    """Does a plan's actions up to the first that fails: its index and why, or (None, "")."""
    for index, action in enumerate(plan):
        if index == MOST_ACTIONS:
            return index, f"too long: a plan has at most {MOST_ACTIONS} actions"
        reason = act(world, action)
        if reason:
            return index, reason
    return None, ""
