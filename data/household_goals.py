"""What a household should be like in the end: ALFRED's 7 task types, and the judging of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data.household_world import (
    CLEAN,
    COLD,
    HAND,
    HOT,
    SLICED,
    State,
    Thing,
    World,
    execute,
)


@dataclass(frozen=True)
class Goal:
    """What must hold at the end, by ALFRED's 7 task types; "" for what a type does not need.

    target: the kind of thing. receptacle: the place it must end at. vessel: the thing it must lie
    in. lamp: the lamp under which it must be held. sliced: only sliced things count as the target.
    """

    task_type: str
    target: str
    receptacle: str = ""
    vessel: str = ""
    lamp: str = ""
    sliced: bool = False

    def conditions(self, world: World, state: State) -> tuple[bool, ...]:
        """One truth value a condition, counted as ALFRED's own evaluation counts them: where two
        things are asked of one object, each of them and both together."""
        kinds = [t for t in state.things if t.kind == self.target]
        targets = [t for t in kinds if (SLICED in t.marks) == self.sliced]
        met = tuple(_CONDITIONS[self.task_type](self, world, state, targets))
        return (*met, bool(targets)) if self.sliced else met


def _placed(goal: Goal, world: World, state: State, targets: list[Thing], times: int = 1):
    there = sum(_is_at(state, t, goal.receptacle) for t in targets)
    return [there > i for i in range(times)]


def _is_at(state: State, thing: Thing, receptacle: str) -> bool:
    """Put down there; what is held is nowhere."""
    outer = thing
    while isinstance(outer.where, int):
        outer = state.things[outer.where]
    return outer.where == receptacle


def _both(goal: Goal, mark: str, state: State, targets: list[Thing]):
    placed = [_is_at(state, t, goal.receptacle) for t in targets]
    marked = [mark in t.marks for t in targets]
    return [any(placed), any(marked), any(p and m for p, m in zip(placed, marked, strict=True))]


def _in_vessel(goal: Goal, world: World, state: State, targets: list[Thing]):
    vessels = [t for t in state.things if t.kind == goal.vessel]
    inside = [state.things[t.where] for t in targets if isinstance(t.where, int)]
    inside = [t for t in inside if t.kind == goal.vessel]
    return [
        any(_is_at(state, t, goal.receptacle) for t in vessels),
        bool(inside),
        any(_is_at(state, t, goal.receptacle) for t in inside),
    ]


def _under_lamp(goal: Goal, world: World, state: State, targets: list[Thing]):
    """Held where the lamp is in reach, and the lamp is on."""
    in_hand = any(t.where == HAND for t in targets)
    return [in_hand and goal.lamp in world.reach(state.place), goal.lamp in state.lit]


_CONDITIONS = {
    "pick_and_place_simple": _placed,
    "pick_two_obj_and_place": lambda g, w, s, targets: _placed(g, w, s, targets, 2),
    "look_at_obj_in_light": _under_lamp,
    "pick_clean_then_place_in_recep": lambda g, w, s, targets: _both(g, CLEAN, s, targets),
    "pick_heat_then_place_in_recep": lambda g, w, s, targets: _both(g, HOT, s, targets),
    "pick_cool_then_place_in_recep": lambda g, w, s, targets: _both(g, COLD, s, targets),
    "pick_and_place_with_movable_recep": _in_vessel,
}
TASK_TYPES = tuple(_CONDITIONS)


@dataclass(frozen=True)
class Outcome:
    """failed_at: the index of the action that could not be done, None if all were. reason: why,
    or that the goal is not reached; "" for a success."""

    success: bool
    conditions_met: int
    conditions: int
    failed_at: int | None
    reason: str


def run_plan(world: World, goal: Goal, plan: Sequence[str]) -> Outcome:
    """Executes a plan in a copy of the world. Success: all of it can be done, and at its end every
    condition of the goal holds."""
    world = world.copy()
    failed_at, reason = execute(world, plan)
    met = max((goal.conditions(world, s) for s in world.states), key=sum)
    success = failed_at is None and all(met)
    if not (success or reason):
        reason = f"goal not reached: {sum(met)} of its {len(met)} conditions hold at the end"
    return Outcome(success, sum(met), len(met), failed_at, reason)
