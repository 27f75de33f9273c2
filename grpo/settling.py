"""Whether a curve has settled, and at which step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WINDOW, LEAST_WINDOW = 0.05, 10  # of a stage's steps, and at least so many
SETTLED_WITHIN = 0.05  # of the curve's range


@dataclass(frozen=True)
class Course:
    """What became of one metric: its means over the first and the last window, and its extremes."""

    start: float
    end: float
    lowest: float
    highest: float
    highest_mean: float  # over any window
    settled: int | str  # at this step, or why at none


def window(count: int) -> int:
    """How many steps of so many a mean is taken over."""
    return min(count, max(LEAST_WINDOW, round(WINDOW * count)))


def course(points: Sequence[tuple[int, float]]) -> Course:
    """points: (step, value), in the order of the steps, one at least."""
    values, width = [value for _, value in points], window(len(points))
    means = [sum(values[i : i + width]) / width for i in range(len(values) - width + 1)]
    low, high = min(values), max(values)
    return Course(means[0], means[-1], low, high, max(means), settling(points, means))


def settling(points: Sequence[tuple[int, float]], means: Sequence[float]) -> int | str:
    """The step from which the moving mean stays near its last value, or why there is none.

    Near is within SETTLED_WITHIN of the range of the values; the step is the middle of the first
    window that stays. A curve has to have stayed for a window beyond the last one to be settled.
    """
    values, width = [value for _, value in points], len(points) - len(means) + 1
    near = SETTLED_WITHIN * (max(values) - min(values))
    away = [i for i, mean in enumerate(means) if abs(mean - means[-1]) > near]
    if near == 0:
        return "flat"
    if len(values) < 2 * width:
        return "too few steps"
    if not away:
        return "flat"
    first = away[-1] + 1
    return points[first + width // 2][0] if first <= len(values) - 2 * width else "not settled"
