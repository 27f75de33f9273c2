"""Mazes as values: the grid, the generator, the solver and the walker. Text is in maze_text.py.

A cell is a number, row * size + column. `Maze.doors[cell]` has bit k set if the cell is open
towards DIRECTIONS[k]; a maze of 400 cells is then 400 bytes that can be hashed and compared.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

DIRECTIONS = ("up", "down", "left", "right")
UP, DOWN, LEFT, RIGHT = range(4)
OPPOSITE = (DOWN, UP, RIGHT, LEFT)
ROW_STEP, COLUMN_STEP = (-1, 1, 0, 0), (0, 0, -1, 1)
MOVES = tuple(f"<|{name}|>" for name in DIRECTIONS)

SMALLEST, LARGEST = 3, 20
# Longest path of a level, in moves; what is longer is "beyond". MazeBench has the first three.
LEVELS = {"easy": 4, "medium": 8, "hard": 13}

HIT_A_WALL = "hit a wall"
LEFT_THE_GRID = "left the grid"
STOPPED_SHORT = "stopped short"
NO_ANSWER = "no answer"

# Every <|token|>, move or not. Linear: a match never looks beyond the next "|".
_TOKEN = re.compile(r"<\|([^|]*)\|>")


@dataclass(frozen=True, slots=True)
class Maze:
    """size x size cells; equal mazes have the same edges and the same two ends."""

    size: int
    doors: bytes
    origin: int
    target: int

    def neighbour(self, cell: int, direction: int) -> int | None:
        """The cell next to this one, whether or not a wall is between; None outside the grid."""
        row, column = divmod(cell, self.size)
        row, column = row + ROW_STEP[direction], column + COLUMN_STEP[direction]
        if 0 <= row < self.size and 0 <= column < self.size:
            return row * self.size + column
        return None

    def is_open(self, cell: int, direction: int) -> bool:
        return bool(self.doors[cell] >> direction & 1)

    def exits(self, cell: int) -> list[tuple[int, int]]:
        """(direction, neighbour) of every door; a door in the outer wall leads nowhere."""
        steps = _steps(self.size)[cell]
        return [(d, other) for d, other in steps if self.doors[cell] >> d & 1]


def maze_from_edges(
    size: int,
    edges: Iterable[tuple[tuple[int, int], tuple[int, int]]],
    origin: tuple[int, int],
    target: tuple[int, int],
) -> Maze:
    """A maze from pairs of neighbouring (row, column) cells that have a door between them."""
    doors = bytearray(size * size)
    for (row, column), (other_row, other_column) in edges:
        step = (other_row - row, other_column - column)
        direction = list(zip(ROW_STEP, COLUMN_STEP, strict=True)).index(step)
        doors[row * size + column] |= 1 << direction
        doors[other_row * size + other_column] |= 1 << OPPOSITE[direction]
    return Maze(size, bytes(doors), origin[0] * size + origin[1], target[0] * size + target[1])


# ---------------------------------------------------------------------------------------------
# Generator


@cache
def _steps(size: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each cell its (direction, neighbour) pairs, in the source's order."""
    table = []
    for cell in range(size * size):
        row, column = divmod(cell, size)
        table.append(
            tuple(
                (d, cell + ROW_STEP[d] * size + COLUMN_STEP[d])
                for d in (RIGHT, LEFT, DOWN, UP)
                if 0 <= row + ROW_STEP[d] < size and 0 <= column + COLUMN_STEP[d] < size
            )
        )
    return tuple(table)


def random_maze(size: int, rng: random.Random) -> Maze:
    """A spanning tree of the grid by depth-first search, and two distinct uniform ends.

    Only rng.random() is used: of Python's generators it alone is promised to give the same
    numbers in every version, so the held-out mazes are the same everywhere.
    """
    doors = _random_tree(size, rng)
    cells = size * size
    origin = int(rng.random() * cells)
    target = (origin + 1 + int(rng.random() * (cells - 1))) % cells
    return Maze(size, doors, origin, target)


def random_maze_of_length(size: int, shortest: int, longest: int, rng: random.Random) -> Maze:
    """Like random_maze, with a path of shortest..longest moves between the ends."""
    while True:
        maze = random_maze(size, rng)
        fitting = [cell for cell, moves in distances(maze).items() if shortest <= moves <= longest]
        if fitting:
            target = fitting[int(rng.random() * len(fitting))]
            return Maze(size, maze.doors, maze.origin, target)


def _random_tree(size: int, rng: random.Random) -> bytes:
    # As in the source, the root is never in the last row or column.
    root = int(rng.random() * (size - 1)) * size + int(rng.random() * (size - 1))
    steps = _steps(size)
    doors, seen = bytearray(size * size), bytearray(size * size)
    seen[root] = 1
    stack = [root]
    while stack:
        cell = stack.pop()
        unseen = [step for step in steps[cell] if not seen[step[1]]]
        if not unseen:
            continue
        if len(unseen) > 1:
            stack.append(cell)
        direction, neighbour = unseen[int(rng.random() * len(unseen))]
        doors[cell] |= 1 << direction
        doors[neighbour] |= 1 << OPPOSITE[direction]
        seen[neighbour] = 1
        stack.append(neighbour)
    return bytes(doors)


@cache
def all_trees(size: int) -> tuple[bytes, ...]:
    """The doors of every maze that the generator can make: 42 for 3x3, 2,046 for 4x4.

    (The 3x3 grid has 192 spanning trees; depth-first search makes only those in which every
    edge left out joins a cell with one of its forebears.) Too many to list from 5x5 on.
    """
    steps = _steps(size)
    found: set[bytes] = set()

    def grow(stack: tuple[int, ...], seen: int, doors: bytes) -> None:
        while stack and all(seen >> other & 1 for _, other in steps[stack[-1]]):
            stack = stack[:-1]
        if not stack:
            found.add(doors)
            return
        cell = stack[-1]
        for direction, other in steps[cell]:
            if not seen >> other & 1:
                more = bytearray(doors)
                more[cell] |= 1 << direction
                more[other] |= 1 << OPPOSITE[direction]
                grow((*stack, other), seen | 1 << other, bytes(more))

    for row in range(size - 1):
        for column in range(size - 1):
            root = row * size + column
            grow((root,), 1 << root, bytes(size * size))
    return tuple(sorted(found))


# ---------------------------------------------------------------------------------------------
# Solver and walker


def distances(maze: Maze) -> dict[int, int]:
    """Moves from the origin to every cell that can be reached, by breadth-first search."""
    found = {maze.origin: 0}
    queue = [maze.origin]
    for cell in queue:
        for _, other in maze.exits(cell):
            if other not in found:
                found[other] = found[cell] + 1
                queue.append(other)
    return found


def solve(maze: Maze) -> list[int] | None:
    """The directions of a shortest path, by breadth-first search; None if there is no way."""
    came_by: dict[int, tuple[int, int]] = {maze.origin: (-1, -1)}
    queue = [maze.origin]
    for cell in queue:
        if cell == maze.target:
            break
        for direction, other in maze.exits(cell):
            if other not in came_by:
                came_by[other] = (direction, cell)
                queue.append(other)
    if maze.target not in came_by:
        return None
    path = []
    cell = maze.target
    while cell != maze.origin:
        direction, cell = came_by[cell]
        path.append(direction)
    return path[::-1]


def moves_text(directions: Iterable[int]) -> str:
    """[UP, LEFT] -> "<|up|><|left|>"."""
    return "".join(MOVES[d] for d in directions)


def moves_in(answer: str) -> list[int]:
    """The directions of the move tokens in a text; everything else is passed over."""
    names = _TOKEN.findall(answer)
    return [DIRECTIONS.index(name) for name in names if name in DIRECTIONS]


def level(moves: int) -> str:
    """The row of the evaluation table for a path of so many moves; 14 and more are "beyond"."""
    return next((name for name, longest in LEVELS.items() if moves <= longest), "beyond")


@dataclass(frozen=True)
class Walk:
    """What became of an answer's moves.

    cells: the origin and then every cell entered. reason: why it failed, "" if it is solved.
    failed_move: the place of the failing move among all <|tokens|> of the answer, from 0.
    failed_direction: where that move wanted to go.
    """

    cells: tuple[int, ...]
    reason: str
    failed_move: int | None = None
    failed_direction: int | None = None

    @property
    def solved(self) -> bool:
        return not self.reason


def walk(maze: Maze, answer: str) -> Walk:
    """Walk the moves of an answer; solved if it ends on the target, whatever the way.

    A token that is no move does nothing; an answer without any move is no answer. The wall is
    read from the cell that is left, so that a wall drawn on one side only stops one way.
    """
    cells = [maze.origin]
    moved = False
    for place, name in enumerate(_TOKEN.findall(answer)):
        if name not in DIRECTIONS:
            continue
        moved = True
        direction = DIRECTIONS.index(name)
        neighbour = maze.neighbour(cells[-1], direction)
        if not maze.is_open(cells[-1], direction):
            return Walk(tuple(cells), HIT_A_WALL, place, direction)
        if neighbour is None:
            return Walk(tuple(cells), LEFT_THE_GRID, place, direction)
        cells.append(neighbour)
    if not moved:
        return Walk(tuple(cells), NO_ANSWER)
    return Walk(tuple(cells), "" if cells[-1] == maze.target else STOPPED_SHORT)
