"""The log analysis of a run:  python -m grpo.report runs/x

Which rewards have settled, and when; what else the steps tell; the evaluations with their
intervals; ten questions as each model answered them. Printed, drawn, and as one page.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data import table_rows
from grpo.columns import Column, read_lines, read_object, saved_columns
from grpo.compare import aligned, join, questions_html, share_with_interval
from grpo.curves import PANELS, draw_curves, series
from grpo.errors import UserError, exit_status
from grpo.flags import FlagParser
from grpo.page import element, escaped, page, table, write_page
from grpo.settling import Course, course, window

METRICS = {
    "sft": ("loss", "grad_norm", "tokens_per_second/train"),
    "grpo": (
        "completions/mean_length",
        "completions/clipped_ratio",
        "kl",
        "reward_std",
        "frac_reward_zero_std",
        "entropy",
        "grad_norm",
        "tokens_per_second/rollout",
        "tokens_per_second/train",
    ),
}
SETTINGS = ("task", "model", "preset", "seed", "prompts_per_step", "num_generations", "max_steps",
            "learning_rate", "beta", "loss_type")  # fmt: skip
NEARLY_ALL = 0.9  # of the groups, or of the completions
FAR = 1.0  # nats a token to the reference: another model, not a better one
QUESTIONS = 10

Curve = tuple[str, str]  # stage, metric


def analyse(lines: Sequence[dict[str, Any]]) -> dict[Curve, Course]:
    """The course of every metric that was recorded, the rewards first."""
    curves = [("grpo", name) for name in ("reward", *reward_names(lines))]
    curves += [(stage, metric) for stage in ("grpo", "sft") for metric in METRICS[stage]]
    found = ((curve, series(lines, *curve)) for curve in curves)
    return {curve: course(points) for curve, points in found if points}


def reward_names(lines: Sequence[dict[str, Any]]) -> list[str]:
    """rewards/<name>/mean of each reward function, in the order of the task."""
    names = dict.fromkeys(name for line in lines if line["stage"] == "grpo" for name in line)
    return [name for name in names if name.startswith("rewards/") and name.endswith("/mean")]


# ---- what is taken for a fault, and what is one -------------------------------------------------


def right_after_all(lines: Sequence[dict[str, Any]], config: Mapping[str, Any]) -> Iterator[str]:
    """What looks wrong and is not, where this run shows it."""
    clipped = [value for side in ("low", "high")
               for _, value in series(lines, "grpo", f"clip_ratio/{side}_mean")]  # fmt: skip
    if clipped and not any(clipped) and config.get("num_iterations", 1) == 1:
        yield (
            "The loss is 0, or nearly, at the start and the clip ratio is always 0: right with one "
            "update a rollout (--num-iterations 1). The policy that is updated is the one that "
            "sampled, so every ratio is 1, and the advantages of a group add up to 0; the gradient "
            "is not 0."
        )
    kl = [value for _, value in series(lines, "grpo", "kl")]
    if kl and not any(kl) and config.get("beta") == 0:
        yield "The KL is 0 throughout: with --beta 0 there is no reference to measure it to."


def faults(lines: Sequence[dict[str, Any]], courses: Mapping[Curve, Course]) -> Iterator[str]:
    """What is wrong with this run, each with where to look."""
    for name in reward_names(lines):
        values = [value for _, value in series(lines, "grpo", name)]
        if values and not any(last := values[-window(len(values)) :]):
            yield (
                f"{name} is 0 in each of the last {len(last)} steps: what is never rewarded is "
                "never learned. Of a format reward it is nearly always text before or after the "
                "tags, or tags that the model never writes: look in completions/."
            )
    same = courses.get(("grpo", "frac_reward_zero_std"))
    if same and same.end > NEARLY_ALL:
        yield (
            f"In {same.end:.0%} of the groups at the end all rewards are equal, and such a group "
            "teaches nothing: the run is over, if it solves the problems by now; if it does not, "
            "they are too hard for this model, or the temperature is too low."
        )
    kl = courses.get(("grpo", "kl"))
    if kl and kl.highest_mean > FAR:
        yield (
            f"The KL to the reference went up to {kl.highest_mean:.3g} nats a token (a mean over "
            "some steps): the policy has left its reference. A lower --learning-rate or a higher "
            "--beta holds it."
        )
    cut = courses.get(("grpo", "completions/clipped_ratio"))
    if cut and cut.end > NEARLY_ALL:
        yield (
            f"{cut.end:.0%} of the completions at the end are cut off by their length: raise "
            "--max-completion-length, or see in completions/ why the model does not stop."
        )


# ---- the tables ---------------------------------------------------------------------------------


def course_table(courses: Mapping[Curve, Course]) -> list[list[str]]:
    """A row a metric; those of SFT have its name before theirs."""
    rows = [["", "start", "end", "lowest", "highest", "settled at step"]]
    for (stage, metric), c in courses.items():
        numbers = [f"{value:.4g}" for value in (c.start, c.end, c.lowest, c.highest)]
        rows.append([metric if stage == "grpo" else f"{stage}: {metric}", *numbers, str(c.settled)])
    return rows


def evaluation_table(results: Mapping[str, Any], columns: Sequence[Column]) -> list[list[str]]:
    """The evaluations side by side, a row a level; shares are with their 95% intervals.

    results: results.json; columns: the answers, for the lenient judge's verdicts by level.
    """
    found = {n: r for n, r in results.items() if isinstance(r, dict) and "accuracy" in r}
    answers = {column.name: column.rows for column in columns}
    rows = [["", *found]]
    for level in (None, *dict.fromkeys(n for r in found.values() for n in r.get("levels", {}))):
        parts = [r if level is None else r["levels"].get(level, {}) for r in found.values()]
        strict = [(p["correct"], p["examples"]) if p else None for p in parts]
        lenient = [_lenient(answers.get(name, ()), level) for name in found]
        rows.append([level or "all", *map(_cell, strict)])
        if any(lenient):
            rows.append([f"{level or 'all'}, lenient", *map(_cell, lenient)])
        for name in dict.fromkeys(n for p in parts for n in p.get("measures", {})):
            means = [p.get("measures", {}).get(name) for p in parts]
            shown = ["-" if mean is None else f"{mean:.3f}" for mean in means]
            rows.append([f"{level or 'all'}, {name}", *shown])
    for name in dict.fromkeys(n for r in found.values() for n in r if n.startswith("pass@")):
        rows.append([name, *(f"{r[name]:.1%}" if name in r else "-" for r in found.values())])
    return rows if found else []


def _lenient(rows: Sequence[dict[str, Any]], level: str | None) -> tuple[int, int] | None:
    """(right, all) by the lenient judge, of one level or None for all; None where there is none."""
    known = [r["correct_lenient"] for r in rows
             if "correct_lenient" in r
             and (level is None or level in table_rows(r.get("level") or ""))]  # fmt: skip
    return (sum(map(bool, known)), len(known)) if known else None


def _cell(counted: tuple[int, int] | None) -> str:
    return f"{share_with_interval(*counted)} of {counted[1]}" if counted else "-"


def times(lines: Sequence[dict[str, Any]]) -> str:
    """How many steps each stage has done, and how long they took."""
    parts = []
    for stage in ("sft", "grpo"):
        if points := series(lines, stage, "step_time"):
            minutes = sum(seconds for _, seconds in points) / 60
            parts.append(f"{stage}: {len(points)} steps in {minutes:.1f} minutes")
    return "; ".join(parts) + " (without evaluations and saving)"


# ---- the report ---------------------------------------------------------------------------------


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; one torn by a kill is left out. Raises UserError for none."""
    for name in ("config.json", "metrics.jsonl"):
        if not (run / name).is_file():
            raise UserError(f"{run}: there is no {name} in it; give the folder of a run")
    lines = [line for line in read_lines(run / "metrics.jsonl")
             if isinstance(line.get("step"), int) and "stage" in line]  # fmt: skip
    if not any("step_time" in line for line in lines):
        raise UserError(f"{run}: no step is done yet; there is nothing to report")
    return lines


def draw(lines: Sequence[dict[str, Any]], courses: Mapping[Curve, Course], title: str, png: Path):
    """The picture of the run with a panel for each reward, and where each of them settled."""
    rewards = [("grpo", name) for name in reward_names(lines)]
    place = next(i for i, panel in enumerate(PANELS) if panel[1] == "reward") + 1
    panels = [*PANELS[:place], *((*curve, f"GRPO: {curve[1]}") for curve in rewards)]
    settled = {curve: courses[curve].settled for curve in [("grpo", "reward"), *rewards]
               if curve in courses and isinstance(courses[curve].settled, int)}  # fmt: skip
    try:
        draw_curves(lines, png, title, [*panels, *PANELS[place:]], settled)
    except OSError as error:
        raise UserError(f"{png}: cannot be written ({error.strerror}); name another") from error


def report_page(
    title: str,
    settings: str,
    warnings: Sequence[tuple[str, str]],
    png: bytes,
    tables: Mapping[str, Sequence[Sequence[str]]],
    columns: Sequence[Column],
) -> str:
    """warnings: (kind, text), kind "fault" or "note"; tables: by their headings, the head first."""
    parts = [element("p", settings, "muted")]
    parts += [element("p", text, kind) for kind, text in warnings]
    picture = base64.b64encode(png).decode()
    parts.append(f'<img alt="Curves of {escaped(title)}" src="data:image/png;base64,{picture}">')
    for heading, (head, *rows) in tables.items():
        parts += [element("h2", heading), table(head, rows)]
    questions = join(columns)[:QUESTIONS] if columns else []
    if questions:
        parts.append(element("h2", f"The first {len(questions)} held-out questions"))
        parts.append(questions_html(columns, questions))
    return page(title, "\n".join(parts))


def report(argv: Sequence[str]) -> int:
    """Print the analysis, draw it, and write the page; raises UserError."""
    sys.stdout.reconfigure(errors="replace")  # a terminal may know no "·"
    parser = FlagParser(
        prog="grpo.report", usage="python -m grpo.report RUN [--output FILE] [--png FILE]",
        description="Analyse a run's log: what settled and when, the evaluations, some answers.",
    )  # fmt: skip
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the page [RUN/report.html]")
    parser.add_argument("--png", type=Path, metavar="FILE", help="the picture [RUN/report.png]")
    given = parser.parse_args(argv)
    run, lines = given.run, read_metrics(given.run)
    output, png = given.output or run / "report.html", given.png or run / "report.png"
    config = read_object(run / "config.json")
    results = read_object(run / "results.json") if (run / "results.json").is_file() else {}
    columns, courses = saved_columns(run), analyse(lines)

    name = run.resolve().name
    settings = " · ".join(f"{key} {config[key]}" for key in SETTINGS if key in config)
    settings += f" · {times(lines)}"
    warnings = [("fault", text) for text in faults(lines, courses)]
    warnings += [("note", text) for text in right_after_all(lines, config)]
    tables = {"The steps": course_table(courses)}
    if evaluations := evaluation_table(results, columns):
        tables["The evaluations, with 95% intervals"] = evaluations

    draw(lines, courses, name, png)
    write_page(output, report_page(name, settings, warnings, png.read_bytes(), tables, columns))
    print(settings)
    for rows in tables.values():
        print(*aligned(rows), sep="\n", end="\n\n")
    for kind, text in warnings:
        print(f"{'warning' if kind == 'fault' else 'note'}: {text}")
    print(f"the report is {output}, its picture {png}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(report, sys.argv[1:]))
