"""The maze rewards in their three readings, and how any task's rewards are called and summed."""

from __future__ import annotations

import json
import math
import time
import warnings
from pathlib import Path

import pytest

from data import Example
from data.maze_grid import maze_from_edges
from grpo.errors import UserError
from rewards import score, weighted_sum
from rewards.maze import MazeAnswer, answer_text, reward_functions

FOLDER = Path(__file__).parent / "cases"
MAZE_CASES = json.loads((FOLDER / "maze_cases.json").read_text())["cases"]
SUM_CASES = json.loads((FOLDER / "advantage_cases.json").read_text())["cases"]

GOLD = "<|right|><|up|>"
NAMES = {
    "correctness": "correctness",
    "validity": "validity",
    "strict": "strict_format",
    "soft": "soft_format",
    "tags": "tags",
}


def example(path: str = GOLD, thinks: bool = True, maze=None) -> Example:
    return Example(messages=[], target="", answer=MazeAnswer(path, thinks, maze))


@pytest.mark.parametrize("case", [c for c in MAZE_CASES if c["kind"] == "reward"],
                         ids=lambda c: c["id"])  # fmt: skip
@pytest.mark.parametrize("mode", ["documented", "verbatim", "v2"])
def test_case_reward(case, mode):
    """Every value, the unsure ones in the cases' first reading: white space between moves is
    free, an empty answer is invalid, nothing is put before <think>, the first </think> counts."""
    expected = case["expected"]["v1" if mode == "verbatim" else mode]
    text, gold = case["input"]["completion"], case["input"]["gold"]
    values = {
        name: function(text, example(gold)) for name, function in reward_functions(mode).items()
    }
    for name, ours in NAMES.items():
        assert values.get(ours) == pytest.approx(expected[name], abs=1e-9), name
    assert sum(values.values()) == pytest.approx(expected["total"], abs=1e-9)


def test_an_unknown_mode_is_refused():
    with pytest.raises(UserError, match="documented, verbatim, v2"):
        reward_functions("v3")


def test_a_direct_answer_needs_no_tags():
    assert answer_text(GOLD, thinks=False) == GOLD
    assert answer_text("<think>\n" + GOLD, thinks=False) == "", "still thinking"
    for mode in ("documented", "verbatim", "v2"):
        functions = reward_functions(mode, thinks=False)
        assert list(functions) == ["correctness", "validity"]
        assert functions["correctness"](GOLD, example(thinks=False)) > 0
        assert functions["correctness"](GOLD, example(thinks=True)) == 0


def test_in_a_maze_with_loops_every_shortest_path_is_right():
    edges = [((0, 0), (0, 1)), ((0, 1), (1, 1)), ((0, 0), (1, 0)), ((1, 0), (1, 1))]
    maze = maze_from_edges(3, edges, (0, 0), (1, 1))
    right = reward_functions("documented", thinks=False)["correctness"]
    asked = example("<|right|><|down|>", False, maze)
    assert right("<|down|><|right|>", asked) == right("<|right|><|down|>", asked) == 2.0
    assert right("<|down|><|up|>", asked) == 0.0
    assert right("<|down|> and <|right|>", asked) == 0.0
    assert right("<|right|><|left|><|right|><|down|>", asked) == 0.0


LONG = {
    "closing tags": "<think>\n" + "\n</think>\n\n" * 9_000,
    "opening tags": "<think>\n" * 12_500,
    "newlines": "<think>\n" + "\n" * 100_000,
    "blanks": "<think>\nx\n</think>\n\n" + " " * 100_000 + "x",
    "moves": "<think>\nx\n</think>\n\n" + "<|up|>" * 16_000 + "<|u",
    "half tokens": "<think>\nx\n</think>\n\n" + "<|" * 50_000,
    "bars": "<think>\nx\n</think>\n\n<" + "|" * 100_000,
    "one line": "<think>" + "a" * 100_000,
}


@pytest.mark.parametrize("what", LONG)
def test_long_outputs_are_scored_in_linear_time(what):
    """A plain pattern with two lazy dots is quadratic here: minutes for 100,000 characters."""
    for mode in ("documented", "verbatim", "v2"):
        for name, function in reward_functions(mode).items():
            best = math.inf
            for _ in range(3):  # the machine may be busy
                start = time.perf_counter()
                function(LONG[what], example())
                best = min(best, time.perf_counter() - start)
            assert best < 0.05, f"{mode} {name}"


# ---------------------------------------------------------------------------------------------
# score


def test_score_calls_every_function_on_every_completion():
    table = score(
        ["a", "bbb"],
        [example(), example()],
        {"length": lambda text, ex: len(text), "yes": lambda text, ex: True},
    )
    assert table == {"length": [1.0, 3.0], "yes": [1.0, 1.0]}
    assert all(type(value) is float for values in table.values() for value in values)


def test_none_and_nan_mean_not_scored_and_nan_is_said():
    with pytest.warns(UserWarning, match="'odd' returned NaN"):
        table = score(["a", "b"], [example()] * 2, {"odd": lambda t, e: math.nan})
    assert table == {"odd": [None, None]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert score(["a"], [example()], {"f": lambda t, e: None}) == {"f": [None]}


def _raise(text, example):
    if text == "c":
        raise ValueError("bad text")
    return 0.0


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_raise, ["my_reward", "bad text", "2"]),
        (lambda t, e: math.inf, ["my_reward", "infinity"]),
        (lambda t, e: 10**400, ["my_reward", "infinity"]),
        (lambda t, e: [1.0], ["my_reward", "[1.0]", "number"]),
        (lambda t, e: "1.0", ["my_reward", "'1.0'", "number"]),
        (lambda t, e: 1j, ["my_reward", "number"]),
    ],
)
def test_a_bad_reward_is_named(function, words):
    with pytest.raises(UserError) as error:
        score(["a", "b", "c"], [example()] * 3, {"my_reward": function})
    for word in words:
        assert word in str(error.value)


def test_a_hanging_reward_is_given_up_and_the_others_are_kept():
    """Even if it catches every Exception that it is interrupted with."""

    def hangs(text, example):
        while text == "b":
            try:
                time.sleep(60)
            except Exception:
                continue
        return 1.0

    start = time.perf_counter()
    with pytest.warns(UserWarning, match="my_reward"):
        table = score(["a", "b", "c"], [example()] * 3, {"my_reward": hangs}, timeout=0.2)
    assert table == {"my_reward": [1.0, None, 1.0]}
    assert time.perf_counter() - start < 10


def test_the_alarm_is_off_after_scoring():
    score(["a"], [example()], {"f": lambda t, e: 1.0}, timeout=0.05)
    time.sleep(0.1)  # an alarm left on would end the process here


# ---------------------------------------------------------------------------------------------
# weighted_sum


def _number(value):
    return float(value) if isinstance(value, str) else value


@pytest.mark.parametrize("case", [c for c in SUM_CASES if "rewards_per_function" in c["input"]
                                  and "rewards" in c["expected"]],
                         ids=lambda c: c["id"])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*NaN")
def test_case_weighted_sum(case):
    rows = case["input"]["rewards_per_function"]
    names = [f"f{k}" for k in range(len(rows[0]))]
    table = {name: [_number(row[k]) for row in rows] for k, name in enumerate(names)}
    weights = case["input"]["weights"]
    expected = case["expected"]["rewards"]
    for given in (weights, dict(zip(names, weights, strict=True))):
        totals = weighted_sum(table, given, len(rows))
        assert [t is None for t in totals] == [e is None for e in expected]
        assert totals == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("case", [c for c in SUM_CASES if c["kind"] == "error"
                                  and c["id"] != "error/group-size-does-not-divide"],
                         ids=lambda c: c["id"])  # fmt: skip
def test_case_weighted_sum_error(case):
    """(Whether groups divide the completions is for the advantages to say.)"""
    given = case["input"]
    if "weights" in given:
        table = {name: [0.0] * given["completions"] for name in given["function_names"]}
        weights = given["weights"]
    else:
        returned = given["returned"]
        if isinstance(returned, list):
            returned = [_number(value) for value in returned]
        table, weights = {given["function_name"]: returned}, {}
    with pytest.raises(UserError) as error:
        weighted_sum(table, weights, given["completions"])
    assert "\n" not in str(error.value)
    for word in case["expected"]["message_mentions"]:
        assert word in str(error.value)


def test_a_misspelt_weight_is_refused_with_the_right_name():
    with pytest.raises(UserError, match="'corectness'; did you mean 'correctness'"):
        weighted_sum({"correctness": [1.0]}, {"corectness": 2.0}, 1)
    with pytest.raises(UserError, match="finite"):
        weighted_sum({"correctness": [1.0]}, {"correctness": math.inf}, 1)


def test_a_completion_scored_only_by_a_function_that_is_off_is_not_scored():
    assert weighted_sum({"a": [None, 1.0], "b": [5.0, 5.0]}, {"b": 0.0}, 2) == [None, 1.0]
