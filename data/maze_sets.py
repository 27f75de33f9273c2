"""Which mazes are held out and which are trained on; the two never meet.

Held-out mazes depend on the grid's size alone, so that all runs are measured on the same ones.
Training mazes are compared with them by content (edges and both ends), and with one another.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import overload

from data.maze_grid import (
    LEVELS,
    Maze,
    all_trees,
    random_maze,
    random_maze_of_length,
)

# MazeBench's share of the levels; a 3x3 maze has no path that is hard.
BENCH = {"easy": 50, "medium": 40, "hard": 10}
SMALLEST_BENCH = 4

# 3x3 has 42 trees x 72 ends = 3,024 mazes, 4x4 has 491,040: these are drawn without replacement.
LISTED_UP_TO = 4
# Among 200,000 random 5x5 mazes some 140 are repeats, among 6x6 ones 0.2, beyond that none.
REPEATS_UP_TO = 6


def bench_mazes(size: int) -> list[Maze]:
    """100 different mazes, 50 / 40 / 10 easy / medium / hard, in a mixed order."""
    rng = random.Random(f"bench/{size}")
    found: dict[Maze, None] = {}
    shortest = 1
    for name, longest in LEVELS.items():
        until = len(found) + BENCH[name]
        while len(found) < until:
            found[random_maze_of_length(size, shortest, longest, rng)] = None
        shortest = longest + 1
    return sorted(found, key=lambda maze: rng.random())


def held_out_mazes(size: int, count: int) -> list[Maze]:
    """So many different mazes, as the generator makes them."""
    rng = random.Random(f"held-out/{size}")
    found: dict[Maze, None] = {}
    while len(found) < count:
        found[random_maze(size, rng)] = None
    return list(found)


def training_mazes(
    size: int,
    count: int,
    stream: str,
    held_out: Collection[Maze],
    accept: Callable[[Maze], bool] = lambda maze: True,
) -> Sequence[Maze]:
    """`count` different mazes that are not held out, the same for the same stream and size.

    Small grids have fewer mazes than one may ask for; then there are as many as there are.
    """
    if size > LISTED_UP_TO:
        return RandomMazes(size, count, stream, held_out, accept)
    cells, trees = size * size, all_trees(size)
    order = list(range(len(trees) * cells * (cells - 1)))
    random.Random(f"{stream}/{size}").shuffle(order)
    held_out, mazes = frozenset(held_out), []
    for number in order:
        if len(mazes) == count:
            break
        rest, shift = divmod(number, cells - 1)
        tree, origin = divmod(rest, cells)
        maze = Maze(size, trees[tree], origin, (origin + 1 + shift) % cells)
        if maze not in held_out and accept(maze):
            mazes.append(maze)
    return mazes


class RandomMazes(Sequence[Maze]):
    """Mazes of which the i-th is made from (stream, i) each time it is asked for.

    Maze i is the first of a fixed row of candidates (i, 0), (i, 1), ... that is accepted, is not
    held out, and is none of the mazes before it. The last takes one pass over all, made at the
    first access and only for grids small enough for repeats: 0.05 ms a maze.
    """

    def __init__(
        self,
        size: int,
        count: int,
        stream: str,
        held_out: Collection[Maze],
        accept: Callable[[Maze], bool],
    ):
        self.size, self.count, self.stream = size, count, stream
        self.held_out, self.accept = frozenset(held_out), accept
        self._candidate: array | None = None  # [count], which candidate each maze is

    def __len__(self) -> int:
        return self.count

    @overload
    def __getitem__(self, index: int) -> Maze: ...
    @overload
    def __getitem__(self, index: slice) -> list[Maze]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.count))]
        index = range(self.count)[index]  # raises IndexError, understands negative numbers
        if self.size > REPEATS_UP_TO:
            return self._first(index, self.held_out)[1]
        if self._candidate is None:
            self._candidate = self._different()
        return self._make(index, self._candidate[index])

    def _make(self, index: int, candidate: int) -> Maze:
        return random_maze(self.size, random.Random(f"{self.stream}/{index}/{candidate}"))

    def _first(self, index: int, refused: Collection[Maze]) -> tuple[int, Maze]:
        candidate = 0
        while True:
            maze = self._make(index, candidate)
            if maze not in refused and self.accept(maze):
                return candidate, maze
            candidate += 1

    def _different(self) -> array:
        refused, chosen = set(self.held_out), array("H")
        for index in range(self.count):
            candidate, maze = self._first(index, refused)
            refused.add(maze)
            chosen.append(candidate)
        return chosen
