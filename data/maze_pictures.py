"""Pictures of mazes: one maze with the way that an answer took, and a sheet of evaluated ones.

    python -m data.maze_pictures runs/…/evaluations/after_grpo.jsonl 7 maze.png

draws answer 7 of an evaluation (they count from 0); a name that ends in .gif plays its steps back.

Everything is drawn at SHARPNESS times its size and shrunk, since PIL's lines have no soft edges.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from data.maze_grid import COLUMN_STEP, DOWN, LEFT, RIGHT, ROW_STEP, UP, Maze, Walk
from data.maze_grid import walk as walk_answer
from data.maze_text import parse
from grpo.errors import UserError, exit_status
from grpo.flags import FlagParser
from rewards.maze import CLOSE, answer_text

SHARPNESS = 4
MARGIN = 0.3  # cells around the maze: room for a cross on the outer wall
FRAME_MS = 400
INK, PAPER, FLOOR = "#1f2937", "#ffffff", "#f3f4f6"
ORIGIN_COLOUR, TARGET_COLOUR = "#2563eb", "#d97706"
OK_COLOUR, FAILED_COLOUR = "#15803d", "#dc2626"

Point = tuple[float, float]  # x, y in pixels of the large picture

CARD_GAP, CARD_MARGIN, CAPTION_HEIGHT, HEADER_HEIGHT = 14, 6, 26, 44


def draw_maze(maze: Maze, walk: Walk | None = None, pixels: int = 480) -> Image.Image:
    """A maze as a square RGB picture of about so many pixels a side.

    Blue disc: origin; orange ring: target. The way walked is green if it ends on the target and
    red if not; the cross is the move that failed, on the wall (or the edge of the grid) it hit.
    """
    cells = maze.size + 2 * MARGIN
    side = max(4, round(pixels * SHARPNESS / cells))  # of one cell
    total = round(side * cells)
    image = Image.new("RGB", (total, total), PAPER)
    draw = ImageDraw.Draw(image)
    first = side * MARGIN
    draw.rectangle((first, first, total - first, total - first), fill=FLOOR)
    _draw_ends(draw, maze, side)
    if walk is not None:
        _draw_way(draw, maze, walk, side)
    _draw_walls(draw, maze, side)
    if walk is not None and walk.failed_direction is not None:
        _draw_cross(draw, maze, walk, side)
    shrunk = round(total / SHARPNESS)
    return image.resize((shrunk, shrunk), Image.Resampling.LANCZOS)


def save_maze(path: str | Path, maze: Maze, walk: Walk | None = None, pixels: int = 480) -> None:
    """Write draw_maze as a PNG; to a .gif, one picture a move, played in a loop."""
    if Path(path).suffix != ".gif" or walk is None:
        draw_maze(maze, walk, pixels).save(path)
        return
    so_far = [
        replace(walk, cells=walk.cells[:steps], failed_direction=None)
        for steps in range(1, len(walk.cells))
    ]
    frames = [draw_maze(maze, step, pixels) for step in [*so_far, walk]]
    pauses = [FRAME_MS] * len(so_far) + [4 * FRAME_MS]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=pauses, loop=0)


def draw_evaluated(answers: str | Path, index: int, path: str | Path) -> None:
    """Draw one line of an evaluations/*.jsonl. Raises UserError if there is no such line."""
    try:
        lines = Path(answers).read_text("utf-8").splitlines()
        row = json.loads(lines[index])
        prompt, text = row["prompt"][-1]["content"], row["completion"]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"{answers}: no evaluated answer {index} to draw ({error})") from error
    maze = parse(prompt[prompt.find("<|0-0|>") :])
    save_maze(path, maze, walk_answer(maze, answer_text(text, thinks=CLOSE in text)))


def _centre(maze: Maze, cell: int, side: int) -> Point:
    row, column = divmod(cell, maze.size)
    return (column + 0.5 + MARGIN) * side, (row + 0.5 + MARGIN) * side


def _disc(draw: ImageDraw.ImageDraw, centre: Point, radius: float, colour: str) -> None:
    x, y = centre
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)


def _bar(draw: ImageDraw.ImageDraw, start: Point, end: Point, width: float, colour: str) -> None:
    """A straight line along a row or a column, with ends that fill the corner to the next one."""
    (left, right), (top, bottom) = (sorted(pair) for pair in zip(start, end, strict=True))
    half = width / 2
    draw.rectangle((left - half, top - half, right + half, bottom + half), fill=colour)


def _draw_ends(draw: ImageDraw.ImageDraw, maze: Maze, side: int) -> None:
    target = _centre(maze, maze.target, side)
    for part, colour in ((0.33, TARGET_COLOUR), (0.23, FLOOR), (0.12, TARGET_COLOUR)):
        _disc(draw, target, part * side, colour)
    _disc(draw, _centre(maze, maze.origin, side), 0.28 * side, ORIGIN_COLOUR)


def _draw_walls(draw: ImageDraw.ImageDraw, maze: Maze, side: int) -> None:
    width = max(2, side // 12)
    for cell in range(maze.size**2):
        x, y = _centre(maze, cell, side)
        half = side / 2
        corners = {
            UP: ((x - half, y - half), (x + half, y - half)),
            DOWN: ((x - half, y + half), (x + half, y + half)),
            LEFT: ((x - half, y - half), (x - half, y + half)),
            RIGHT: ((x + half, y - half), (x + half, y + half)),
        }
        for direction, (start, end) in corners.items():
            if not maze.is_open(cell, direction):
                _bar(draw, start, end, width, INK)


def _draw_way(draw: ImageDraw.ImageDraw, maze: Maze, walk: Walk, side: int) -> None:
    """The line through the cells, ending in an arrowhead, or at the wall that stopped it."""
    colour = OK_COLOUR if walk.solved else FAILED_COLOUR
    width = max(2, side // 9)
    points = [_centre(maze, cell, side) for cell in walk.cells]
    if walk.failed_direction is not None:
        points.append(_hit_point(maze, walk, side))
    for start, end in zip(points, points[1:], strict=False):
        _bar(draw, start, end, width, colour)
    if len(points) > 1 and walk.failed_direction is None:
        _draw_head(draw, points[-2], points[-1], 0.22 * side, colour)
    _disc(draw, points[0], 0.14 * side, PAPER)


def _draw_head(
    draw: ImageDraw.ImageDraw, start: Point, end: Point, length: float, colour: str
) -> None:
    """An arrowhead whose middle is at `end`; start and end are in one row or column."""
    along_x = (end[0] > start[0]) - (end[0] < start[0])
    along_y = (end[1] > start[1]) - (end[1] < start[1])
    x, y = end[0] - along_x * length / 2, end[1] - along_y * length / 2
    across_x, across_y = -along_y * length, along_x * length
    tip = (x + along_x * 1.5 * length, y + along_y * 1.5 * length)
    draw.polygon(((x + across_x, y + across_y), tip, (x - across_x, y - across_y)), fill=colour)


def _hit_point(maze: Maze, walk: Walk, side: int) -> Point:
    x, y = _centre(maze, walk.cells[-1], side)
    direction = walk.failed_direction
    return x + COLUMN_STEP[direction] * side / 2, y + ROW_STEP[direction] * side / 2


def _draw_cross(draw: ImageDraw.ImageDraw, maze: Maze, walk: Walk, side: int) -> None:
    x, y = _hit_point(maze, walk, side)
    arm, width = side * 0.15, max(2, side // 10)
    _disc(draw, (x, y), 0.28 * side, PAPER)
    _disc(draw, (x, y), 0.25 * side, FAILED_COLOUR)
    draw.line((x - arm, y - arm, x + arm, y + arm), fill=PAPER, width=width)
    draw.line((x - arm, y + arm, x + arm, y - arm), fill=PAPER, width=width)


# ---------------------------------------------------------------------------------------------
# The contact sheet


def contact_sheet(
    items: Sequence[tuple[Maze, Walk]],
    columns: int = 10,
    pixels: int = 120,
    reasons: Sequence[str] | None = None,
) -> Image.Image:
    """Evaluated mazes side by side, each in a frame: green with its moves, or red with why not.

    pixels: of one maze. reasons: [len(items)], what to print under each failed maze in place of
    the walk's own reason (the evaluation knows of answers that ran out of tokens); "" = solved.
    """
    reasons = [walk.reason for _, walk in items] if reasons is None else reasons
    columns = max(1, min(columns, len(items)))
    rows = -(-len(items) // columns)
    width, height = pixels + 2 * CARD_MARGIN, pixels + CARD_MARGIN + CAPTION_HEIGHT
    sheet = Image.new(
        "RGB",
        (
            columns * (width + CARD_GAP) + CARD_GAP,
            rows * (height + CARD_GAP) + HEADER_HEIGHT + CARD_GAP,
        ),
        PAPER,
    )
    solved = sum(not reason for reason in reasons)
    _write(sheet, f"{solved} of {len(items)} solved", (CARD_GAP, HEADER_HEIGHT / 2), 20, INK, "lm")
    for number, ((maze, walk), reason) in enumerate(zip(items, reasons, strict=True)):
        row, column = divmod(number, columns)
        card = _card(maze, walk, reason, (width, height), pixels)
        left = CARD_GAP + column * (width + CARD_GAP)
        sheet.paste(card, (left, HEADER_HEIGHT + row * (height + CARD_GAP)))
    return sheet


def save_contact_sheet(path: str | Path, items: Sequence[tuple[Maze, Walk]], **options) -> None:
    """Write contact_sheet as a PNG."""
    contact_sheet(items, **options).save(path, "PNG")


def _card(maze: Maze, walk: Walk, reason: str, size: tuple[int, int], pixels: int) -> Image.Image:
    colour = FAILED_COLOUR if reason else OK_COLOUR
    large = Image.new("RGB", (size[0] * SHARPNESS, size[1] * SHARPNESS), PAPER)
    box = (0, 0, large.width - 1, large.height - 1)
    corner = 8 * SHARPNESS
    draw = ImageDraw.Draw(large)
    draw.rounded_rectangle(box, corner, fill=colour)
    border = 2 * SHARPNESS
    floor = large.height - CAPTION_HEIGHT * SHARPNESS
    draw.rounded_rectangle(
        (border, border, large.width - 1 - border, floor), corner - border, fill=PAPER
    )
    card = large.resize(size, Image.Resampling.LANCZOS)
    picture = draw_maze(maze, walk, pixels)
    left = (size[0] - picture.width) // 2
    card.paste(picture, (left, (size[1] - CAPTION_HEIGHT - picture.height) // 2 + 1))
    moves = len(walk.cells) - 1
    text = reason or f"{moves} move{'s' if moves != 1 else ''}"
    _write(card, text, (size[0] / 2, size[1] - CAPTION_HEIGHT / 2), 13, PAPER, "mm")
    return card


def _write(
    image: Image.Image,
    text: str,
    place: tuple[float, float],
    height: int,
    colour: str,
    anchor: str,
) -> None:
    """Text in the largest size up to `height` that leaves a margin on both sides."""
    room = image.width - 8
    font = ImageFont.load_default(height)
    while height > 7 and font.getlength(text) > room:
        height -= 1
        font = ImageFont.load_default(height)
    ImageDraw.Draw(image).text(place, text, fill=colour, font=font, anchor=anchor)


def main(argv: Sequence[str]) -> int:
    parser = FlagParser(
        prog="python -m data.maze_pictures", description="Draw one evaluated answer."
    )
    parser.add_argument("answers", metavar="ANSWERS.jsonl", help="of a run's evaluations/")
    parser.add_argument("number", type=int, metavar="NUMBER", help="of the answer, from 0")
    parser.add_argument("picture", metavar="OUT.png", help="a .gif plays the steps back")
    given = parser.parse_args(argv)
    draw_evaluated(given.answers, given.number, given.picture)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main, sys.argv[1:]))
