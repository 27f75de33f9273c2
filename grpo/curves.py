"""The picture of a run: small panels, one metric each, the raw line light and its trend dark."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INK, MUTED, GRID = "#22303c", "#8a96a3", "#e6eaee"
COLOURS = {"sft": "#c8702a", "grpo": "#1f6f8b"}
COLUMNS = 3

# (stage, metric, title): a panel is drawn if the metric was recorded.
PANELS = (
    ("sft", "loss", "SFT: loss"),
    ("sft", "grad_norm", "SFT: gradient norm"),
    ("grpo", "reward", "GRPO: reward"),
    ("grpo", "reward_std", "GRPO: spread of the rewards"),
    ("grpo", "completions/mean_length", "GRPO: completion length, tokens"),
    ("grpo", "completions/clipped_ratio", "GRPO: share of completions cut off"),
    ("grpo", "frac_reward_zero_std", "GRPO: share of groups without spread"),
    ("grpo", "kl", "GRPO: KL to the reference"),
    ("grpo", "entropy", "GRPO: entropy, nats a token"),
    ("grpo", "grad_norm", "GRPO: gradient norm"),
)
EVALUATION = "eval/accuracy"
SMALL = 20  # %; on an axis up to 100 a change from 2 to 4 would not be seen


def draw_curves(
    lines: Sequence[dict[str, Any]],
    path: Path,
    title: str,
    panels: Sequence[tuple[str, str, str]] = PANELS,
    settled: Mapping[tuple[str, str], int] | None = None,
) -> None:
    """Draw the lines of metrics.jsonl into a PNG, which is written aside and renamed.

    lines: {"stage", "step", metric: value or None}. Lines with eval/accuracy (0 to 1) become the
    first panel, over the steps of SFT and then GRPO.
    settled: by (stage, metric), the step at which to mark that a curve had settled.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [panel for panel in panels if _worth_a_panel(series(lines, *panel[:2]))]
    evaluated = any(line.get(EVALUATION) is not None for line in lines)
    count = max(len(panels) + evaluated, 1)
    rows, columns = math.ceil(count / COLUMNS), min(count, COLUMNS)
    style = {"font.size": 9, "text.color": INK, "axes.edgecolor": MUTED, "axes.labelcolor": MUTED,
             "xtick.color": MUTED, "ytick.color": MUTED, "axes.titlecolor": INK}  # fmt: skip
    with pyplot.rc_context(style):
        figure, grid = pyplot.subplots(
            rows, columns, squeeze=False, figsize=(4.2 * columns, 2.7 * rows + 0.5),
            layout="constrained",
        )  # fmt: skip
        axes = list(grid.flat)
        if evaluated:
            _draw_evaluations(axes.pop(0), lines)
        for ax, (stage, metric, name) in zip(axes, panels, strict=False):
            _draw_metric(ax, series(lines, stage, metric), stage, name)
            if settled and (stage, metric) in settled:
                _mark(ax, settled[stage, metric])
        for ax in axes[len(panels) :]:
            ax.set_axis_off()
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        aside = path.with_name(f".{path.name}.writing")
        try:
            figure.savefig(aside, dpi=130, format="png")
            os.replace(aside, path)
        finally:
            pyplot.close(figure)
            aside.unlink(missing_ok=True)


def series(lines: Sequence[dict[str, Any]], stage: str, metric: str) -> list[tuple[int, float]]:
    """(step, value) of one metric, in the order of the steps."""
    points = {line["step"]: line.get(metric) for line in lines if line["stage"] == stage
              and line.get(metric) is not None}  # fmt: skip
    return sorted(points.items())


def _worth_a_panel(points: list[tuple[int, float]]) -> bool:
    """Not one that is 0 throughout, as the KL is at beta 0."""
    return len(points) > 1 and any(value for _, value in points)


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """The mean over a window of `width` values about each; at the ends, over what there is of it.

    smoothed([0, 3, 0, 3], 3) == [1.5, 1.0, 2.0, 1.5]
    """
    half = width // 2
    windows = (values[max(i - half, 0) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _draw_metric(ax: Any, points: list[tuple[int, float]], stage: str, name: str) -> None:
    steps, values = zip(*points, strict=True)
    trend = smoothed(values, max(len(values) // 12, 1))
    ax.plot(steps, values, color=COLOURS[stage], alpha=0.28, linewidth=0.8)
    ax.plot(steps, trend, color=COLOURS[stage], linewidth=1.8)
    _tidy(ax, name)
    ax.annotate(f"{trend[-1]:.3g}", (steps[-1], trend[-1]), xytext=(4, 0),
                textcoords="offset points", va="center", color=COLOURS[stage],
                annotation_clip=False, fontweight="bold")  # fmt: skip


def _draw_evaluations(ax: Any, lines: Sequence[dict[str, Any]]) -> None:
    """Held-out accuracy over both stages, GRPO's steps counted on from the last one of SFT."""
    sft_steps = max((line["step"] for line in lines if line["stage"] == "sft"), default=0)
    courses = {
        stage: [(start + step, 100 * value) for step, value in series(lines, stage, EVALUATION)]
        for stage, start in (("sft", 0), ("grpo", sft_steps))
    }
    if courses["grpo"]:
        courses["grpo"] = courses["sft"][-1:] + courses["grpo"]  # it starts where SFT ended
    for stage, points in courses.items():
        if points:
            ax.plot(*zip(*points, strict=True), color=COLOURS[stage], marker="o", markersize=4.5,
                    linewidth=1.8, label=stage.upper())  # fmt: skip
    ends = dict(course[i] for course in courses.values() if course for i in (0, -1))
    highest = max(y for points in courses.values() for _, y in points)
    decimals = 1 if highest < SMALL else 0
    for x, y in ends.items():
        side = "left" if x == min(ends) else "right"
        ax.annotate(f"{y:.{decimals}f}%", (x, y), xytext=(0, 8), textcoords="offset points",
                    ha=side, color=INK, fontweight="bold")  # fmt: skip
    if sft_steps:
        ax.axvline(sft_steps, color=MUTED, linewidth=0.8, linestyle=":")
    _tidy(ax, "Held-out problems solved, %")
    if highest < SMALL:
        ax.set_ylim(0, max(1.4 * highest, 1))
    else:
        ax.set_ylim(0, 112)
        ax.set_yticks(range(0, 101, 25))
    ax.legend(frameon=False, loc="lower right", labelcolor=INK)


def _mark(ax: Any, step: int) -> None:
    ax.axvline(step, color=MUTED, linewidth=0.8, linestyle=":")
    ax.annotate(f"settled at {step}", (step, 0.02), xycoords=("data", "axes fraction"),
                xytext=(3, 0), textcoords="offset points", color=MUTED, fontsize=8)  # fmt: skip


def _tidy(ax: Any, name: str) -> None:
    ax.set_title(name, loc="left", fontsize=9.5)
    ax.set_xlabel("step", fontsize=8)
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(length=0, labelsize=8)
    ax.margins(x=0.02)
    ax.locator_params(axis="x", nbins=5, integer=True)
