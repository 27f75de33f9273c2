"""The same questions, answered by several models side by side:  python -m grpo.compare RUN

In the terminal, and with --html as a page. Since all columns answer the same questions, two of them
are compared by the questions on which they differ: McNemar's test, in its exact form.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from grpo.columns import Column, columns_of
from grpo.errors import UserError, exit_status
from grpo.flags import FlagParser, with_dashes
from grpo.interval import wilson_interval
from grpo.page import around, element, page, table, write_page

GAINED, LOST, BOTH_RIGHT, BOTH_WRONG = "gained", "lost", "both right", "both wrong"
OUTCOMES = {(False, True): GAINED, (True, False): LOST,
            (True, True): BOTH_RIGHT, (False, False): BOTH_WRONG}  # fmt: skip
SHOWN = {"all": tuple(OUTCOMES.values()), "changed": (GAINED, LOST), GAINED: (GAINED,),
         LOST: (LOST,)}  # fmt: skip
GAP = " | "
NARROWEST = 20  # characters; columns that would be narrower stand one under the other


@dataclass(frozen=True)
class Question:
    """One prompt with the row of each column; number: its place in the evaluation, from 1."""

    number: int
    rows: list[dict[str, Any]]

    @property
    def text(self) -> str:
        return self.rows[0]["prompt"][-1]["content"]

    @property
    def outcome(self) -> str:
        """What became of the first column's verdict in the last one."""
        return OUTCOMES[bool(self.rows[0]["correct"]), bool(self.rows[-1]["correct"])]

    @property
    def about(self) -> str:
        """The line above it; the gold answer is known where a row holds it."""
        gold = next((f"gold answer {r['answer']}" for r in self.rows if "answer" in r), "")
        outcome = self.outcome if len(self.rows) > 1 else ""
        parts = (f"question {self.number}", self.rows[0].get("level"), outcome, gold)
        return " · ".join(str(part) for part in parts if part)


def join(columns: Sequence[Column]) -> list[Question]:
    """The questions that all columns answer, in the first one's order, joined by their prompts."""
    others = [column.by_prompt() for column in columns]
    return [
        Question(row.get("index", place) + 1, [other[key] for other in others])
        for place, (key, row) in enumerate(others[0].items())
        if all(key in other for other in others)
    ]


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided p-value of the exact McNemar test: were a gain and a loss equally likely, how often
    would they be at least this unequal? (McNemar 1947; the sign test on what differs.)

    >>> mcnemar(5, 0)
    0.0625
    """
    differ = gained + lost
    tail = sum(math.comb(differ, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**differ)


def share_with_interval(correct: int, count: int) -> str:
    """A share and its 95% interval, as 91.5% (86.8–94.6)."""
    low, high = wilson_interval(correct, count)
    return f"{correct / max(count, 1):.1%} ({100 * low:.1f}–{100 * high:.1f})"


def verdict(row: dict[str, Any]) -> str:
    """correct, or wrong and why, as the row has it."""
    if row["correct"]:
        return "correct"
    why = f"wrong: {row['reason']}" if row.get("reason") else "wrong"
    return f"{why} (right by the lenient judge)" if row.get("correct_lenient") else why


# ---- the counts ---------------------------------------------------------------------------------


def accuracy_table(columns: Sequence[Column], questions: Sequence[Question]) -> list[list[str]]:
    """A row a column: its name, its share of right answers and the lenient one, if it is known."""
    lenient = any("correct_lenient" in row for q in questions for row in q.rows)
    head = ["", f"right of {len(questions)}, with its 95% interval"]
    lines = [head + ["by the lenient judge"] * lenient]
    for place, column in enumerate(columns):
        rows, cells = [q.rows[place] for q in questions], [column.name]
        for key in ("correct", "correct_lenient")[: 1 + lenient]:
            known = [bool(row[key]) for row in rows if key in row]
            cells.append(share_with_interval(sum(known), len(known)) if known else "-")
        lines.append(cells)
    return lines


def counts(columns: Sequence[Column], questions: Sequence[Question]) -> str:
    """What changed from the first column to the last, and how likely chance alone would do it."""
    found = Counter(q.outcome for q in questions)
    p = mcnemar(found[GAINED], found[LOST])
    chance = f"p = {p:.4f}" if p >= 0.0001 else "p < 0.0001"
    each = ", ".join(f"{found[outcome]} {outcome}" for outcome in OUTCOMES.values())
    return f"{columns[0].name} → {columns[-1].name}: {each}; exact McNemar test: {chance}"


# ---- the terminal -------------------------------------------------------------------------------


def printable(text: str) -> str:
    """Whatever a terminal would obey, or could not show, is written as its escape.

    >>> printable("a\\x1b[2J")
    'a\\\\x1b[2J'
    """
    shown = (c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode()
             for c in text.expandtabs(4))  # fmt: skip
    return "".join(shown)


def wrapped(text: str, width: int) -> list[str]:
    """The text's own lines, each broken to the width."""
    lines = printable(text).split("\n")
    broken = (textwrap.wrap(line, width, break_on_hyphens=False) for line in lines)
    return [part for parts in broken for part in parts or [""]]


def beside(cells: Sequence[str], width: int) -> list[str]:
    """Texts side by side in so many characters, or one under the other where that is too narrow."""
    each = (width - len(GAP) * (len(cells) - 1)) // len(cells)
    if each < NARROWEST:
        return [line for cell in cells for line in [*wrapped(cell, width), ""]][:-1]
    parts = zip_longest(*(wrapped(cell, each) for cell in cells), fillvalue="")
    return [GAP.join(part.ljust(each) for part in line).rstrip() for line in parts]


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The rows of a table as lines, each column as wide as its widest cell."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()


def in_terminal(
    columns: Sequence[Column], questions: Sequence[Question], shown: Sequence[Question], width: int
) -> Iterator[str]:
    """The lines to print: the shown questions, then the counts over all of them."""
    for question in shown:
        yield "─" * width
        yield from wrapped(question.about, width)
        yield from wrapped(question.text, width)
        yield ""
        cells = [f"[{column.name}] {verdict(row)}\n{row['completion']}"
                 for column, row in zip(columns, question.rows, strict=True)]  # fmt: skip
        yield from beside(cells, width)
    yield "─" * width
    yield from aligned(accuracy_table(columns, questions))
    yield counts(columns, questions)


# ---- the page -----------------------------------------------------------------------------------


def questions_html(columns: Sequence[Column], shown: Sequence[Question]) -> str:
    """The questions with their answers side by side, or one under the other on a phone."""
    return "\n".join(_question_html(columns, question) for question in shown)


def _question_html(columns: Sequence[Column], question: Question) -> str:
    cards = []
    for column, row in zip(columns, question.rows, strict=True):
        parts = [
            element("b", column.name),
            " ",
            element("span", verdict(row), "verdict"),
            element("pre", row["completion"]),
        ]
        cards.append(around("div", parts, f"answer {'correct' if row['correct'] else 'wrong'}"))
    parts = [element("p", question.about, "muted"), element("pre", question.text)]
    return around("section", [*parts, around("div", cards, "answers")], "question")


def comparison_page(
    columns: Sequence[Column], questions: Sequence[Question], shown: Sequence[Question]
) -> str:
    head, *rows = accuracy_table(columns, questions)
    parts = [
        table(head, rows),
        element("p", counts(columns, questions)),
        element("h2", f"{len(shown)} of {len(questions)} questions"),
        questions_html(columns, shown),
    ]
    return page(f"Answers of {', '.join(c.name for c in columns)}", "\n".join(parts))


# ---- the command --------------------------------------------------------------------------------


def build_parser() -> FlagParser:
    parser = FlagParser(
        prog="grpo.compare",
        usage="python -m grpo.compare WHAT [WHAT ...] [--setting VALUE ...]",
        description="Show the same questions as several models answered them, side by side.",
        epilog="All other flags are those of train.py, for a model that has to answer. Without "
        "--task, it answers under the settings of the run that is named with it or that it is in.",
    )
    parser.add_argument(
        "what", nargs="+", metavar="WHAT",
        help="runs/x: every evaluation of a run, a column each; runs/x:after_sft: one of them; an "
        "evaluations/*.jsonl; a model directory, which answers now",
    )  # fmt: skip
    parser.add_argument(
        "--examples", type=int, default=10, metavar="N",
        help="how many questions are shown, and answered by a model directory [10]",
    )  # fmt: skip
    parser.add_argument(
        "--only", choices=tuple(SHOWN), default="all",
        help="show those on which the last column differs from the first [all]",
    )  # fmt: skip
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page, too")
    parser.add_argument("--task", default=argparse.SUPPRESS, metavar="NAME",
                        help="what a model directory has to answer")  # fmt: skip
    return parser


def compare(argv: Sequence[str]) -> int:
    """Print the comparison and write the page; raises UserError."""
    sys.stdout.reconfigure(errors="replace")  # a terminal may know no "→"
    given, others = build_parser().parse_known_args([with_dashes(word) for word in argv])
    if given.examples < 1:
        raise UserError(f"--examples: '{given.examples}' is out of range; it must be above 0")
    if given.html and not given.html.parent.is_dir():
        raise UserError(f"--html {given.html}: there is no folder {given.html.parent}")
    task = ["--task", given.task] if "task" in given else []
    columns = columns_of(given.what, ["--eval-examples", str(given.examples), *task, *others])
    if others and all(column.source for column in columns):
        raise UserError(f"{others[0]}: no such flag, nor a model to answer by train.py's; see -h")
    if len(given.what) > 1:
        columns = [Column(f"{c.source}:{c.name}" if c.source else c.name, c.rows) for c in columns]
    if len(columns) < 2:
        raise UserError(f"{given.what[0]}: only {columns[0].name} is there; name one more")
    questions = join(columns)
    if not questions:
        raise UserError(
            f"{', '.join(c.name for c in columns)}: they have no question in common; compare "
            "answers to the same task under the same settings"
        )
    shown = [q for q in questions if q.outcome in SHOWN[given.only]][: given.examples]
    width = shutil.get_terminal_size().columns
    print("\n".join(in_terminal(columns, questions, shown, width)))
    if given.html:
        write_page(given.html, comparison_page(columns, questions, shown))
        print(f"the page is {given.html}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(compare, sys.argv[1:]))
