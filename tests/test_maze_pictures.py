"""Pictures show what they claim: the way, where it failed, who passed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from PIL import Image, ImageColor

from data.maze_grid import MOVES, Maze, moves_text, random_maze, solve, walk
from data.maze_pictures import (
    FAILED_COLOUR,
    OK_COLOUR,
    ORIGIN_COLOUR,
    TARGET_COLOUR,
    contact_sheet,
    draw_evaluated,
    draw_maze,
    main,
    save_contact_sheet,
    save_maze,
)
from data.maze_text import render
from grpo.errors import UserError, exit_status


def a_maze(size: int = 5, fits: Callable[[Maze], bool] = lambda maze: True) -> Maze:
    rng = random.Random(1)
    while True:
        maze = random_maze(size, rng)
        if fits(maze):
            return maze


def share(image: Image.Image, colour: str) -> float:
    """The part of the picture that is within a hair of a colour."""
    wanted = ImageColor.getrgb(colour)
    counts = image.convert("RGB").getcolors(maxcolors=image.width * image.height)
    near = sum(n for n, c in counts if all(abs(a - b) < 12 for a, b in zip(c, wanted, strict=True)))
    return near / (image.width * image.height)


@pytest.mark.parametrize("size", [3, 5, 20])
def test_a_maze_is_a_square_with_both_ends(size):
    image = draw_maze(a_maze(size), pixels=300)
    assert image.width == image.height and abs(image.width - 300) <= 2
    assert share(image, ORIGIN_COLOUR) > 0 and share(image, TARGET_COLOUR) > 0
    assert share(image, OK_COLOUR) == share(image, FAILED_COLOUR) == 0


def test_a_solved_way_is_green_and_a_failed_one_red():
    maze = a_maze(fits=lambda m: len(solve(m)) > 6)
    path = moves_text(solve(maze))
    solved = draw_maze(maze, walk(maze, path))
    assert share(solved, OK_COLOUR) > 0.01 and share(solved, FAILED_COLOUR) == 0
    short = draw_maze(maze, walk(maze, path[: path.index("><") + 1]))
    assert share(short, FAILED_COLOUR) > 0 and share(short, OK_COLOUR) == 0


@pytest.mark.parametrize("direction", range(4))
def test_the_failing_move_is_marked_on_the_wall_it_hit(direction):
    """The disc is on that side of the origin's cell and on no other."""
    middle = 12
    maze = a_maze(fits=lambda m: m.origin == middle and not m.is_open(middle, direction)
                  and m.target not in (7, 17, 11, 13))  # fmt: skip
    image = draw_maze(maze, walk(maze, MOVES[direction]), pixels=560)
    cell = image.width / 5.6
    red = ImageColor.getrgb(FAILED_COLOUR)
    for side, (x, y) in enumerate([(0, -0.5), (0, 0.5), (-0.5, 0), (0.5, 0)]):
        # the disc beside the white cross in it, clear of the way that leads there
        aside = (0.2, 0) if y else (0, 0.2)
        place = [image.width / 2 + cell * (a + b) for a, b in zip((x, y), aside, strict=True)]
        pixel = image.getpixel((round(place[0]), round(place[1])))
        assert (pixel == red) == (side == direction)


def test_a_sheet_has_a_card_for_every_maze():
    mazes = [a_maze(fits=lambda m, n=n: len(solve(m)) == n) for n in range(1, 8)]
    good = [(maze, walk(maze, moves_text(solve(maze)))) for maze in mazes]
    bad = [(maze, walk(maze, "")) for maze in mazes]
    assert share(contact_sheet(good), FAILED_COLOUR) == 0 < share(contact_sheet(good), OK_COLOUR)
    assert share(contact_sheet(bad), OK_COLOUR) == 0 < share(contact_sheet(bad), FAILED_COLOUR)
    one_row, two_rows = (contact_sheet(good, columns=n) for n in (7, 4))
    assert two_rows.height > one_row.height and two_rows.width < one_row.width


def test_the_evaluation_may_know_a_better_reason():
    maze = a_maze()
    items = [(maze, walk(maze, moves_text(solve(maze))))]
    assert share(contact_sheet(items, reasons=["ran out of tokens"]), OK_COLOUR) < 0.05
    with pytest.raises(ValueError):
        contact_sheet(items, reasons=[])


def test_pictures_are_written_as_png(tmp_path):
    maze = a_maze()
    save_maze(tmp_path / "maze.png", maze)
    save_contact_sheet(tmp_path / "sheet.png", [(maze, walk(maze, ""))] * 3, columns=2, pixels=60)
    for name in ("maze.png", "sheet.png"):
        with Image.open(tmp_path / name) as image:
            assert image.format == "PNG"
    assert contact_sheet([]).width > 0, "an empty evaluation is an empty sheet"


def test_an_evaluated_answer_is_drawn_and_its_steps_are_played_back(tmp_path):
    maze = a_maze()
    answers = tmp_path / "after_grpo.jsonl"
    row = {"prompt": [{"role": "user", "content": "Find the way.\n\n" + render(maze)}]}
    path = moves_text(solve(maze))
    answers.write_text(json.dumps({**row, "completion": path}) + "\n", "utf-8")
    draw_evaluated(answers, 0, tmp_path / "maze.png")
    draw_evaluated(answers, 0, tmp_path / "maze.gif")
    assert Image.open(tmp_path / "maze.png").getpixel((2, 2)) == (255, 255, 255)
    assert Image.open(tmp_path / "maze.gif").n_frames == len(solve(maze)) + 1
    with pytest.raises(UserError, match="no evaluated answer 1"):
        draw_evaluated(answers, 1, tmp_path / "none.png")


def test_the_command_says_what_is_missing_in_one_line(capsys):
    assert exit_status(main, ["answers.jsonl", "seven", "maze.png"]) == 2
    assert exit_status(main, ["answers.jsonl"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "NUMBER" in first and "seven" in first and "NUMBER, OUT.png" in second
