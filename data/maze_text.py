"""Mazes as text: tokens, the maze itself, targets for supervised fine-tuning, files of mazes."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from data.jsonl import read_jsonl, text_field
from data.maze_grid import (
    DIRECTIONS,
    DOWN,
    LARGEST,
    LEFT,
    MOVES,
    RIGHT,
    SMALLEST,
    UP,
    Maze,
    moves_text,
    solve,
)
from grpo.errors import UserError

BLANK, ORIGIN, TARGET = "<|blank|>", "<|origin|>", "<|target|>"
LONGEST_WRONG_BRANCH = 3  # moves, in reset data
DEAD_END, WRONG_WAY, RESET = "This is a dead end.", "This is the wrong way.", "RESET"


def wall_token(doors: int) -> str:
    """The wall token of a cell with these door bits: closed sides in the order of DIRECTIONS.

    >>> wall_token(1 << DOWN | 1 << RIGHT)
    '<|up_left_wall|>'
    """
    closed = [name for k, name in enumerate(DIRECTIONS) if not doors >> k & 1]
    name = {0: "no", 4: "all"}.get(len(closed), "_".join(closed))
    return f"<|{name}_wall|>"


WALL_TOKENS = tuple(wall_token(doors) for doors in range(16))
_DOORS = {token: doors for doors, token in enumerate(WALL_TOKENS)}


@cache
def coordinate_tokens(size: int) -> tuple[str, ...]:
    """<|row-column|> of every cell, row by row."""
    return tuple(f"<|{row}-{column}|>" for row in range(size) for column in range(size))


def maze_tokens(size: int) -> list[str]:
    """Every token of the task, one string each: 48 for 5x5."""
    return [*coordinate_tokens(size), *MOVES, BLANK, ORIGIN, TARGET, *WALL_TOKENS]


def render(maze: Maze, walker: int | None = None, direction: int | None = None) -> str:
    """The maze as text; with a walker, as it stands there and makes a move.

    Markers by precedence: the origin unless the walker is on it, the target, the walker's move.
    """
    return _with_markers(maze, _bare_cells(maze), walker, direction)


def _bare_cells(maze: Maze) -> list[str]:
    coordinates = coordinate_tokens(maze.size)
    return [c + WALL_TOKENS[d] for c, d in zip(coordinates, maze.doors, strict=True)]


def _with_markers(maze: Maze, bare: list[str], walker: int | None, direction: int | None) -> str:
    markers = {maze.target: TARGET}
    if walker is not None and direction is not None:
        markers.setdefault(walker, MOVES[direction])
    if walker != maze.origin:
        markers[maze.origin] = ORIGIN
    cells = [cell + BLANK for cell in bare]
    for cell, marker in markers.items():
        cells[cell] = bare[cell] + marker
    rows = range(0, len(cells), maze.size)
    return "\n".join("".join(cells[start : start + maze.size]) for start in rows)


# ---------------------------------------------------------------------------------------------
# Reading

_CELL = re.compile(r"(<\|\d+-\d+\|>)(<\|\w+\|>)(<\|\w+\|>)")


def parse(text: str) -> Maze:
    """The maze that a text shows; parse(render(maze)) == maze.

    Walls may differ on the two sides of an edge. Raises UserError that names the row, the cell
    or the marker that is missing or wrong.
    """
    lines = text.strip().splitlines()
    rows = [_read_row(line, row) for row, line in enumerate(lines)]
    size = len(rows[0]) if rows else 0
    if not SMALLEST <= size <= LARGEST:
        raise UserError(
            f"row 0 of the maze has {size} cells; mazes have {SMALLEST} to {LARGEST} a row"
        )
    if len(rows) < size:
        raise UserError(f"row {len(rows)} of the maze is missing: {len(rows)} rows of {size} cells")
    if len(rows) > size:
        raise UserError(f"the maze has {len(rows)} rows but only {size} cells a row")
    for row, cells in enumerate(rows):
        if len(cells) != size:
            raise UserError(f"row {row} of the maze has {len(cells)} cells, row 0 has {size}")
    return _maze_of(size, [cell for cells in rows for cell in cells])


def _read_row(line: str, row: int) -> list[tuple[str, str, str]]:
    cells, position = [], 0
    line = line.strip()
    while position < len(line):
        cell = _CELL.match(line, position)
        if cell is None:
            raise UserError(
                f"row {row} of the maze: '{line[position : position + 24]}' is not a cell; a cell "
                "is coordinate, walls and marker, as <|0-0|><|up_left_wall|><|blank|>"
            )
        cells.append(cell.groups())
        position = cell.end()
    return cells


def _maze_of(size: int, cells: list[tuple[str, str, str]]) -> Maze:
    doors = bytearray()
    found: dict[str, int] = {}
    expected = coordinate_tokens(size)
    for number, (coordinate, walls, marker) in enumerate(cells):
        if coordinate != expected[number]:
            raise UserError(f"the maze has {coordinate} where {expected[number]} belongs")
        if walls not in _DOORS:
            raise UserError(f"cell {coordinate} of the maze: {walls} is not one of the 16 walls")
        if marker not in (BLANK, ORIGIN, TARGET):
            raise UserError(
                f"cell {coordinate} of the maze: {marker} is not a marker of a maze; "
                f"it is one of {BLANK}, {ORIGIN}, {TARGET}"
            )
        if marker in found and marker != BLANK:
            raise UserError(f"the maze has {marker} at {coordinate} and at another cell")
        found[marker] = number
        doors.append(_DOORS[walls])
    for marker in (ORIGIN, TARGET):
        if marker not in found:
            raise UserError(f"the maze has no {marker}")
    return Maze(size, bytes(doors), found[ORIGIN], found[TARGET])


def read_mazes(path: str | Path, size: int) -> list[Maze]:
    """The mazes of a JSONL file, {"maze": text} a line; blank lines and a BOM are passed over.

    Raises UserError with the file and the line for anything that is not a maze of this size with
    a way from origin to target.
    """
    return read_jsonl(path, lambda record: _checked_maze(record, size), '{"maze": text}')


def _checked_maze(record: dict[str, Any], size: int) -> Maze:
    maze = parse(text_field(record, "maze"))
    if maze.size != size:
        raise UserError(
            f"this maze is {maze.size}x{maze.size}; use --maze-size {maze.size}, or leave it out"
        )
    if solve(maze) is None:
        raise UserError("this maze has no way from the origin to the target")
    return maze


# ---------------------------------------------------------------------------------------------
# Targets for supervised fine-tuning


def with_thinking(thought: str, answer: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n{answer}"


def steps_text(maze: Maze, directions: Iterable[int]) -> str:
    """A line "Step k: Go up", then the maze as the walker makes that move; blank lines between."""
    bare, cell, steps = _bare_cells(maze), maze.origin, []
    for number, direction in enumerate(directions, 1):
        picture = _with_markers(maze, bare, cell, direction)
        steps.append(f"Step {number}: Go {DIRECTIONS[direction]}\n{picture}")
        cell = maze.neighbour(cell, direction)
    return "\n\n".join(steps)


def direct_target(maze: Maze) -> str:
    """The moves and nothing else."""
    return moves_text(solve(maze))


def visual_target(maze: Maze) -> str:
    """Visual thinking: the maze is drawn at every step, then the moves are given."""
    path = solve(maze)
    return with_thinking(steps_text(maze, path), moves_text(path))


def can_reset(maze: Maze) -> bool:
    """Whether reset data can be made: a tree whose origin has one or two walls.

    With three walls there is no wrong branch; with none the source makes no such data. In a maze
    with loops a wrong branch might be a right one.
    """
    exits = maze.doors[maze.origin].bit_count()
    tree = sum(doors.bit_count() for doors in maze.doors) == 2 * (maze.size**2 - 1)
    return tree and exits in (2, 3)


def reset_target(maze: Maze) -> str:
    """Wrong steps, a line that says so, RESET, then the right walk from step 1.

    An origin with two walls has one wrong branch: up to three moves of it are made, at a fork
    either way. An origin with one wall has two: of each the first move is made, one after the
    other. What is drawn at random depends on the maze alone.
    """
    path = solve(maze)
    rng = random.Random(render(maze))
    wrong = [(d, cell) for d, cell in maze.exits(maze.origin) if d != path[0]]
    thought = []
    if len(wrong) == 1:
        thought.append(_wrong_branch(maze, *wrong[0], LONGEST_WRONG_BRANCH, rng))
    else:
        if rng.random() < 0.5:
            wrong.reverse()
        thought += [_wrong_branch(maze, direction, cell, 1, rng) for direction, cell in wrong]
    thought.append(steps_text(maze, path))
    return with_thinking("\n\n".join(thought), moves_text(path))


def _wrong_branch(maze: Maze, direction: int, cell: int, longest: int, rng: random.Random) -> str:
    directions, came_from = [direction], maze.origin
    while len(directions) < longest:
        onward = [(d, other) for d, other in maze.exits(cell) if other != came_from]
        if not onward:
            break
        came_from = cell
        direction, cell = onward[int(rng.random() * len(onward))]
        directions.append(direction)
    verdict = DEAD_END if maze.doors[cell].bit_count() == 1 else WRONG_WAY
    return f"{steps_text(maze, directions)}\n\n{verdict}\n{RESET}"


# ---------------------------------------------------------------------------------------------
# The vocabulary of a model made from scratch


def cell_tokens(size: int, markers: Iterable[str]) -> list[str]:
    """Whole cells as one string each: coordinate, walls and marker.

    A model made from scratch reads a cell as one token instead of three, and attention over a
    sequence a third as long costs far less. A cell at the border always has its outer wall, so
    5x5 has 256 of the 400 pairs of cell and walls.
    """
    tokens = []
    markers = tuple(markers)
    for cell, coordinate in enumerate(coordinate_tokens(size)):
        row, column = divmod(cell, size)
        outer = (row == 0) << UP | (row == size - 1) << DOWN
        outer |= (column == 0) << LEFT | (column == size - 1) << RIGHT
        walls = [WALL_TOKENS[doors] for doors in range(16) if not doors & outer]
        tokens += [coordinate + wall + marker for wall in walls for marker in markers]
    return tokens


def thinking_tokens(reset: bool) -> list[str]:
    """The strings between the mazes of a visual target, so that the longest match is unique."""
    words = ["<think>", "</think>", "\n\n", "Step ", ": Go ", *DIRECTIONS, *"0123456789"]
    return [*words, DEAD_END, WRONG_WAY, RESET] if reset else words
