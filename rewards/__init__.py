"""From completions to one reward each: call every function, then sum with weights.

A task's functions are plain (completion_text, example) -> number. They run here one completion
at a time, on text that they cannot change for one another.
"""

from __future__ import annotations

import math
import numbers
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from types import FrameType
from typing import Any

from data import Example, RewardFunction
from grpo.errors import UserError


class _TimedOut(BaseException):
    """Not an Exception, so that a reward's own `except Exception` does not swallow it."""


def score(
    texts: Sequence[str],
    examples: Sequence[Example],
    reward_functions: Mapping[str, RewardFunction],
    timeout: float = 0.0,
) -> dict[str, list[float | None]]:
    """What each function says of each completion: {name: [N]}.

    texts, examples: [N], the completion and the problem it answers. None means "does not apply";
    NaN is taken as None, with a warning. With timeout > 0 a function may take so many seconds a
    completion, after which that value is None, with a warning; this needs the main thread of a
    system with SIGALRM and is off elsewhere.

    Raises UserError naming the function and the completion's index if it raises, if it returns
    infinity, or if it returns anything that is not a number.
    """
    if len(texts) != len(examples):
        raise UserError(f"{len(texts)} completions but {len(examples)} examples to score them with")
    with _alarm(timeout) as seconds:
        return {
            name: [
                _call(name, function, index, text, example, seconds)
                for index, (text, example) in enumerate(zip(texts, examples, strict=True))
            ]
            for name, function in reward_functions.items()
        }


def _call(
    name: str, function: RewardFunction, index: int, text: str, example: Example, seconds: float
) -> float | None:
    try:
        value = _within(seconds, function, text, example)
    except _TimedOut:
        warnings.warn(
            f"reward '{name}' took longer than {seconds:g} s for a completion: it counts as not "
            "scored (--reward-timeout)",
            stacklevel=2,
        )
        return None
    except Exception as error:
        raise UserError(
            f"reward '{name}' raised {type(error).__name__}: {error} (completion {index})"
        ) from error
    return _number(name, value, f"for completion {index}")


def _number(name: str, value: Any, where: str) -> float | None:
    """A reward as a finite float, or None where there is none."""
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        raise UserError(
            f"reward '{name}' returned {value!r:.80} {where}; it must return a number or None"
        )
    try:
        value = float(value)
    except OverflowError:
        value = math.inf
    if math.isinf(value):
        raise UserError(f"reward '{name}' returned infinity {where}; it must return finite numbers")
    if math.isnan(value):
        warnings.warn(f"reward '{name}' returned NaN: it counts as not scored", stacklevel=2)
        return None
    return value


# ---------------------------------------------------------------------------------------------
# The time limit


@contextmanager
def _alarm(timeout: float) -> Iterator[float]:
    """Yields the limit that can be kept here: timeout, or 0 where there is no alarm signal."""
    in_main = threading.current_thread() is threading.main_thread()
    if timeout <= 0 or not in_main or not hasattr(signal, "setitimer"):
        yield 0.0
        return

    def ring(signum: int, frame: FrameType | None) -> None:
        raise _TimedOut

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield timeout
    finally:
        signal.signal(signal.SIGALRM, before)


def _within(seconds: float, function: RewardFunction, text: str, example: Example) -> Any:
    if not seconds:
        return function(text, example)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        return function(text, example)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


# ---------------------------------------------------------------------------------------------
# The sum


def weighted_sum(
    table: Mapping[str, Sequence[float | None]],
    weights: Mapping[str, float] | Sequence[float],
    completions: int,
) -> list[float | None]:
    """One reward a completion: sum of weight * value over the functions that apply to it.

    table: {name: [N]}, as `score` gives it. weights: by name, an absent name weighs 1; or one for
    each function in the table's order. A weight of 0 switches a function off. A completion that
    no function scored is None, not 0: it must stay out of its group's mean.

        weighted_sum({"a": [2.0, None], "b": [1.0, None]}, {"b": 0.5}, 2) == [2.5, None]

    Raises UserError for weights of unknown functions or of the wrong number, for a function
    without exactly one value a completion, and for values that are no finite numbers.
    """
    weights = _weights(table, weights)
    columns = {name: _column(name, values, completions) for name, values in table.items()}
    totals: list[float | None] = []
    for row in range(completions):
        terms = [
            weights[name] * values[row]
            for name, values in columns.items()
            if weights[name] != 0 and values[row] is not None
        ]
        totals.append(math.fsum(terms) if terms else None)
    return totals


def _column(name: str, values: Any, completions: int) -> list[float | None]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise UserError(
            f"reward '{name}' returned {values!r:.80}; it must return a list of {completions} "
            "numbers, one a completion"
        )
    if len(values) != completions:
        raise UserError(
            f"reward '{name}' returned {len(values)} values for {completions} completions"
        )
    return [_number(name, value, f"for completion {i}") for i, value in enumerate(values)]


def _weights(
    table: Mapping[str, Any], weights: Mapping[str, float] | Sequence[float]
) -> dict[str, float]:
    if not isinstance(weights, Mapping):
        if len(weights) != len(table):
            raise UserError(
                f"{len(weights)} reward weights for {len(table)} reward functions "
                f"({', '.join(table)}); give one for each"
            )
        weights = dict(zip(table, weights, strict=True))
    for name, weight in weights.items():
        if name not in table:
            near = get_close_matches(name, list(table), n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(table)}"
            raise UserError(f"--reward-weights: no reward is called '{name}'; {hint}")
        if not math.isfinite(weight):
            raise UserError(f"--reward-weights: '{name}' must be a finite number, not {weight}")
    return {name: float(weights.get(name, 1.0)) for name in table}
